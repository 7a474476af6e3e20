"""HF configs and weight names of the encoders: BERT, RoBERTa, DistilBERT. ``architectures`` names the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainformer.models.jax.bert import HEADS, Bert, BertConfig
from trainformer.models.jax.families.family import (
    Family,
    Weight,
    hf_fields,
    label_fields,
    layer_norm,
    linear,
    read_fields,
    read_labels,
    refuse_unsupported,
)

_CLASSES = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}
_SUFFIXES = dict(zip(HEADS, ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"), strict=True))
_FIXED = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
    "sinusoidal_pos_embds": False,
}
_BERT_FIELDS = hf_fields(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("initializer_range", "max_position_embeddings", "type_vocab_size", "classifier_dropout", "problem_type"),
    layer_norm_eps="norm_eps",
    attention_probs_dropout_prob="attention_dropout",
    hidden_dropout_prob="hidden_dropout",
)
_DISTILBERT_FIELDS = hf_fields(
    *("vocab_size", "initializer_range", "max_position_embeddings", "attention_dropout", "problem_type"),
    dim="hidden_size",
    hidden_dim="intermediate_size",
    n_layers="num_hidden_layers",
    n_heads="num_attention_heads",
    activation="hidden_act",
    dropout="hidden_dropout",
    seq_classif_dropout="classifier_dropout",
)


def _fields(kind: str) -> dict[str, str]:
    return _DISTILBERT_FIELDS if kind == "distilbert" else _BERT_FIELDS


def read_config(config: Mapping[str, Any]) -> BertConfig:
    kind = config["model_type"]
    refuse_unsupported(config, _FIXED)
    fields = read_fields(config, _fields(kind))
    if kind == "distilbert":
        fields |= {"type_vocab_size": 0, "classifier_dropout": fields.get("classifier_dropout", 0.2)}
    offset = 0
    if kind == "roberta":  # the first positions belong to padding
        padding = config.get("pad_token_id")
        offset = 2 if padding is None else int(padding) + 1
        fields["max_position_embeddings"] = fields.get("max_position_embeddings", 512) - offset
    names = [name for _, name in sorted((config.get("id2label") or {}).items(), key=lambda item: int(item[0]))]
    own = any(name != f"LABEL_{number}" for number, name in enumerate(names))
    return BertConfig(
        **fields,
        model_type=kind,
        position_offset=offset,
        head=_read_head(config),
        num_labels=read_labels(config),
        label_names=tuple(names) if own else None,
    )


def _read_head(config: Mapping[str, Any]) -> str:
    """The head of the saved class; one of another class, or of none, can only be loaded with a head of one's choice."""
    saved = (config.get("architectures") or [""])[0]
    return next((head for head, suffix in _SUFFIXES.items() if saved.endswith(suffix)), "masked_lm")


def write_config(config: BertConfig) -> dict[str, Any]:
    kind = config.model_type
    written = {name: getattr(config, own) for name, own in _fields(kind).items()}
    written["max_position_embeddings"] += config.position_offset
    written |= {"architectures": [_CLASSES[kind] + _SUFFIXES[config.head]], "model_type": kind}
    if kind == "distilbert":
        written["seq_classif_dropout"] = _classifier_rate(config)
    if kind == "roberta":
        written["pad_token_id"] = config.position_offset - 1
    if config.head != "masked_lm":
        written |= label_fields(config.num_labels, config.label_names)
    return written


def _classifier_rate(config: BertConfig) -> float:
    return config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout


# Names in files, by our path inside a layer.
_BERT_LAYER = {
    "attention/q_proj": "attention.self.query",
    "attention/k_proj": "attention.self.key",
    "attention/v_proj": "attention.self.value",
    "attention/o_proj": "attention.output.dense",
    "mlp/up_proj": "intermediate.dense",
    "mlp/down_proj": "output.dense",
}
_DISTILBERT_LAYER = {
    "attention/q_proj": "attention.q_lin",
    "attention/k_proj": "attention.k_lin",
    "attention/v_proj": "attention.v_lin",
    "attention/o_proj": "attention.out_lin",
    "mlp/up_proj": "ffn.lin1",
    "mlp/down_proj": "ffn.lin2",
}
# The layer before the output of a masked language model, its norm, and the bias of the output.
_LM_HEADS = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
}
# The two layers of a classifier of sequences.
_SEQUENCE_HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "distilbert": ("pre_classifier", "classifier"),
}


def weights(config: BertConfig) -> list[Weight]:
    kind = config.model_type
    found = [
        Weight("embed_tokens/embedding", f"{kind}.embeddings.word_embeddings.weight"),
        Weight("embed_positions/embedding", f"{kind}.embeddings.position_embeddings.weight"),
    ]
    if config.type_vocab_size:
        found.append(Weight("embed_types/embedding", f"{kind}.embeddings.token_type_embeddings.weight"))
    found += layer_norm("embed_norm", f"{kind}.embeddings.LayerNorm")
    is_distilled = kind == "distilbert"
    layer = f"{kind}.transformer.layer.{{}}" if is_distilled else f"{kind}.encoder.layer.{{}}"
    norms = (
        ("sa_layer_norm", "output_layer_norm") if is_distilled else ("attention.output.LayerNorm", "output.LayerNorm")
    )
    for path, name in (_DISTILBERT_LAYER if is_distilled else _BERT_LAYER).items():
        found += linear(f"layers/{path}", f"{layer}.{name}", bias=True)
    for path, name in zip(("attention_norm", "output_norm"), norms, strict=True):
        found += layer_norm(f"layers/{path}", f"{layer}.{name}")
    return [*found, *head_weights(config)]


def head_weights(config: BertConfig) -> list[Weight]:
    """The weights of the head: new ones if a model is loaded with another head."""
    kind = config.model_type
    if config.head == "masked_lm":
        dense, norm, bias = _LM_HEADS[kind]
        return [
            *linear("output/dense", dense, bias=True),
            *layer_norm("output/norm", norm),
            Weight("output/bias", bias),
        ]
    if config.head == "token_classification":
        return [*linear("output/classifier", "classifier", bias=True)]
    pooler, classifier = _SEQUENCE_HEADS[kind]
    return [*linear("output/pooler", pooler, bias=True), *linear("output/classifier", classifier, bias=True)]


def _family(kind: str) -> Family:
    return Family(
        read_config=read_config,
        write_config=write_config,
        weights=weights,
        build=Bert,
        prefix=f"{kind}.",
        head=lambda config: tuple(weight.path for weight in head_weights(config)),
        # Other heads, the tied output layer, and buffers of older versions.
        ignored=(
            r"^(cls|lm_head|classifier|pre_classifier|qa_outputs)\.|^vocab_(transform|layer_norm|projector)\.",
            r"(^|\.)pooler\.|\.?embeddings\.position_ids$",
        ),
        renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    )


BERT, ROBERTA, DISTILBERT = map(_family, _CLASSES)
