"""GPT-2 as HF writes it: configuration fields and names of weights. Its linear layers are stored (in, out), as ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families import Family, Weight, layer_norm, linear, needed, refuse

_UNSUPPORTED = {
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    refuse(config, _UNSUPPORTED)
    size = needed(config, "n_embd", "hidden_size")
    return DecoderConfig(
        model_type="gpt2",
        vocab_size=needed(config, "vocab_size"),
        hidden_size=size,
        intermediate_size=config.get("n_inner") or 4 * size,
        num_hidden_layers=needed(config, "n_layer", "num_hidden_layers"),
        num_attention_heads=needed(config, "n_head", "num_attention_heads"),
        hidden_act=config.get("activation_function", "gelu_new"),
        norm="layer",
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        gated=False,
        fused_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_dropout=config.get("embd_pdrop", 0.1),
        attention_dropout=config.get("attn_pdrop", 0.1),
        hidden_dropout=config.get("resid_pdrop", 0.1),
        initializer_range=config.get("initializer_range", 0.02),
        max_position_embeddings=config.get("n_positions") or config.get("max_position_embeddings") or 1024,
        rope=None,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        source=json.dumps(dict(config)),
    )


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """For a model that was not read from a folder."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "activation_function": config.hidden_act,
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": config.embedding_dropout,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.hidden_dropout,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def weights(config: DecoderConfig) -> list[Weight]:
    layer = "transformer.h.{}"
    found = [
        Weight("embed_tokens/embedding", "transformer.wte.weight"),
        Weight("embed_positions/embedding", "transformer.wpe.weight"),
    ]
    parts = {
        "attention/qkv_proj": "attn.c_attn",
        "attention/o_proj": "attn.c_proj",
        "mlp/up_proj": "mlp.c_fc",
        "mlp/down_proj": "mlp.c_proj",
    }
    for path, name in parts.items():
        found += linear(f"layers/{path}", f"{layer}.{name}", bias=True, transposed=False)
    found += layer_norm("layers/input_norm", f"{layer}.ln_1")
    found += layer_norm("layers/post_norm", f"{layer}.ln_2")
    found += layer_norm("norm", "transformer.ln_f")
    if not config.tie_word_embeddings:
        found += linear("lm_head", "lm_head", bias=False)
    return found


FAMILY = Family(
    read_config=read_config,
    write_config=write_config,
    weights=weights,
    build=Decoder,
    task_type="CAUSAL_LM",
    prefix="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$",),
    fan_in_fan_out=True,
)
