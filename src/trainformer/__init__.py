"""trainformer: one training engine for deep learning.

>>> import trainformer
>>> trainformer.__version__.count(".")
2
"""

from trainformer.core.lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.trainer": ["Trainer"],
        "trainformer.backends.torch.logged_values": ["log_metric"],
        "trainformer.core.types": ["Loss", "OptimizerConfig"],
        "trainformer.data.mixture.mixture": ["Mixture"],
        "trainformer.inference.opening": ["load"],
        "trainformer.tasks.base": ["DatasetInfo", "Task", "TaskBase"],
        "trainformer.context": ["PipelineConfig", "PipelineContext"],
        "trainformer.utils.helpers": ["seed_everything"],
    },
)
