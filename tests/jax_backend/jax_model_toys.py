"""Small models of transformers with all weights random, as folders, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    ViTConfig,
)

import text_toys
from trainformer.models.jax import load_model

VOCABULARY = 320
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_IDS = {"bos_token_id": 0, "eos_token_id": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


def configs() -> dict[str, PretrainedConfig]:
    """One per family, and the switches of a family that change what is computed."""
    shared = {**_SIZES, **_HEADS, **_IDS}
    return {
        "llama": text_toys.llama(),
        "llama_biased": text_toys.llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "llama3": text_toys.llama(rope_parameters=LLAMA3),
        "linear": text_toys.llama(rope_parameters=LINEAR, head_dim=16),
        "mistral": MistralConfig(**shared, sliding_window=4),
        "qwen2": Qwen2Config(**shared),
        "qwen2_window": Qwen2Config(**shared, use_sliding_window=True, sliding_window=5, max_window_layers=0),
        "qwen3": Qwen3Config(**shared, head_dim=16),
        "gpt2": text_toys.gpt2(n_inner=48),
    }


def vit_config(**options: Any) -> ViTConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTConfig(**{**sizes, "image_size": 16, "patch_size": 4, "num_labels": 5, **options})


def save_random(config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers, also written to a folder. No bias is left zero, and no norm one."""
    auto = AutoModelForImageClassification if config.model_type == "vit" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.2).add_(1.0 if "norm" in name or "ln_" in name else 0.0)
    model.save_pretrained(folder)
    return model


def pairs_of(configs: Mapping[str, PretrainedConfig], factory: Any) -> Callable[[str], tuple[Any, Any, Path]]:
    """The model of transformers, ours, and their folder, by name; each made once, in a folder of `tmp_path_factory`."""

    @cache
    def get(name: str) -> tuple[Any, Any, Path]:
        folder = factory.mktemp(name)
        return save_random(configs[name], folder), load_model(folder), folder

    return get


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCABULARY, (rows, length))


def torch_logits(model: Any, ids: np.ndarray, **options: Any) -> np.ndarray:
    """What transformers gives; the options are arrays."""
    with torch.no_grad():
        given = {name: torch.as_tensor(value) for name, value in options.items()}
        return model(torch.as_tensor(ids), **given).logits.float().numpy()


def logits(model: Any, ids: Any, **options: Any) -> np.ndarray:
    """What ours gives, compiled: op by op each test would take seconds. The options are arrays."""
    graph, state = nnx.split(model)
    return np.asarray(
        _logits(graph, state, jnp.asarray(ids), {name: jnp.asarray(value) for name, value in options.items()})
    )


@partial(jax.jit, static_argnums=0)
def _logits(graph: Any, state: Any, ids: jax.Array, options: dict[str, jax.Array]) -> jax.Array:
    return nnx.merge(graph, state)(ids, **options)


def furthest(a: Any, b: Any) -> float:
    """The largest difference between two arrays, or between two trees of them."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max()) for x, y in pairs)
