"""Mixtures of experts: logits and gradients of transformers, folders, LoRA, meshes with an expert axis."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_model_toys import furthest, logits, save_random, tokens, torch_logits
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from trainformer.backends.jax.sharding import batch_sharding, make_mesh, param_shardings
from trainformer.core.errors import BadArgument, DataError
from trainformer.losses.jax.router import RouterStatistics, layer_sums, load_balancing_loss
from trainformer.losses.jax.tokens import row_sums
from trainformer.models.jax import apply_lora, load_model, model_from_config, save_lora
from trainformer.models.jax.block import RouterProbe

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
    built = model_from_config(replace(load_model(folder).config, source=""), seed=1)
    built.save_pretrained(tmp_path / "new")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    np.testing.assert_allclose(torch_logits(opened, tokens()), logits(built, tokens()), atol=1e-4)


# -- gradients, on one device and on meshes --------------------------------------------------------------------------

COEFFICIENT = 0.1
IDS = tokens(rows=8, length=12)
MASK = np.ones_like(IDS)
MASK[:3, 8:] = 0  # padding neither has a loss nor counts as routed


def _loss_and_gradients(model):
    graph, state = nnx.split(model)

    def loss(state, ids, mask):
        model, labels = nnx.merge(graph, state), jnp.where(mask == 1, ids, -100)
        probe = RouterProbe(lambda logits, chosen: layer_sums(logits, chosen, mask))
        sums = row_sums(model.hidden_states(ids, probe=probe), labels, model.head).total()
        routed = RouterStatistics(*probe.found, jnp.sum(mask))
        return sums.sum / sums.weight + COEFFICIENT * load_balancing_loss(routed, routed)

    mesh = jax.sharding.get_mesh()
    ids, mask = (jnp.asarray(a) if mesh.empty else jax.device_put(a, batch_sharding(mesh)) for a in (IDS, MASK))
    return jax.jit(jax.value_and_grad(loss))(state, ids, mask)


@cache
def _on_one_device(folder):
    return _loss_and_gradients(load_model(folder))


def test_gradients_are_those_of_transformers(saved):
    """Of the loss of transformers, with its load-balancing loss."""
    theirs, folder = saved
    loss, gradients = _on_one_device(folder)
    theirs.zero_grad()
    theirs.router_aux_loss_coef = COEFFICIENT
    ids, mask = torch.as_tensor(IDS), torch.as_tensor(MASK)
    labels = torch.where(mask == 1, ids, -100)
    wanted = theirs(ids, attention_mask=mask, labels=labels, output_router_logits=True).loss
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
    of_experts = gradients["layers"]["mlp"]["experts"]
    for number, layer in enumerate(theirs.model.layers):
        gate_up = layer.mlp.experts.gate_up_proj.grad
        pairs = {
            "gate_proj": gate_up.chunk(2, dim=1)[0],
            "up_proj": gate_up.chunk(2, dim=1)[1],
            "down_proj": layer.mlp.experts.down_proj.grad,
        }
        for name, gradient in pairs.items():
            own = np.asarray(of_experts[name][...])[number]
            np.testing.assert_allclose(own, gradient.transpose(1, 2).numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
        router = np.asarray(gradients["layers"]["mlp"]["router"][...])[number]
        np.testing.assert_allclose(router, layer.mlp.gate.weight.grad.T.numpy(), rtol=1e-3, atol=1e-5)
    table = np.asarray(gradients["embed_tokens"]["embedding"][...])
    np.testing.assert_allclose(table, theirs.model.embed_tokens.weight.grad.numpy(), rtol=1e-3, atol=1e-5)


# Four devices: eight virtual ones on few cores can block each other in independent collective operations. Mixtral has
# four experts and OLMoE eight; six do not divide by four, so that each device has all of them.
MESHES = {
    "mixtral": (1, 1, 2, 2, 1),
    "qwen2_moe": (1, 1, 4, 1, 1),
    "qwen3_moe": (1, 1, 2, 1, 2),
    "olmoe": (1, 2, 2, 1, 1),
}


def test_experts_on_a_mesh_give_the_gradients_of_one_device(saved):
    theirs, folder = saved
    kind = theirs.config.model_type
    model = load_model(folder)
    wanted = _on_one_device(folder)
    mesh = make_mesh(MESHES[kind], jax.devices()[: int(np.prod(MESHES[kind]))])
    graph, state = nnx.split(model)
    shardings = param_shardings(nnx.to_pure_dict(state), mesh, type(model).partition_rules)
    placed = jax.device_put(jax.tree.leaves(state), jax.tree.leaves(shardings))
    with jax.set_mesh(mesh):
        sharded = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), placed))
        found = _loss_and_gradients(sharded)
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted[1]))
    assert furthest(found[1], wanted[1]) <= 1e-5 * largest
    held = {shard.data.shape[1] for shard in sharded.layers.mlp.experts.gate_proj[...].addressable_shards}
    ep, experts = mesh.shape["ep"], model.config.num_experts
    assert held == {experts // ep if experts % ep == 0 else experts}


# -- folders and LoRA ------------------------------------------------------------------------------------------------


@pytest.fixture
def mixtral(tmp_path):
    save_random(CONFIGS["mixtral"], tmp_path / "mixtral")
    return tmp_path / "mixtral"


def test_lora_adapts_attention_and_leaves_the_experts(mixtral, tmp_path):
    peft = pytest.importorskip("peft")
    model = load_model(mixtral)
    with pytest.raises(BadArgument, match=r"received 'w1'.*experts"):
        apply_lora(model, targets=["w1"])
    apply_lora(model, r=4, targets="all-linear")
    assert set(model.lora.targets) == {f"layers/attention/{name}_proj" for name in "qkvo"}
    model.layers.attention.q_proj.lora_b[...] += 0.3
    save_lora(model, tmp_path / "adapter", base_model=str(mixtral))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixtral), tmp_path / "adapter")
    np.testing.assert_allclose(logits(model, tokens()), torch_logits(theirs, tokens()), atol=1e-4)


def test_folders_that_do_not_fit_are_refused(mixtral, tmp_path):
    def with_config(**changes):
        folder = shutil.copytree(mixtral, tmp_path / "-".join(changes))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    with pytest.raises(DataError, match=r"w\d\.weight of 5 experts.*received '4 of them'"):
        load_model(with_config(num_local_experts=5))
    with pytest.raises(BadArgument, match="num_experts_per_tok from 1 to the 4 experts"):
        load_model(with_config(num_experts_per_tok=9))
    with pytest.raises(BadArgument, match="router_jitter_noise"):
        load_model(with_config(router_jitter_noise=0.1))
    with pytest.raises(BadArgument, match="mlp_only_layers to be empty"):
        model_from_config({**CONFIGS["qwen2_moe"].to_dict(), "mlp_only_layers": [1]})
    with pytest.raises(BadArgument, match="decoder_sparse_step"):
        model_from_config({**CONFIGS["qwen3_moe"].to_dict(), "decoder_sparse_step": 2})
