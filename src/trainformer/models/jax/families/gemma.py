"""HF configs of Gemma 1, 2 and 3 (text). Weights are named as those of Llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainformer.models.jax.block import FULL, SLIDING
from trainformer.models.jax.decoder import DecoderConfig
from trainformer.models.jax.families.family import hf_fields, refuse_unsupported
from trainformer.models.jax.families.llama import (
    LLAMA,
    layer_types_of,
    read_decoder_fields,
    read_layer_ropes,
    read_windows,
    write_decoder,
    write_layer_ropes,
)
from trainformer.models.jax.rope import Rope, read_rope, write_rope

_CLASSES = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_FIELDS = hf_fields(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "attention_dropout", "initializer_range"),
    *("max_position_embeddings", "tie_word_embeddings"),
    rms_norm_eps="norm_eps",
)
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _fields_of(kind: str) -> dict[str, str]:
    return {**_FIELDS, "hidden_act" if kind == "gemma" else "hidden_activation": "hidden_act"}


def read_gemma(config: Mapping[str, Any]) -> DecoderConfig:
    kind = config["model_type"]
    refuse_unsupported(config, {"use_bidirectional_attention": False})
    defaults = {
        "gemma": {**_DEFAULTS, "num_key_value_heads": 16},
        "gemma2": {**_DEFAULTS, "num_key_value_heads": 4},
        "gemma3_text": {**_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 131_072},
    }[kind]
    fields = read_decoder_fields(config, _fields_of(kind), defaults)
    bias = bool(config.get("attention_bias", False))
    shared: dict[str, Any] = {
        "model_type": kind,
        "norm": "shifted_rms",
        "qkv_bias": bias,
        "output_bias": bias,
        "embedding_scale": math.sqrt(fields["hidden_size"]),
    }
    if kind == "gemma":
        # The files of the first release say "gelu" and mean its approximation.
        act = "gelu_pytorch_tanh" if fields["hidden_act"] == "gelu" else fields["hidden_act"]
        return DecoderConfig(**{**fields, "hidden_act": act}, **shared, rope=read_rope(config))
    caps: dict[str, float] = {}
    ropes: dict[str, Any] = {}
    if kind == "gemma2":
        caps, ropes = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, {"rope": read_rope(config)}
    else:
        refuse_unsupported(config, {"attn_logit_softcapping": None})
        ropes = read_layer_ropes(config, 1_000_000.0, config.get("rope_local_base_freq") or 10_000.0)
    count, window = fields["num_hidden_layers"], config.get("sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        every = 2 if kind == "gemma2" else config.get("sliding_window_pattern", 6)
        types = [SLIDING if (number + 1) % every else FULL for number in range(count)]
    return DecoderConfig(
        **fields,
        **shared,
        **ropes,
        **read_windows(window, types, count),
        **{name: config.get(name, caps.get(name)) for name in _CAPS},
        query_pre_attn_scalar=config.get("query_pre_attn_scalar", 256),
        norm_placement="both",
        qk_norm=kind == "gemma3_text",
    )


def write_gemma(config: DecoderConfig) -> dict[str, Any]:
    kind, rope = config.model_type, config.rope or Rope()
    written = {
        **write_decoder(config, _fields_of(kind), _CLASSES[kind]),
        "attention_bias": config.output_bias,
        "rope_parameters": write_rope(rope),
    }
    if kind == "gemma":
        return written
    if kind == "gemma3_text":
        written["rope_parameters"] = write_layer_ropes(config)
    return {
        **written,
        **{name: getattr(config, name) for name in (*_CAPS, "query_pre_attn_scalar", "sliding_window")},
        "layer_types": layer_types_of(config),
    }


GEMMA = replace(LLAMA, read_config=read_gemma, write_config=write_gemma)
