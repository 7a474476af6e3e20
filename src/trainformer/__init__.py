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
        "trainformer.core.types": ["Loss", "OptimizerConfig"],
        "trainformer.tasks.base": ["DatasetInfo", "Task", "TaskBase"],
        "trainformer.context": ["PipelineConfig", "PipelineContext"],
        "trainformer.utils.helpers": ["seed_everything"],
    },
)
