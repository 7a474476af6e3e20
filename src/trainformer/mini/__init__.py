"""Subclass-style entry point: derive from `BaseTrainer`, implement `build_*()` and `forward()`, add hooks."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.mini.trainer": ["BaseTrainer", "NonFiniteGradients"],
        "trainformer.callbacks.compat.mini": ["BaseHook"],
        "trainformer.mini.adapter": ["LossNoneWarning"],
        "trainformer.mini.checkpointing": ["CheckpointingHook"],
        "trainformer.mini.hooks": [
            "CudaMaxMemoryHook",
            "EmaHook",
            "ImageFileLoggerHook",
            "LoggingHook",
            "ProgressHook",
            "WandbHook",
        ],
        "trainformer.mini.utils": ["key_average", "map_nested_tensor"],
    },
)
