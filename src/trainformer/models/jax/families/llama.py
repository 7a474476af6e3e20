"""HF configs and weight names of Llama and the decoders named alike: Mistral, Qwen, SmolLM3, OLMo, Phi-3.

The configs of Gemma are in `gemma`, those of GPT-2 and GPT-NeoX in `gpt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.block import FULL, SLIDING
from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families.family import (
    Family,
    Weight,
    hf_fields,
    linear,
    read_fields,
    refuse_unsupported,
)
from trainformer.models.jax.rope import Rope, read_rope, write_rope

# Class in transformers, and its defaults where they differ from ours.
_LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"max_position_embeddings": 131_072}),
    "ministral": ("MinistralForCausalLM", {"max_position_embeddings": 131_072}),
    "qwen2": ("Qwen2ForCausalLM", {"max_position_embeddings": 32_768}),
    "qwen3": ("Qwen3ForCausalLM", {"max_position_embeddings": 32_768, "head_dim": 128}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {"max_position_embeddings": 32_768, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "olmo2": ("Olmo2ForCausalLM", {"norm_eps": 1e-5}),
    "olmo3": ("Olmo3ForCausalLM", {"norm_eps": 1e-5}),
    "granite": ("GraniteForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"max_position_embeddings": 4096, "norm_eps": 1e-5}),
}
_LLAMA_FIELDS = hf_fields(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "attention_dropout", "initializer_range"),
    *("max_position_embeddings", "tie_word_embeddings"),
    rms_norm_eps="norm_eps",
)
_GRANITE_FIELDS = hf_fields(
    *("attention_multiplier", "residual_multiplier", "logits_scaling"), embedding_multiplier="embedding_scale"
)
# Families that have a field.
_ATTENTION_BIAS = ("llama", "qwen3", "smollm3", "olmo2", "olmo3", "granite")
_MLP_BIAS = ("llama", "smollm3", "granite")
_NO_HEAD_DIM = ("olmo2", "olmo3", "phi3", "smollm3", "granite")
_WINDOWS = ("mistral", "ministral", "qwen2", "qwen3", "smollm3", "olmo3", "phi3")


def read_llama(config: Mapping[str, Any]) -> DecoderConfig:
    kind = config["model_type"]
    # As transformers' AutoConfig.
    kind = "ministral" if kind == "mistral" and config.get("layer_types") else kind
    all_bias = bool(config.get("attention_bias", False)) and kind in _ATTENTION_BIAS
    fields = read_decoder_fields(config, _LLAMA_FIELDS, _LLAMAS[kind][1])
    options: dict[str, Any] = {}
    if kind == "phi3":
        options = _phi3_options(config)
    elif kind in ("olmo2", "olmo3"):
        options = {"norm_placement": "post", "qk_norm": True, "qk_norm_whole": True}
    elif kind == "smollm3":
        options = {"no_rope_layers": _no_rope_layers(config)}
    elif kind == "granite":
        options = {own: config.get(name, 1.0) for name, own in _GRANITE_FIELDS.items()}
    if kind == "olmo3":
        if config.get("rope_parameters") is None:
            # Versions of transformers differ in whether it is also that of layers with a window.
            refuse_unsupported(config, {"rope_theta": 500_000.0})
        options |= read_layer_ropes(config, 500_000.0, 500_000.0)
    elif kind != "phi3":
        options["rope"] = read_rope(config, theta=2_000_000.0 if kind == "smollm3" else 10_000.0)
    return DecoderConfig(
        **fields,
        **{"qk_norm": kind == "qwen3", **options},
        model_type=kind,
        qkv_bias=all_bias or kind == "qwen2",
        output_bias=all_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and kind in _MLP_BIAS,
        **_windows({**config, "model_type": kind}, options.get("no_rope_layers")),
    )


def read_decoder_fields(
    config: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields by our names. In HF configs a null for the key-value heads is as many as heads, not the default."""
    fields = read_fields(config, names, **defaults)
    if "num_key_value_heads" in config:
        fields["num_key_value_heads"] = config["num_key_value_heads"]
    return fields


def _phi3_options(config: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unsupported(config, {"embd_pdrop": 0.0})
    config = {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096, **config}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type")
    if kind in ("su", "yarn"):  # earlier names
        rope["rope_type"] = "longrope"
    return {
        "fused_qkv": True,
        "fused_gate_up": True,
        "hidden_dropout": config.get("resid_pdrop") or 0.0,
        "rope": read_rope({**config, "rope_parameters": rope}, partial=1.0),
    }


def _no_rope_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    count, given = config["num_hidden_layers"], config.get("no_rope_layers")
    if given is None:
        interval = config.get("no_rope_layer_interval", 4)
        given = [int((number + 1) % interval != 0) for number in range(count)]
    return None if all(given[:count]) and len(given) >= count else tuple(map(int, given[:count]))


def _windows(config: Mapping[str, Any], no_rope_layers: Sequence[int] | None) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``, if any layer has a window."""
    kind, count = config["model_type"], config["num_hidden_layers"]
    if kind not in _WINDOWS:
        return {}
    window, types = config.get("sliding_window", None if kind in ("phi3", "smollm3") else 4096), None
    if kind.startswith("qwen") or kind == "smollm3":
        window = window if config.get("use_sliding_window", False) else None
    if kind not in ("mistral", "phi3"):
        types = config.get("layer_types")
    if types is None and window is not None and kind.startswith("qwen"):
        types = [FULL if number < config.get("max_window_layers", 28) else SLIDING for number in range(count)]
    elif types is None and window is not None and kind == "smollm3":
        types = [FULL if used else SLIDING for used in no_rope_layers or [1] * count]
    elif types is None and kind == "olmo3":
        types = [SLIDING if (number + 1) % 4 else FULL for number in range(count)]
    return read_windows(window, types, count)


def read_windows(window: int | None, types: Sequence[str] | None, count: int) -> dict[str, Any]:
    """The fields of a `DecoderConfig`; `layer_types` only where they differ."""
    if types is None or (list(types) == [SLIDING] * count and window is not None):
        return {"sliding_window": window}
    if list(types) == [FULL] * count:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": tuple(types[:count])}


def read_layer_ropes(config: Mapping[str, Any], theta: float, local_theta: float) -> dict[str, Any]:
    """Rotary embeddings per kind of layer; earlier versions of transformers scale those without a window only."""
    given, positions = config.get("rope_parameters"), {"max_position_embeddings": config.get("max_position_embeddings")}
    if given is None:
        given = {FULL: config.get("rope_scaling")}
    extra = sorted(set(given) - {SLIDING, FULL})
    if extra:
        raise BadArgument(expected(f"rope_parameters for {SLIDING!r} and {FULL!r}", extra))
    for kind in given:
        # transformers does not read it here.
        refuse_unsupported(given[kind] or {}, {"truncate": True})
    thetas = {FULL: config.get("rope_theta") or theta, SLIDING: local_theta}
    rope, local = (
        read_rope({**positions, "rope_parameters": given.get(kind)}, theta=thetas[kind]) for kind in (FULL, SLIDING)
    )
    return {"rope": rope, "local_rope": local}


def write_layer_ropes(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope or Rope()
    return {FULL: write_rope(rope), SLIDING: write_rope(config.local_rope or rope)}


def write_llama(config: DecoderConfig) -> dict[str, Any]:
    kind, rope = config.model_type, config.rope or Rope()
    written = {
        **write_decoder(config, _LLAMA_FIELDS, _LLAMAS[kind][0]),
        "rope_parameters": write_layer_ropes(config) if kind == "olmo3" else write_rope(rope),
        # Written even if None: transformers has a default for Mistral.
        "sliding_window": config.sliding_window,
    }
    if kind in _NO_HEAD_DIM and config.head_width * config.num_attention_heads == config.hidden_size:
        del written["head_dim"]
    if kind in _ATTENTION_BIAS:
        written["attention_bias"] = config.output_bias
    if kind in _MLP_BIAS:
        written["mlp_bias"] = config.mlp_bias
    if kind.startswith("qwen"):
        written |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    if kind == "smollm3":
        written["use_sliding_window"] = config.sliding_window is not None
        written["no_rope_layers"] = list(config.no_rope_layers or [1] * config.num_hidden_layers)
    if kind == "granite":
        written |= {name: getattr(config, own) for name, own in _GRANITE_FIELDS.items()}
    if kind == "phi3":
        written |= {"original_max_position_embeddings": rope.original_positions, "resid_pdrop": config.hidden_dropout}
    if config.layer_types is not None or kind in ("ministral", "smollm3", "olmo3"):
        written["layer_types"] = layer_types_of(config)
    return written


def layer_types_of(config: DecoderConfig) -> list[str]:
    return [SLIDING if kind.window else FULL for kind in config.layer_kinds]


def write_decoder(config: DecoderConfig, fields: Mapping[str, str], architecture: str) -> dict[str, Any]:
    """The fields that decoders share."""
    return {
        **{name: getattr(config, own) for name, own in fields.items()},
        "architectures": [architecture],
        "model_type": config.model_type,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


# Norms of the layers by placement: our names and HF's.
_NORMS = {
    "pre": {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    "post": {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
    "both": {
        "input_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}


def llama_weights(config: DecoderConfig) -> list[Weight]:
    layer = "model.layers.{}"
    found = [Weight("embed_tokens/embedding", "model.embed_tokens.weight")]
    for name in (*(("qkv_proj",) if config.fused_qkv else ("q_proj", "k_proj", "v_proj")), "o_proj"):
        bias = config.output_bias if name == "o_proj" else config.qkv_bias
        found += linear(f"layers/attention/{name}", f"{layer}.self_attn.{name}", bias=bias)
    for name in (*(("gate_up_proj",) if config.fused_gate_up else ("gate_proj", "up_proj")), "down_proj"):
        found += linear(f"layers/mlp/{name}", f"{layer}.mlp.{name}", bias=config.mlp_bias)
    for own, name in _NORMS[config.norm_placement].items():
        found.append(Weight(f"layers/{own}/scale", f"{layer}.{name}.weight"))
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
