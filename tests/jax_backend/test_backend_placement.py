"""Batches on the mesh, names of dtypes and of remat policies."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainformer.backends.jax import precision
from trainformer.backends.jax.placement import Placer
from trainformer.backends.jax.sharding import make_mesh
from trainformer.backends.jax.step import resolve_remat
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import HostBatch

MESH_DIMS = (2, 2, 2, 1)


def text_batch(rows=8):
    ids = np.arange(rows * 6).reshape(rows, 6)
    return {"input_ids": ids, "attention_mask": (ids % 3 > 0).astype(np.int32)}


def test_rows_are_sharded_over_the_data_axes_and_tokens_counted_on_the_host():
    mesh = make_mesh(MESH_DIMS)
    batch = text_batch()
    placed = Placer(mesh).place(HostBatch(batch, 7, 1, None, 9, 8))
    ids = placed.data["input_ids"]
    assert np.array_equal(ids, batch["input_ids"])
    assert {s.data.shape for s in ids.addressable_shards} == {(2, 6)}
    assert placed._replace(data=None) == (None, 7, int(batch["attention_mask"].sum()), 1, False, 9, 8, None)
    del batch["attention_mask"]
    assert Placer(mesh).place(HostBatch(batch, 8)).tokens == 48
    assert Placer(mesh).place(HostBatch({"x": np.ones((8, 2))}, 8)).tokens == 0
    assert Placer(mesh).place(HostBatch(batch, 0)).tokens == 0  # a batch that only keeps the ranks in step


def test_batches_keep_their_order_and_one_is_prefetched():
    taken = []

    def source():
        for number in range(4):
            taken.append(number)
            yield HostBatch({"x": np.full((8, 1), number)}, 8)

    feed = Placer(make_mesh(MESH_DIMS)).feed(source())
    seen = []
    for placed in feed:
        number = int(placed.data["x"][0, 0])
        assert taken[-1] == min(number + 1, 3)
        seen.append(number)
    assert seen == [0, 1, 2, 3]


def test_a_scalar_is_replicated():
    placed = Placer(make_mesh(MESH_DIMS)).place(HostBatch({"x": np.ones((8, 2)), "temperature": np.float32(0.5)}, 8))
    assert placed.data["temperature"].sharding.is_fully_replicated
    assert float(placed.data["temperature"]) == 0.5


def test_text_columns_stay_on_the_host_and_are_logged_once(caplog):
    placer = Placer(make_mesh(MESH_DIMS))
    data = {"x": np.ones(8), "text": np.array(["a"] * 8), "meta": [{"a": 1}] * 8, "half": jnp.ones(8, jnp.bfloat16)}
    with caplog.at_level(logging.INFO, logger="trainformer"):
        first, second = (placer.place(HostBatch(data, 8)).data for _ in range(2))
    assert set(first) == set(second) == {"x", "half"}
    (record,) = caplog.records
    assert "meta, text" in record.getMessage()
    assert placer.place(HostBatch({"h": np.ones(8, jnp.bfloat16)}, 8)).data["h"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("data", "accumulation", "message"),
    [
        ({"x": np.ones((6, 2))}, 1, "received 6 rows.*multiple of 4"),
        ({"x": np.ones((12, 2))}, 2, "received 12 rows.*multiple of 8"),
        ({"x": np.ones((8, 2)), "y": np.ones(4)}, 1, "the same number of rows"),
        ({"text": ["a"] * 8}, 1, "at least one column of numbers"),
        ({"x": [[1, 2], [3]]}, 1, "column 'x'"),
        ([np.ones(8)], 1, "mapping of names"),
    ],
)
def test_invalid_batches_are_refused(data, accumulation, message):
    with pytest.raises(DataError, match=message):
        list(Placer(make_mesh(MESH_DIMS), accumulation).feed([HostBatch(data, 8)]))


def test_eval_batches_need_not_divide_into_micro_batches():
    feed = Placer(make_mesh(MESH_DIMS), accumulation=2).feed([HostBatch({"x": np.ones(12)}, 12)], train=False)
    assert next(feed).size == 12


# -- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("no", jnp.float32), ("fp32", jnp.float32), ("BF16", jnp.bfloat16), ("float16", jnp.float16),
        (None, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (np.dtype("float32"), jnp.float32), ("auto", jnp.float32),
    ],
)  # fmt: skip
def test_dtype_names(name, dtype):
    assert precision.resolve_dtype(name) == dtype


def test_auto_is_bf16_on_accelerators():
    assert [precision.resolve_dtype("auto", on).name for on in ("gpu", "tpu", "cpu")] == ["bfloat16"] * 2 + ["float32"]


@pytest.mark.parametrize(
    ("name", "message"), [("bf61", "Did you mean"), (jnp.int32, "floating"), (object(), "a dtype")]
)
def test_invalid_dtypes_are_refused(name, message):
    with pytest.raises(BadArgument, match=message):
        precision.resolve_dtype(name)


def test_casting_leaves_integers_booleans_and_keys():
    tree = {"w": jnp.ones(2), "n": jnp.ones(2, jnp.int32), "b": jnp.ones(2, bool), "k": jax.random.key(0)}
    cast = precision.cast_floating(tree, jnp.bfloat16)
    assert {name: leaf.dtype == tree[name].dtype for name, leaf in cast.items()} == {
        "w": False, "n": True, "b": True, "k": True,
    }  # fmt: skip
    assert cast["w"].dtype == jnp.bfloat16


def test_layers_with_a_dtype_keep_it():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.open = nnx.Linear(2, 2, rngs=rngs)
            self.wide = nnx.Linear(2, 2, dtype=jnp.float32, rngs=rngs)

    model = Two(nnx.Rngs(0))
    precision.set_compute_dtype(model, jnp.dtype(jnp.bfloat16))
    assert model.open(jnp.ones((1, 2))).dtype == jnp.bfloat16
    assert model.wide(jnp.ones((1, 2))).dtype == jnp.float32


# -- remat ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [None, "", "none", "None", False])
def test_remat_names_that_mean_off(off):
    assert resolve_remat(off) is None


def test_remat_policy_names():
    policies = jax.checkpoint_policies
    assert resolve_remat("nothing_saveable") is policies.nothing_saveable
    assert resolve_remat(True) is policies.nothing_saveable
    assert resolve_remat("checkpoint_dots") is policies.checkpoint_dots
    assert resolve_remat("everything") is policies.everything_saveable
    own = policies.save_only_these_names("a")
    assert resolve_remat(own) is own
    with pytest.raises(BadArgument, match="Did you mean 'nothing_saveable'"):
        resolve_remat("nothing_savable")
    with pytest.raises(BadArgument, match="Use one of none, nothing_saveable"):
        resolve_remat("qqqq")
