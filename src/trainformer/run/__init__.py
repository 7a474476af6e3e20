"""One run, shared by all entry points: settings, set-up, fit, evaluation, logging, signals.

Everything here imports neither torch nor jax; `run.torch` and `run.jax` do.
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
