"""Small helpers around a training run."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.utils.helpers": [
            "MemoryRecord",
            "count_parameters",
            "get_device",
            "move_to_device",
            "profile_memory",
            "seed_everything",
        ],
    },
)
