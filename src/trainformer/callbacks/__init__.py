"""Callbacks: what else happens during a run."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.callbacks.base": ["Callback", "CallbackList"],
        "trainformer.callbacks.checkpoint": ["ModelCheckpoint"],
        "trainformer.callbacks.early_stopping": ["EarlyStopping"],
        "trainformer.callbacks.ema": ["EMA"],
        "trainformer.callbacks.image_samples": ["ImageSamples"],
        "trainformer.callbacks.knn": ["OnlineKNN"],
        "trainformer.callbacks.linear": ["OnlineLinear"],
        "trainformer.callbacks.lr_finder": ["LRFinder"],
        "trainformer.callbacks.monitors": ["CollapseMonitor", "GradientMonitor", "LRMonitor"],
        "trainformer.callbacks.progress": ["ProgressBar"],
        "trainformer.callbacks.text_samples": ["TextSamples"],
        "trainformer.callbacks.throughput": ["Throughput"],
    },
)
