"""Callbacks: EMA, early stopping, monitors, progress bars, and the protocol to write your own."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.callbacks.base": ["Callback", "CallbackList", "make_callback"],
        "trainformer.callbacks.checkpoint": ["ModelCheckpoint"],
        "trainformer.callbacks.early_stopping": ["EarlyStopping"],
        "trainformer.callbacks.ema": ["EMA"],
        "trainformer.callbacks.lm_eval": ["LMEval"],
        "trainformer.callbacks.lr_finder": ["LRFinder"],
        "trainformer.callbacks.monitors": ["CollapseMonitor", "GradientMonitor", "LRMonitor", "Throughput"],
        "trainformer.callbacks.online_probes": ["OnlineKNN", "OnlineLinear"],
        "trainformer.callbacks.profiler": ["Profiler"],
        "trainformer.callbacks.progress": ["ProgressBar"],
        "trainformer.callbacks.samples": ["ImageSamples", "RolloutSamples", "TextSamples"],
    },
)
