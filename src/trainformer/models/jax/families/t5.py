"""HF configs and weight names of T5 and mT5.

Files decide whether the output layer is tied to the embedding: transformers 5 writes ``tie_word_embeddings: true`` for
all of them, and earlier versions use it to say whether outputs are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from trainformer.models.jax.families.family import Family, Weight, hf_fields, linear, read_fields, refuse_unsupported
from trainformer.models.jax.t5 import T5, T5Config
from trainformer.models.jax.weight_files import Weights

_CLASSES = {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}
_HEAD, _EMBEDDING = "lm_head.weight", "shared.weight"
_FIELDS = hf_fields(
    *("vocab_size", "num_decoder_layers", "dropout_rate", "initializer_factor", "pad_token_id"),
    *("decoder_start_token_id", "relative_attention_num_buckets", "relative_attention_max_distance"),
    d_model="hidden_size",
    d_ff="intermediate_size",
    d_kv="head_dim",
    num_layers="num_hidden_layers",
    num_heads="num_attention_heads",
    layer_norm_epsilon="norm_eps",
)


def read_config(config: Mapping[str, Any]) -> T5Config:
    kind = config["model_type"]
    refuse_unsupported(config, {"is_decoder": False, "is_encoder_decoder": True})
    fields = read_fields(config, _FIELDS)
    forward = config.get("feed_forward_proj", "gated-gelu" if kind == "mt5" else "relu")
    act, is_gated = forward.removeprefix("gated-"), forward.startswith("gated-")
    tied = config.get("tie_word_embeddings") is not False
    eos = config.get("eos_token_id", 1)
    fields.setdefault("decoder_start_token_id", fields.get("pad_token_id", 0))
    return T5Config(
        **fields,
        hidden_act="gelu_new" if is_gated and act == "gelu" else act,
        gated=is_gated,
        tie_word_embeddings=tied,
        scale_outputs=kind == "t5" and bool(config.get("scale_decoder_outputs", tied)),
        eos_token_id=eos[0] if isinstance(eos, list) else 1 if eos is None else eos,
        model_type=kind,
    )


def read_files(config: T5Config, weights: Weights) -> T5Config:
    """The config, with an output layer of its own if there is one in the files."""
    is_tied = _HEAD not in weights or (_EMBEDDING in weights and np.array_equal(weights[_HEAD], weights[_EMBEDDING]))
    return replace(config, tie_word_embeddings=is_tied)


def write_config(config: T5Config) -> dict[str, Any]:
    act = "gelu" if config.gated and config.hidden_act == "gelu_new" else config.hidden_act
    written = {
        **{name: getattr(config, own) for name, own in _FIELDS.items()},
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        "is_encoder_decoder": True,
        "num_decoder_layers": config.depth,
        "feed_forward_proj": f"gated-{act}" if config.gated else act,
        "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": config.tie_word_embeddings or config.scale_outputs,
    }
    if config.model_type == "t5":
        written["scale_decoder_outputs"] = config.scale_outputs
    return written


def weights(config: T5Config) -> list[Weight]:
    found = [Weight("shared/embedding", _EMBEDDING)]
    for stack, layers in (("encoder", config.num_hidden_layers), ("decoder", config.depth)):
        found += [
            weight._replace(layers=layers if weight.stacked else None) for weight in _stack_weights(config, stack)
        ]
    return found if config.tie_word_embeddings else [*found, *linear("lm_head", "lm_head", bias=False)]


def _stack_weights(config: T5Config, stack: str) -> list[Weight]:
    layer = f"{stack}.block.{{}}.layer"
    parts = [("attention", f"{layer}.0", "SelfAttention")]
    if stack == "decoder":
        parts.append(("cross_attention", f"{layer}.1", "EncDecAttention"))
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found = [Weight(f"{stack}/relative_bias", bias), Weight(f"{stack}/norm/scale", f"{stack}.final_layer_norm.weight")]
    for path, place, name in parts:
        for letter in "qkvo":
            found += linear(f"{stack}/layers/{path}/{letter}_proj", f"{place}.{name}.{letter}", bias=False)
        norm = "cross_norm" if path == "cross_attention" else "attention_norm"
        found.append(Weight(f"{stack}/layers/{norm}/scale", f"{place}.layer_norm.weight"))
    place = f"{layer}.{len(parts)}"
    names = {"gate_proj": "wi_0", "up_proj": "wi_1"} if config.gated else {"up_proj": "wi"}
    for path, name in {**names, "down_proj": "wo"}.items():
        found += linear(f"{stack}/layers/mlp/{path}", f"{place}.DenseReluDense.{name}", bias=False)
    return [*found, Weight(f"{stack}/layers/mlp_norm/scale", f"{place}.layer_norm.weight")]


T5_FAMILY = Family(
    read_config=read_config,
    write_config=write_config,
    weights=weights,
    build=T5,
    prefix="",
    task_type="SEQ_2_SEQ_LM",
    read_files=read_files,
    # Copies of the embedding, and a bias that is not used.
    ignored=(r"^(en|de)coder\.embed_tokens\.weight$", r"EncDecAttention\.relative_attention_bias\.weight$"),
)
