"""Tasks: what to train."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.tasks.base": ["DatasetInfo", "Loss", "Task", "TaskBase"],
        "trainformer.tasks.language.causal_lm": ["CausalLM"],
        "trainformer.tasks.language.dpo": ["DPO"],
        "trainformer.tasks.language.embedding": ["TextEmbedding"],
        "trainformer.tasks.language.masked_lm": ["MaskedLM"],
        "trainformer.tasks.language.seq2seq": ["Seq2Seq"],
        "trainformer.tasks.language.text_classification": ["TextClassification"],
        "trainformer.tasks.language.token_classification": ["TokenClassification"],
        "trainformer.tasks.multimodal.clip": ["CLIP"],
        "trainformer.tasks.multimodal.vlm": ["VLM"],
        "trainformer.tasks.vision.classification": ["ImageClassification"],
        "trainformer.tasks.vision.metric_learning": ["MetricLearning"],
        "trainformer.tasks.vision.ssl.task": ["SSL"],
    },
)
