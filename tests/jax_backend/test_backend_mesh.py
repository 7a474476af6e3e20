"""Meshes, sharding rules, and states on a mesh."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import CLASSES, INPUTS, TX, WIDTH, Net, Noisy, are_equal, new_state
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, PartitionSpec

from trainformer.backends.jax import sharding
from trainformer.backends.jax.sharding import AXES, data_shards, make_mesh, resolve_dims
from trainformer.backends.jax.state import TrainState
from trainformer.core.errors import BadArgument, DataError


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ((1, -1, 1, 1), (1, 8, 1, 1, 1)),
        ((-1, 1, 2, 1), (4, 1, 1, 2, 1)),
        ([2, 1, 2, 2], (2, 1, 1, 2, 2)),
        ((1, 8, 1, -1), (1, 8, 1, 1, 1)),
        ((1, 2, -1, 1, 1), (1, 2, 4, 1, 1)),
    ],
)
def test_minus_one_takes_the_remaining_devices(asked, got):
    assert resolve_dims(asked, 8) == got


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((1, -1, -1, 1), "at most one -1"),
        ((1, -1, 1), "four or five positive"),
        ((1, 1, 1, 1, 1, -1), "four or five positive"),
        ((1, 0, 1, 1), "four or five positive"),
        ((1, -2, 1, 1), "four or five positive"),
        ((1.5, 1, 1, 1), "four or five positive"),
        (("1", "x", 1, 1), "four or five positive"),
        (8, "four or five positive"),
        ((3, -1, 1, 1), "divide 8 devices, received a product of 3"),
        ((2, 2, 1, 1), "multiply to the 8 available devices, received 4"),
    ],
)
def test_invalid_axes_are_refused(asked, message):
    with pytest.raises(BadArgument, match=message):
        resolve_dims(asked, 8)


def test_a_mesh_has_five_auto_axes_and_shards_data_over_three():
    mesh = make_mesh((2, -1, 2, 1))
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Auto,) * 5
    assert data_shards(mesh) == 4
    assert data_shards(make_mesh((1, 2, 2, 2, 1))) == 4
    assert make_mesh((1, -1, 1, 1), jax.devices()[:4]).devices.size == 4


def specs(tree):
    return {"/".join(path): s.spec for path, s in flatten_dict(tree).items()}


def shapes(**sizes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


def test_the_first_matching_rule_wins_and_leading_dimensions_are_not_sharded():
    mesh = make_mesh((1, 2, 4, 1))
    params = shapes(q=(3, 8, 8), q_bias=(3, 8), other=(8, 8))
    rules = [("q_bias", ("tp",)), ("q", ("fsdp", "tp")), ("q|other", ("tp", "fsdp"))]
    assert specs(sharding.param_shardings(params, mesh, rules)) == {
        "q": PartitionSpec(None, "fsdp", "tp"),
        "q_bias": PartitionSpec(None, "tp"),
        "other": PartitionSpec("tp", "fsdp"),
    }


def test_axes_that_do_not_divide_are_dropped_and_logged_once(caplog):
    mesh = make_mesh((1, 4, 2, 1))
    params = shapes(a=(6, 8), b=(6, 4), c=(8, 8), d=(12, 2))
    rules = [("d", (("fsdp", "tp"), None)), (".", ("fsdp", ("tp", "sp", "dp")))]
    with caplog.at_level(logging.INFO, logger="trainformer"):
        found = specs(sharding.param_shardings(params, mesh, rules))
    assert found["a"] == found["b"] == PartitionSpec(None, "tp")
    assert found["c"] == PartitionSpec("fsdp", "tp")
    assert found["d"] == PartitionSpec("fsdp", None)  # 12 divides by 4, not by 8
    (record,) = caplog.records
    assert "fsdp (4): a, b" in record.getMessage()
    assert "tp (2): d" in record.getMessage()
    assert "dp (1)" not in record.getMessage()  # axes of size 1 are not mentioned


def test_unmatched_parameters_are_sharded_along_their_largest_dimension():
    mesh = make_mesh((1, 4, 2, 1))
    params = shapes(wide=(64, 100), tall=(30, 66), odd=(33, 35), small=(8, 8), scalar=())
    assert specs(sharding.param_shardings(params, mesh)) == {
        "wide": PartitionSpec(None, "fsdp"),
        "tall": PartitionSpec(None, None),
        "odd": PartitionSpec(None, None),
        "small": PartitionSpec(None, None),
        "scalar": PartitionSpec(),
    }
    assert specs(sharding.param_shardings(shapes(tall=(32, 66)), mesh))["tall"] == PartitionSpec("fsdp", None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("a", ("fsdq",)), "Did you mean 'fsdp'"),
        (("a(", ("fsdp",)), "regular expressions"),
        (("a", ("fsdp", None, None)), "at most 2 dimensions"),
        (("a", "fsdp"), "tuple of axes"),
    ],
)
def test_invalid_rules_are_refused(rule, message):
    with pytest.raises(BadArgument, match=message):
        sharding.param_shardings(shapes(a=(8, 8)), make_mesh(), [rule])


def test_weights_and_moments_are_sharded():
    _, state, _ = new_state((1, 4, 2, 1))
    adam = state.opt_state[0]
    for tree in (state.params, adam.mu, adam.nu):
        assert {s.data.shape for s in tree["layers"]["kernel"].addressable_shards} == {(2, WIDTH // 4, WIDTH // 2)}
        assert {s.data.shape for s in tree["inner"]["kernel"].addressable_shards} == {(INPUTS, WIDTH // 8)}
        assert {s.data.shape for s in tree["outer"]["kernel"].addressable_shards} == {(WIDTH // 4, CLASSES)}
        assert {s.data.shape for s in tree["outer"]["bias"].addressable_shards} == {(CLASSES,)}
    assert adam.count.sharding.is_fully_replicated
    assert state.step.sharding.is_fully_replicated


def moments(tx):
    """Shape and PartitionSpec of the whole optimizer state."""
    state = jax.eval_shape(lambda: TrainState.create(Net(nnx.Rngs(0)), tx))
    found = sharding.state_shardings(state, make_mesh((1, 4, 2, 1)), Net.partition_rules)
    pairs = zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(found.opt_state), strict=True)
    return [(leaf.shape, where.spec) for leaf, where in pairs]


def test_moments_inside_wrapped_optimizers_are_sharded():
    wrapped = optax.chain(
        optax.clip(1.0), optax.masked(optax.adam(1e-3), {"inner": False, "layers": True, "outer": True})
    )
    layers = [spec for shape, spec in moments(wrapped) if shape == (2, WIDTH, WIDTH)]
    assert layers == [PartitionSpec(None, "fsdp", "tp")] * 2


def test_moments_with_another_shape_than_the_parameter_are_replicated():
    found = moments(optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9))
    factored = [spec for shape, spec in found if shape == (2, WIDTH)]
    assert factored == [PartitionSpec()] * 2  # the row and the column moment of the stacked layers
    assert [spec for shape, spec in found if shape == (2, WIDTH, WIDTH)] == [PartitionSpec(None, "fsdp", "tp")]


def test_initial_weights_do_not_depend_on_the_mesh():
    _, one, _ = new_state((1, 1, 1, 1), Noisy)
    _, many, _ = new_state((2, 2, 2, 1), Noisy)
    assert are_equal(one.params, many.params)
    assert are_equal(one.variables, many.variables)


def test_a_model_with_weights_is_copied_to_the_mesh_and_stays_usable():
    mesh = make_mesh((1, 4, 1, 1), jax.devices()[:4])
    model, key = Net(nnx.Rngs(3)), jax.random.key(1)
    before = np.array(model.layers.kernel[...])
    state, shardings = sharding.create_sharded(model, TX, key, mesh)
    assert are_equal(state.params, TrainState.create(model, TX, key).params)
    assert state.params["layers"]["kernel"].addressable_shards[0].data.shape == (2, WIDTH // 4, WIDTH)
    assert jax.tree.structure(state) == jax.tree.structure(shardings)
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as a step that donates the state does
    assert np.array_equal(model.layers.kernel[...], before)
    assert np.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(1)))


def test_host_arrays_are_copied_shard_by_shard():
    mesh = make_mesh()
    host = {"a": np.arange(64, dtype=np.float32).reshape(16, 4)}
    placed = sharding.copy_to_mesh(host, sharding.param_shardings(host, mesh, [("a", ("fsdp", None))]))
    assert np.array_equal(placed["a"], host["a"])
    assert {s.data.shape for s in placed["a"].addressable_shards} == {(2, 4)}


def test_uneven_rows_are_refused_with_advice():
    mesh = make_mesh((2, 2, 2, 1))
    sharding.check_rows(8, mesh, accumulation=2)
    with pytest.raises(DataError, match=r"4 devices .* 2 micro-batches, received 12 rows.*multiple of 8"):
        sharding.check_rows(12, mesh, accumulation=2)


def test_rows_are_constrained_only_with_a_current_mesh():
    assert sharding.constrain_rows({"x": jnp.ones((8, 2))})["x"].sharding.is_fully_replicated
    with jax.set_mesh(make_mesh((2, 2, 2, 1))):
        x = jax.jit(sharding.constrain_rows)(jnp.ones((8, 2)))
        odd = jax.jit(sharding.constrain_rows)(jnp.ones((3, 2)))
    assert x.addressable_shards[0].data.shape == (2, 2)
    assert odd.shape == (3, 2)  # sharded unevenly
