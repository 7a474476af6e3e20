"""HF configs and weight names of the decoder families: Llama, Mistral, Qwen2, Qwen3; and GPT-2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.attention import Rope
from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families import Family, Weight, layer_norm, linear, refuse_unsupported, required

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Defaults of transformers.
_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


def read_llama(config: Mapping[str, Any]) -> DecoderConfig:
    kind = config["model_type"]
    heads = required(config, "num_attention_heads")
    all_bias = bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3")
    mlp_bias = bool(config.get("mlp_bias", False)) and kind == "llama"
    head_dim = config.get("head_dim")
    if head_dim is None and kind == "qwen3":
        head_dim = 128
    return DecoderConfig(
        model_type=kind,
        vocab_size=required(config, "vocab_size"),
        hidden_size=required(config, "hidden_size"),
        intermediate_size=required(config, "intermediate_size"),
        num_hidden_layers=required(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads"),
        head_dim=head_dim,
        hidden_act=config.get("hidden_act", "silu"),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=all_bias or kind == "qwen2",
        output_bias=all_bias,
        mlp_bias=mlp_bias,
        qk_norm=kind == "qwen3",
        sliding_window=_sliding_window(config),
        attention_dropout=config.get("attention_dropout") or 0.0,
        initializer_range=config.get("initializer_range", 0.02),
        max_position_embeddings=config.get("max_position_embeddings") or _POSITIONS[kind],
        rope=_rope(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        source=json.dumps(dict(config)),
    )


def _rope(config: Mapping[str, Any]) -> Rope:
    """transformers 5 writes ``rope_parameters``; earlier versions ``rope_theta`` and ``rope_scaling``."""
    refuse_unsupported(config, {"partial_rotary_factor": 1.0})
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refuse_unsupported(given, {"partial_rotary_factor": 1.0})
    kind = given.get("rope_type", given.get("type", "default"))
    options = {
        "theta": float(given.get("rope_theta", config.get("rope_theta") or 10_000.0)),
        "kind": kind,
        "factor": float(given.get("factor") or 1.0),
    }
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            options[name] = float(required(given, name))
        options["original_positions"] = int(required(given, "original_max_position_embeddings"))
    return Rope(**options)


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """Qwen can enable the window per layer; all layers here run the same code."""
    kind = config["model_type"]
    window = config.get("sliding_window", 4096)
    if kind == "llama" or (kind.startswith("qwen") and not config.get("use_sliding_window", False)):
        return None
    types = config.get("layer_types")
    if types is None and kind.startswith("qwen"):
        full = config.get("max_window_layers", 28)
        types = ["full_attention" if n < full else "sliding_attention" for n in range(config["num_hidden_layers"])]
    if window is None or types is None:
        return window
    if len(set(types)) > 1:
        do = "The JAX models run the same attention in every layer."
        raise BadArgument(expected("layer_types to be the same for all layers", types, do))
    return window if types[0] == "sliding_attention" else None


def write_llama(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope or Rope()
    scaling: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling["original_max_position_embeddings"] = rope.original_positions
    written = {
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        # Written even if None: transformers has a default for Mistral.
        "sliding_window": config.sliding_window,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.model_type in ("llama", "qwen3"):
        written["attention_bias"] = config.output_bias
    if config.model_type == "llama":
        written["mlp_bias"] = config.mlp_bias
    if config.model_type.startswith("qwen"):
        written |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    return written


def llama_weights(config: DecoderConfig) -> list[Weight]:
    layer = "model.layers.{}"
    found = [Weight("embed_tokens/embedding", "model.embed_tokens.weight")]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        bias = config.output_bias if name == "o_proj" else config.qkv_bias
        found += linear(f"layers/attention/{name}", f"{layer}.self_attn.{name}", bias=bias)
    for name in ("gate_proj", "up_proj", "down_proj"):
        found += linear(f"layers/mlp/{name}", f"{layer}.mlp.{name}", bias=config.mlp_bias)
    found.append(Weight("layers/input_norm/scale", f"{layer}.input_layernorm.weight"))
    found.append(Weight("layers/post_norm/scale", f"{layer}.post_attention_layernorm.weight"))
    if config.qk_norm:
        found.append(Weight("layers/attention/q_norm/scale", f"{layer}.self_attn.q_norm.weight"))
        found.append(Weight("layers/attention/k_norm/scale", f"{layer}.self_attn.k_norm.weight"))
    found.append(Weight("norm/scale", "model.norm.weight"))
    if not config.tie_word_embeddings:
        found += linear("lm_head", "lm_head", bias=False)
    return found


LLAMA = Family(
    read_config=read_llama,
    write_config=write_llama,
    weights=llama_weights,
    build=Decoder,
    task_type="CAUSAL_LM",
    prefix="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
)


# -- GPT-2: its linear layers are stored (in, out), as ours ----------------------------------------------------------

_GPT2_FIXED = {
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


def read_gpt2(config: Mapping[str, Any]) -> DecoderConfig:
    refuse_unsupported(config, _GPT2_FIXED)
    size = required(config, "n_embd", "hidden_size")
    return DecoderConfig(
        model_type="gpt2",
        vocab_size=required(config, "vocab_size"),
        hidden_size=size,
        intermediate_size=config.get("n_inner") or 4 * size,
        num_hidden_layers=required(config, "n_layer", "num_hidden_layers"),
        num_attention_heads=required(config, "n_head", "num_attention_heads"),
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


def write_gpt2(config: DecoderConfig) -> dict[str, Any]:
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


def gpt2_weights(config: DecoderConfig) -> list[Weight]:
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


GPT2 = Family(
    read_config=read_gpt2,
    write_config=write_gpt2,
    weights=gpt2_weights,
    build=Decoder,
    task_type="CAUSAL_LM",
    prefix="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$",),
    fan_in_fan_out=True,
)
