"""Models: backbones by name, heads, embedding models, masked autoencoders and momentum encoders."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.models.backbones": ["feature_width", "load_weights"],
        "trainformer.models.embedding": ["AvgPool", "ClassToken", "EmbeddingModel", "GeM", "MaxPool", "make_pooler"],
        "trainformer.models.heads": [
            "BNNeck",
            "ClassificationHead",
            "DINOHead",
            "MLPHead",
            "byol_predictor",
            "byol_projector",
            "moco_projector",
            "moco_v3_predictor",
            "moco_v3_projector",
            "simclr_projector",
        ],
        "trainformer.models.masked_autoencoder": ["MaskedAutoencoder"],
        "trainformer.models.momentum": ["MomentumCopy", "cosine_momentum"],
    },
)
