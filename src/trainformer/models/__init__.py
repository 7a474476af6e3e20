"""Models: backbones by name, and the parts that tasks put on them."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.models.backbones": ["feature_width", "load_weights"],
        "trainformer.models.embedding": ["EmbeddingModel"],
    },
)
