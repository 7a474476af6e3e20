"""Evaluation: metrics of a whole data set, computed once from all its predictions."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.eval.classification": ["accuracy", "confusion_matrix", "precision_recall_f1", "topk_accuracy"],
    },
)
