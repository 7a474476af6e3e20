"""The router losses of mixtures of experts on JAX: those of the torch backend, on any mesh, however a step is split."""

from __future__ import annotations

import numpy as np
import pytest
from jax_model_toys import save_random
from text_trainer_toys import devices, furthest_weight, pairs, torch_run, trainer_of
from transformers import Qwen2MoeConfig

import text_toys as toys
from trainformer.core.errors import BadArgument
from trainformer.jax import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trainformer.loggers.jsonl import read_jsonl
from trainformer.tasks import DPO, CausalLM

COEFFICIENTS = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
NAMES = ("loss", "router_aux_loss", "router_z_loss", "router_load_max", "router_load_entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    save_random(Qwen2MoeConfig(**sizes, **heads, moe_intermediate_size=16, shared_expert_intermediate_size=24), path)
    toys.chat_tokenizer().save_pretrained(path)
    return path


def logged(where):
    """What was logged for each step."""
    rows = [row for row in read_jsonl(where / "metrics.jsonl") if "train/router_aux_loss" in row]
    return [[row[f"train/{name}"] for name in NAMES if f"train/{name}" in row] for row in rows]


def sft(folder, where, **given):
    # Rows of 32 tokens, a part of them padding.
    return trainer_of(SFTTrainer, SFTConfig, folder, pairs(), where, **{"logging_steps": 1, **COEFFICIENTS, **given})


def test_two_accumulated_steps_match_the_torch_backend(folder, tmp_path):
    task = CausalLM(str(folder), max_length=32, cache_dir=tmp_path / "t", **COEFFICIENTS)
    theirs = torch_run(task, pairs(), tmp_path / "torch", batch_size=8, accumulation_steps=2, log_every=1)
    options = {"eval_dataset": pairs()}
    mine = sft(folder, tmp_path, gradient_accumulation_steps=2, optimizer="sgd", eval_batch_size=6, options=options)
    mine.train()
    measured, expected = mine.eval(), theirs.evaluate()
    names = ("loss", "router_aux_loss", "router_load_max", "router_load_entropy")
    assert [measured[f"eval_{n}"] for n in names] == pytest.approx([expected[f"val/{n}"] for n in names], rel=1e-4)
    assert furthest_weight(mine.save_pretrained(tmp_path / "saved"), theirs.task.model) <= 1e-4
    wanted, found = logged(tmp_path / "torch"), logged(tmp_path / "run")
    assert len(found) == 2
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_losses_do_not_depend_on_mesh_and_accumulation(folder, tmp_path):
    def curve(dims, accumulation=1, scope="step"):
        where = tmp_path / f"{dims}-{accumulation}-{scope}"
        options = {"gradient_accumulation_steps": accumulation, "learning_rate": 0.01, "router_loss": scope}
        sft(folder, where, optimizer="adamw", options={"mesh": devices(dims)}, **options).train()
        return logged(where / "run")

    wanted = curve((1, 1, 1, 1))
    assert len(wanted) == 2
    assert len(wanted[0]) == len(NAMES)
    np.testing.assert_allclose(curve((1, 1, 2, 1, 2), accumulation=2), wanted, rtol=1e-5)
    # By itself, each half of a step is less even than the whole.
    assert curve((1, 1, 1, 1), accumulation=2, scope="batch")[0][1] > wanted[0][1] * (1 + 1e-4)


def test_preferences_have_a_router_loss_as_on_torch(folder, tmp_path):
    records = toys.preferences()
    task = DPO(str(folder), max_length=32, cache_dir=tmp_path / "t", router_aux_loss_coef=0.5)
    theirs = torch_run(task, records, tmp_path / "torch", batch_size=8, accumulation_steps=2, log_every=1)
    options = {"optimizer": "sgd", "gradient_accumulation_steps": 2, "logging_steps": 1}
    mine = trainer_of(DPOTrainer, DPOConfig, folder, records, tmp_path, router_aux_loss_coef=0.5, **options)
    mine.train()
    assert furthest_weight(mine.save_pretrained(tmp_path / "saved"), theirs.task.model) <= 1e-4
    np.testing.assert_allclose(logged(tmp_path / "run"), logged(tmp_path / "torch"), rtol=1e-4)


def test_contradictions_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="router_loss"):
        SFTConfig(router_loss="epoch")
    with pytest.raises(BadArgument, match="router_z_loss_coef to be a number of at least 0"):
        SFTConfig(router_z_loss_coef=-1.0)
    model = toys.llama()
    save_random(model, tmp_path / "dense")
    toys.chat_tokenizer().save_pretrained(tmp_path / "dense")
    with pytest.raises(BadArgument, match="a mixture of experts, and a trainer with a router loss, for router_aux"):
        sft(tmp_path / "dense", tmp_path)
