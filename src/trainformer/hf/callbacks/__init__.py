"""Callbacks in HuggingFace's dialect that come with `trainformer.hf`; `trainformer.Trainer` takes them, too."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.hf.callbacks.divergence": ["DivergenceDetector"],
        "trainformer.hf.callbacks.grad_logger": ["GradLogger"],
        "trainformer.hf.callbacks.info": ["InfoCallback"],
        "trainformer.hf.callbacks.json_logger": ["JsonLogger"],
        "trainformer.hf.callbacks.peak_memory": ["PeakMemory"],
        "trainformer.hf.callbacks.progress": ["ProgressCallback"],
        "trainformer.hf.callbacks.tb_logger": ["TBLogger"],
        "trainformer.hf.callbacks.textgen": ["TextgenCallback"],
    },
)
