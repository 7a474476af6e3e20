"""HF configs and weight names of mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Files have the weights of each expert under its own name, and are written so. Those that have all experts of a layer in
one array, as transformers holds them in memory, are read too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.models.jax.block import FULL, SLIDING
from trainformer.models.jax.decoder import Decoder
from trainformer.models.jax.families.family import Family, Weight, hf_fields, linear, refuse_unsupported, required
from trainformer.models.jax.families.llama import (
    layer_types_of,
    llama_weights,
    read_decoder_fields,
    read_windows,
    write_decoder,
)
from trainformer.models.jax.moe import MoEConfig
from trainformer.models.jax.rope import Rope, read_rope, write_rope
from trainformer.models.jax.weight_files import Weights

# Class in transformers, and its defaults where they differ from ours.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        {"max_position_embeddings": 131_072, "norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts": 8}
        | {"num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {"max_position_embeddings": 32_768, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
        | {"norm_topk_prob": False, "shared_expert_intermediate_size": 5632},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"max_position_embeddings": 32_768, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {"max_position_embeddings": 4096, "norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False, "router_aux_loss_coef": 0.01},
    ),
}
_FIELDS = hf_fields(
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "attention_dropout", "initializer_range", "max_position_embeddings", "tie_word_embeddings"),
    *("num_experts_per_tok", "router_aux_loss_coef"),
    rms_norm_eps="norm_eps",
)
# Without an effect on what is computed here, at these values.
_FIXED = {"router_jitter_noise": 0.0, "clip_qkv": None, "decoder_sparse_step": 1}
# Names of the experts' parts in files: those of the other families are ours.
_MIXTRAL_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_PARTS = tuple(_MIXTRAL_PARTS)


def _fields_of(kind: str) -> dict[str, str]:
    own = {
        "mixtral": hf_fields("intermediate_size", num_local_experts="num_experts"),
        "olmoe": hf_fields("intermediate_size", "num_experts", "norm_topk_prob"),
        "qwen3_moe": hf_fields("num_experts", "norm_topk_prob", moe_intermediate_size="intermediate_size"),
    }
    shared = hf_fields("shared_expert_intermediate_size")
    return {**_FIELDS, **({**own["qwen3_moe"], **shared} if kind == "qwen2_moe" else own[kind])}


def read_moe(config: Mapping[str, Any]) -> MoEConfig:
    kind = config["model_type"]
    refuse_unsupported(config, _FIXED)
    if config.get("mlp_only_layers"):
        do = "The JAX models have experts in every layer or in none."
        raise BadArgument(expected("mlp_only_layers to be empty", config["mlp_only_layers"], do))
    if kind.startswith("qwen"):
        required(config, "moe_intermediate_size")
    if "num_experts" not in config and "num_local_experts" in config:  # one stands for the other in transformers
        config = {**config, "num_experts": config["num_local_experts"]}
    bias = bool(config.get("attention_bias", False)) and kind in ("qwen3_moe", "olmoe")
    return MoEConfig(
        **read_decoder_fields(config, _fields_of(kind), _KINDS[kind][1]),
        model_type=kind,
        qkv_bias=bias or (kind == "qwen2_moe" and bool(config.get("qkv_bias", True))),
        output_bias=bias,
        qk_norm=kind in ("qwen3_moe", "olmoe"),
        qk_norm_whole=kind == "olmoe",
        rope=read_rope(config, theta=1_000_000.0 if kind == "mixtral" else 10_000.0),
        **_windows(config),
    )


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, count, types = config["model_type"], required(config, "num_hidden_layers"), None
    window = config.get("sliding_window", 4096 if kind.startswith("qwen") else None)
    if kind == "olmoe" or (kind.startswith("qwen") and not config.get("use_sliding_window", False)):
        return {}
    if kind == "qwen2_moe":
        last = config.get("max_window_layers", 28)
        types = config.get("layer_types") or [FULL if n % 2 or n >= last else SLIDING for n in range(count)]
    return read_windows(window, types, count)


def write_moe(config: MoEConfig) -> dict[str, Any]:
    kind = config.model_type
    written = {
        **write_decoder(config, _fields_of(kind), _KINDS[kind][0]),
        "rope_parameters": write_rope(config.rope or Rope()),
    }
    if kind != "olmoe":
        written["sliding_window"] = config.sliding_window
    if kind.startswith("qwen"):
        written |= {"use_sliding_window": config.sliding_window is not None, "decoder_sparse_step": 1}
    if kind == "qwen2_moe":
        written |= {"layer_types": layer_types_of(config), "qkv_bias": config.qkv_bias}
    if kind in ("qwen3_moe", "olmoe"):
        written["attention_bias"] = config.output_bias
    return written


def moe_weights(config: MoEConfig) -> list[Weight]:
    kind, layer = config.model_type, "model.layers.{}"
    mlp = f"{layer}.block_sparse_moe" if kind == "mixtral" else f"{layer}.mlp"
    found = [weight for weight in llama_weights(config) if "/mlp/" not in weight.path]
    found.append(Weight("layers/mlp/router", f"{mlp}.gate.weight", (1, 0)))
    for part in _PARTS:
        name = _MIXTRAL_PARTS[part] if kind == "mixtral" else part
        found.append(Weight(f"layers/mlp/experts/{part}", f"{mlp}.experts.*.{name}.weight", (0, 2, 1)))
    if config.shared_expert_intermediate_size:
        for part in _PARTS:
            found += linear(f"layers/mlp/shared_expert/{part}", f"{mlp}.shared_expert.{part}", bias=False)
        found += linear("layers/mlp/shared_expert_gate", f"{mlp}.shared_expert_gate", bias=False)
    return found


# -- the experts of a layer in files ---------------------------------------------------------------------------------

_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")
_ALL_EXPERTS = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")


def stack_experts(config: MoEConfig, weights: Weights) -> MoEConfig:
    """Let the arrays of the experts be read as one, whichever way they are in the files. Returns the config."""
    is_mixtral = config.model_type == "mixtral"
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name in list(weights):
        if match := _ONE_EXPERT.fullmatch(name):
            groups.setdefault((match[1], match[3]), {})[int(match[2])] = name
        elif match := _ALL_EXPERTS.fullmatch(name):
            mlp = f"{match[1]}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
            parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
            read = weights.take(name)
            for place, part in enumerate(parts):
                own = _MIXTRAL_PARTS[part] if is_mixtral else part
                weights.add(f"{mlp}.experts.*.{own}.weight", partial(_part, read, place, len(parts)))
            router = f"{match[1]}.mlp.gate.weight"
            if is_mixtral and router in weights:
                weights.add(f"{mlp}.gate.weight", weights.take(router))
    for (experts, part), names in groups.items():
        if sorted(names) != list(range(config.num_experts)):
            what = f"{experts}.*.{part} of {config.num_experts} experts in {weights.folder}, as in config.json"
            raise DataError(expected(what, f"{len(names)} of them", "Do config.json and the weights belong together?"))
        readers = [weights.take(names[number]) for number in range(config.num_experts)]
        weights.add(f"{experts}.*.{part}", partial(_stack, readers))
    return config


def _part(read: Callable[[], np.ndarray], place: int, count: int) -> np.ndarray:
    return np.split(read(), count, axis=1)[place]


def _stack(readers: list[Callable[[], np.ndarray]]) -> np.ndarray:
    return np.stack([read() for read in readers])


MOE = Family(
    read_config=read_moe,
    write_config=write_moe,
    weights=moe_weights,
    build=Decoder,
    task_type="CAUSAL_LM",
    prefix="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
    read_files=stack_experts,
)
