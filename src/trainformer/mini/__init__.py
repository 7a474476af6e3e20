"""The subclass-style way in: derive from `BaseTrainer`, say what to build, add hooks."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.mini.trainer": ["BaseTrainer", "NonFiniteGradients"],
        "trainformer.callbacks.compat.mini": ["BaseHook"],
        "trainformer.mini.hooks.metrics": ["CudaMaxMemoryHook", "LoggingHook", "ProgressHook"],
        "trainformer.mini.hooks.checkpointing": ["CheckpointingHook"],
        "trainformer.mini.hooks.ema": ["EmaHook"],
        "trainformer.mini.hooks.images": ["ImageFileLoggerHook", "WandbHook"],
        "trainformer.mini.utils": ["key_average", "map_nested_tensor"],
    },
)
