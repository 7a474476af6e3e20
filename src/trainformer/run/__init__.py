"""What every way into the library shares: settings, and the session that runs them.

What stands here knows neither torch nor jax; `session.torch` and `session.jax` do.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.run.api": ["run_of"],
        "trainformer.run.torch.run": ["TorchRun"],
        "trainformer.run.torch.settings": ["RunSettings"],
    },
)
