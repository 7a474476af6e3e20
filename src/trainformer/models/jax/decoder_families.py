"""HF configs and weight names of the decoder families: Llama, Mistral, Qwen2, Qwen3; and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.attention import Rope
from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families import (
    Family,
    Weight,
    hf_fields,
    layer_norm,
    linear,
    read_fields,
    refuse_unsupported,
    required,
)

# Class in transformers, and its default for max_position_embeddings.
_LLAMAS = {
    "llama": ("LlamaForCausalLM", 2048),
    "mistral": ("MistralForCausalLM", 131_072),
    "qwen2": ("Qwen2ForCausalLM", 32_768),
    "qwen3": ("Qwen3ForCausalLM", 32_768),
}
_LLAMA_FIELDS = hf_fields(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "attention_dropout", "initializer_range"),
    *("max_position_embeddings", "tie_word_embeddings"),
    rms_norm_eps="norm_eps",
)


def read_llama(config: Mapping[str, Any]) -> DecoderConfig:
    kind = config["model_type"]
    all_bias = bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3")
    fields = read_fields(config, _LLAMA_FIELDS, max_position_embeddings=_LLAMAS[kind][1])
    if kind == "qwen3":
        fields.setdefault("head_dim", 128)
    return DecoderConfig(
        **fields,
        model_type=kind,
        qkv_bias=all_bias or kind == "qwen2",
        output_bias=all_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
        qk_norm=kind == "qwen3",
        sliding_window=_sliding_window(config),
        rope=_rope(config),
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
        **{name: getattr(config, own) for name, own in _LLAMA_FIELDS.items()},
        "architectures": [_LLAMAS[config.model_type][0]],
        "model_type": config.model_type,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rope_parameters": scaling,
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

_GPT2_FIXED = {"add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_GPT2_FIELDS = hf_fields(
    *("vocab_size", "initializer_range", "tie_word_embeddings"),
    n_embd="hidden_size",
    n_inner="intermediate_size",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_positions="max_position_embeddings",
    activation_function="hidden_act",
    layer_norm_epsilon="norm_eps",
    embd_pdrop="embedding_dropout",
    attn_pdrop="attention_dropout",
    resid_pdrop="hidden_dropout",
)
# Where transformers' GPT-2 differs from `DecoderConfig`.
_GPT2_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0.1),
}


def read_gpt2(config: Mapping[str, Any]) -> DecoderConfig:
    refuse_unsupported(config, _GPT2_FIXED)
    fields = read_fields(config, _GPT2_FIELDS, intermediate_size=None, **_GPT2_DEFAULTS)
    fields["intermediate_size"] = fields["intermediate_size"] or 4 * fields["hidden_size"]
    always: dict[str, Any] = dict.fromkeys(("fused_qkv", "qkv_bias", "output_bias", "mlp_bias"), True)
    return DecoderConfig(**fields, **always, model_type="gpt2", norm="layer", gated=False, rope=None)


def write_gpt2(config: DecoderConfig) -> dict[str, Any]:
    fields = {name: getattr(config, own) for name, own in _GPT2_FIELDS.items()}
    kind = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return {**fields, **kind, "bos_token_id": None, "eos_token_id": None}


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
