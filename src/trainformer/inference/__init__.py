"""Trained models ready to predict: `load` opens a run, a checkpoint, a finalized folder or an exported model."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.inference.opening": ["load"],
        "trainformer.inference.predictor": ["Predictor"],
        "trainformer.inference.text": ["TextPredictor"],
        "trainformer.inference.jax_models": ["JaxPredictor", "JaxTextPredictor"],
        "trainformer.inference.onnx": ["OnnxPredictor"],
    },
)
