"""The classes of transformers that load a model for a purpose. Needs no torch."""

from __future__ import annotations

AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "embedding": "AutoModel",
    "clip": "AutoModel",
    "vlm": "AutoModelForImageTextToText",
}
