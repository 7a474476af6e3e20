"""Models on meshes: same logits on every mesh, shard shapes, remat and unrolling."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_model_toys import configs, furthest, logits, save_random, tokens, torch_logits

import text_toys
from trainformer.backends.jax.sharding import make_mesh
from trainformer.models.jax import constrain, load_model


def mesh_of(*sizes):
    return make_mesh(sizes, jax.devices()[: int(np.prod(sizes))])


def placer(model_class, mesh):
    """Places parameters by the model's partition rules."""

    def place(path, array):
        spec = next(spec for rule, spec in model_class.partition_rules if re.search(rule, path))
        spec = (*[None] * (array.ndim - len(spec)), *spec) if spec else ()
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    return place


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_random(configs()[request.param], folder)
    return request.param, folder, theirs


# Shard shapes of the kernel of the first projection (2, in, out) and of the embedding (320, 32).
MESHES = {
    (1, 2, 2, 1): {"llama": (2, 16, 16), "gpt2": (2, 16, 48), "embedding": (160, 16)},
    (1, 1, 1, 4): {"llama": (2, 32, 32), "gpt2": (2, 32, 96), "embedding": (320, 32)},
}


@pytest.mark.parametrize("sizes", MESHES)
def test_logits_do_not_depend_on_the_mesh(sizes, saved):
    name, folder, theirs = saved
    plain = load_model(folder)
    ids, mask = tokens(rows=4, length=8), np.ones((4, 8), np.int64)
    mask[1, :3] = 0
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    mesh = mesh_of(*sizes)
    with jax.set_mesh(mesh):
        model = load_model(folder, place=placer(type(plain), mesh))
        data = NamedSharding(mesh, PartitionSpec(("dp", "fsdp"), "sp"))
        got = logits(model, jax.device_put(ids, data), attention_mask=jax.device_put(mask, data))
    assert furthest(logits(plain, ids, attention_mask=mask), got) <= 1e-5
    wanted = torch_logits(theirs, ids, attention_mask=mask, position_ids=positions)
    assert furthest(wanted[mask == 1], got[mask == 1]) <= 1e-4
    first = model.layers.attention.qkv_proj if name == "gpt2" else model.layers.attention.q_proj
    held = {shard.data.shape for shard in first.kernel[...].addressable_shards}
    assert held == {MESHES[sizes][name]}
    held = {shard.data.shape for shard in model.embed_tokens.embedding[...].addressable_shards}
    assert held == {MESHES[sizes]["embedding"]}


def test_a_model_on_a_mesh_is_saved_completely(saved, tmp_path):
    _, folder, _ = saved
    plain, mesh = load_model(folder), mesh_of(1, 2, 2, 1)
    load_model(folder, place=placer(type(plain), mesh)).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert furthest(nnx.state(load_model(tmp_path)), nnx.state(plain)) == 0.0


def test_constrain_drops_axes_that_do_not_divide():
    x = jnp.zeros((6, 8, 5))
    assert constrain(x, "batch", "sequence", "heads") is x
    with jax.set_mesh(mesh_of(2, 2, 1, 2)):
        # 6 rows do not divide over 2 x 2 devices, but over the first axis.
        spec = jax.jit(lambda x: constrain(x, "batch", "sequence", "heads"))(x).sharding.spec
        whole = jax.jit(lambda x: constrain(x, "batch", None, None))(jnp.zeros((8, 3, 3))).sharding.spec
        assert jax.jit(lambda x: constrain(x, "heads"))(x).sharding.is_fully_replicated
    assert tuple(spec)[:2] == ("dp", "sp")
    assert tuple(whole)[:1] == (("dp", "fsdp"),)
    with jax.set_mesh(jax.make_mesh((2,), ("other",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])):
        assert constrain(x, "batch") is x


def test_every_parameter_has_a_rule_with_its_rank(saved):
    _, folder, _ = saved
    model = load_model(folder)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        name = "/".join(map(str, path))
        spec = next(spec for rule, spec in model.partition_rules if re.search(rule, name))
        rank = variable[...].ndim - (1 if name.startswith("layers/") else 0)
        assert len(spec) in (0, rank), name
        # Only norms, and biases of replicated outputs, are replicated.
        assert spec or re.search(r"norm/|(o|down)_proj/bias$", name), name


POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


# An implementation that compiles in half the time.
KEY = jax.random.key(0, impl="unsafe_rbg")


def _loss_and_gradients(model, ids):
    def loss(state, graph):
        logits = nnx.merge(graph, state)(ids, deterministic=False, key=KEY)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(ids, -1, 1)[..., None], -1))

    graph, state = nnx.split(model)
    lowered = jax.jit(jax.value_and_grad(loss), static_argnums=1).lower(state, graph)
    return lowered.compile()(state), lowered.as_text()


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """GPT-2 with dropout: recomputation must use the same masks."""
    folder = tmp_path_factory.mktemp("remat")
    save_random(text_toys.gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.3), folder)
    model, ids = load_model(folder), jnp.asarray(tokens())
    return model, ids, _loss_and_gradients(model, ids)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_does_not_change_the_gradients(policy, dropping):
    model, ids, (plain, _) = dropping
    model.configure(remat=POLICIES[policy])
    again, _ = _loss_and_gradients(model, ids)
    assert float(plain[0]) == float(again[0])
    assert furthest(plain[1], again[1]) <= 1e-6
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(again[1])) > 1e-3


@pytest.mark.slow
def test_unrolled_layers_with_remat_give_the_same(dropping):
    model, ids, (plain, scanned) = dropping
    model.configure(unroll=True, remat=POLICIES["nothing"])
    again, unrolled = _loss_and_gradients(model, ids)
    assert furthest(plain, again) <= 1e-5
    assert scanned.count("stablehlo.while") > unrolled.count("stablehlo.while")


def test_remat_reduces_the_residuals_of_the_forward_pass(saved):
    model, ids = load_model(saved[1]), jnp.asarray(tokens())
    kept = {}
    for policy in (None, "nothing"):
        model.configure(remat=POLICIES.get(policy))
        graph, state = nnx.split(model)

        def backward(state, graph=graph):
            return jax.vjp(lambda state: nnx.merge(graph, state)(ids), state)[1]

        forward = jax.eval_shape(backward, state)
        kept[policy] = sum(leaf.size for leaf in jax.tree.leaves(forward))
    assert kept["nothing"] < 0.6 * kept[None]
