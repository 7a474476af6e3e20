"""Mixtures of experts: logits and gradients of transformers, folders, LoRA, meshes with an expert axis."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_model_toys import furthest, logits, save_random, tokens, torch_logits
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from trainformer.core.errors import BadArgument, DataError
from trainformer.models.jax import apply_lora, load_model, model_from_config, save_lora

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0}
HEADS = {"num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1, "num_experts_per_tok": 2}
ALL = {**SIZES, **HEADS}
CONFIGS = {
    "mixtral": MixtralConfig(**ALL, intermediate_size=24, num_local_experts=4, sliding_window=6),
    "qwen2_moe": Qwen2MoeConfig(
        **ALL, intermediate_size=8, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6
    ),
    "qwen3_moe": Qwen3MoeConfig(**ALL, moe_intermediate_size=24, num_experts=4, norm_topk_prob=True, head_dim=16),
    "olmoe": OlmoeConfig(**{**ALL, "num_key_value_heads": 4}, intermediate_size=24, num_experts=8, pad_token_id=None),
}


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory):
    """A model of transformers and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return save_random(CONFIGS[request.param], folder), folder


def test_logits_are_those_of_transformers(saved):
    theirs, folder = saved
    ids = tokens()
    np.testing.assert_allclose(logits(load_model(folder), ids), torch_logits(theirs, ids), rtol=1e-4, atol=1e-4)


def test_a_round_trip_is_bitwise_and_opens_in_transformers(saved, tmp_path):
    theirs, folder = saved
    load_model(folder).save_pretrained(tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))
    # All experts in one array, as in memory.
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "fused" / "model.safetensors"))
    assert furthest(nnx.state(load_model(tmp_path / "fused")), nnx.state(load_model(folder))) == 0.0
    # From a config alone.
    built = model_from_config(load_model(folder).config, seed=1)
    object.__setattr__(built.config, "source", "")
    built.save_pretrained(tmp_path / "new")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    np.testing.assert_allclose(torch_logits(opened, tokens()), logits(built, tokens()), atol=1e-4)
