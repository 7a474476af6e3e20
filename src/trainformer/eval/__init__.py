"""Evaluation: metrics of a whole dataset, computed once from all its predictions or embeddings."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.eval.classification": [
            "TagScheme",
            "accuracy",
            "confusion_matrix",
            "multilabel_metrics",
            "pearson",
            "precision_recall_f1",
            "spearman",
            "topk_accuracy",
        ],
        "trainformer.eval.neighbours": ["NeighbourIndex", "Neighbours", "nearest"],
        "trainformer.eval.retrieval": [
            "faiss_retrieval_metrics",
            "knn_accuracy",
            "knn_predict",
            "ranking_metrics",
            "retrieval_metrics",
        ],
        "trainformer.eval.clustering": ["Clusters", "feature_statistics", "kmeans", "nmi", "normalized_mutual_info"],
        "trainformer.eval.calibration": [
            "Reliability",
            "brier_score",
            "expected_calibration_error",
            "fit_temperature",
            "negative_log_likelihood",
            "reliability",
        ],
        "trainformer.eval.frechet": ["frechet_distance"],
        "trainformer.eval.lm_harness": ["LMEvalResults", "lm_evaluate"],
        "trainformer.eval.probe": ["ProbeResult", "label_subset", "linear_probe"],
        "trainformer.eval.generation": [
            "bigram_perplexity",
            "bits_per_byte",
            "bleu",
            "chrf",
            "distinct_n",
            "exact_match",
            "perplexity",
            "repetition",
            "rouge",
            "token_f1",
            "unigram_perplexity",
        ],
    },
)
