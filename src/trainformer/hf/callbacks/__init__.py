"""HF-style callbacks that come with `trainformer.hf`. They work with `trainformer.Trainer` as well."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.hf.callbacks.console": [
            "InfoCallback",
            "PrinterCallback",
            "ProgressCallback",
            "TrainerControlCallback",
        ],
        "trainformer.hf.callbacks.json_logger": ["JsonLogger"],
        "trainformer.hf.callbacks.monitors": ["DivergenceDetector", "GradLogger", "PeakMemory"],
        "trainformer.hf.callbacks.tensorboard": ["TBLogger"],
        "trainformer.hf.callbacks.textgen": ["TextgenCallback"],
    },
)
