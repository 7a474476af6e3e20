"""States in orbax files: exact, on other meshes, and refused if they do not match."""

from __future__ import annotations

import json
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import TX, Net, Noisy, are_equal, assert_close, batches, loss, new_state, put

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.sharding import copy_to_mesh
from trainformer.backends.jax.step import make_train_step
from trainformer.checkpointing.jax_files import INDEX, read_arrays, read_state, snapshot, write_state
from trainformer.core.errors import DataError

DATA = batches(2)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A state after one step, the state after the next step, and the folder of the first."""
    mesh, state, shardings = new_state((1, 4, 1, 1), Noisy)
    step = JittedStep(make_train_step(loss), mesh, shardings, train=True)
    state, _ = step(state, put(mesh, DATA[0]))
    folder = tmp_path_factory.mktemp("checkpoint") / "state"
    files = write_state(folder, state)
    kept = copy_to_mesh(state, shardings)
    after, _ = step(state, put(mesh, DATA[1]))
    return mesh, step, kept, after, folder, files


def test_a_state_is_restored_bitwise_and_continues_identically(written):
    mesh, step, kept, after, folder, _ = written
    _, other, _ = new_state((1, 4, 1, 1), Noisy, seed=7)
    read = read_state(folder, other)
    assert not are_equal(other, kept)
    assert are_equal(read, kept)
    assert [leaf.sharding for leaf in jax.tree.leaves(read)] == [leaf.sharding for leaf in jax.tree.leaves(kept)]
    again, _ = step(read, put(mesh, DATA[1]))
    assert are_equal(again, after)
    assert step.compilations.count == 1


@pytest.mark.parametrize("dims", [(1, 2, 1, 1), (2, 2, 2, 1)])
def test_a_state_can_be_restored_on_fewer_and_more_devices(written, dims):
    _, _, kept, after, folder, _ = written
    mesh, other, shardings = new_state(dims, Noisy, seed=7)
    shapes = jax.eval_shape(lambda: other)
    like = jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)
    read = read_state(folder, like)
    assert are_equal(read, kept)
    assert jax.tree.leaves(jax.tree.map(lambda leaf, where: leaf.sharding == where, read, shardings)).count(False) == 0
    again, _ = JittedStep(make_train_step(loss), mesh, shardings, train=True)(read, put(mesh, DATA[1]))
    assert_close(again.params, after.params, atol=1e-4)


def test_the_files_are_listed_and_can_be_moved(written, tmp_path):
    *_, kept, _, folder, files = written
    there = {path.relative_to(folder.parent).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(files) == there
    assert f"state/{INDEX}" in there
    assert not any(str(folder.parent).encode() in (folder.parent / name).read_bytes() for name in files)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in files:
        (moved / name).parent.mkdir(parents=True, exist_ok=True)
        (moved / name).write_bytes((folder.parent / name).read_bytes())
    assert are_equal(read_state(moved / "state", kept), kept)


def test_the_root_logger_is_not_configured(written, tmp_path, monkeypatch):
    """absl would give it a handler when orbax logs."""
    *_, kept, _, folder, _ = written
    monkeypatch.setattr(logging.root, "handlers", [])
    assert read_arrays(folder)
    read_state(folder, kept)
    write_state(tmp_path / "state", kept)
    assert logging.root.handlers == []


def test_a_snapshot_survives_donation_and_can_be_written_by_another_thread(tmp_path):
    mesh, state, shardings = new_state((1, 4, 1, 1))
    before = snapshot(state)
    copy = {name: np.array(array) for name, array in before.arrays.items()}
    step = JittedStep(make_train_step(loss), mesh, shardings, train=True)
    writing = threading.Thread(target=write_state, args=(tmp_path / "state", before))
    new, _ = step(state, put(mesh, DATA[0]))
    writing.start()
    new, _ = step(new, put(mesh, DATA[1]))
    writing.join()
    assert are_equal(before.arrays, copy)
    read = read_state(tmp_path / "state", new)
    assert are_equal(snapshot(read).arrays, copy)
    assert int(read.step) == 0


def test_bf16_and_other_key_types_are_restored_exactly(tmp_path):
    _, state, _ = new_state(tx=optax.adafactor(1e-3, min_dim_size_to_factor=8))
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)
    variables = {
        "flag": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "keys": jax.random.split(jax.random.key(3), 2),
    }
    state = state.replace(params=narrow, rng=jax.random.key(5, impl="rbg"), variables=variables)
    write_state(tmp_path / "state", state)
    read = read_state(tmp_path / "state", state)
    assert are_equal(snapshot(read).arrays, snapshot(state).arrays)
    assert read.params["layers"]["kernel"].dtype == jnp.bfloat16
    assert read.rng.dtype == state.rng.dtype
    assert jax.random.uniform(read.variables["keys"][1]) == jax.random.uniform(variables["keys"][1])
    assert read.variables["empty"].shape == (0, 3)


def changed(state, how):
    params = {name: dict(part) for name, part in state.params.items()}
    if how == "dtype":
        params["outer"]["bias"] = params["outer"]["bias"].astype(jnp.bfloat16)
    elif how == "shape":
        params["outer"]["bias"] = params["outer"]["bias"][:2]
    elif how == "missing":
        params["outer"]["scale"] = params["outer"]["bias"]
    elif how == "unexpected":
        del params["outer"]["bias"]
    elif how == "key":
        return state.replace(rng=jax.random.key_data(jax.random.key(0, impl="rbg")))
    return state.replace(params=params)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dtype", r"params/outer/bias is float32\[4\] there and bfloat16\[4\] here"),
        ("shape", r"params/outer/bias is float32\[4\] there and float32\[2\] here"),
        ("missing", "it lacks params/outer/scale"),
        ("unexpected", "it also has params/outer/bias"),
        ("key", r"rng is uint32\[2\] there and uint32\[4\] here"),
    ],
)
def test_mismatches_are_named(written, how, message):
    *_, kept, _, folder, _ = written
    with pytest.raises(DataError, match=message):
        read_state(folder, changed(kept, how))


def test_another_optimizer_or_model_is_refused(written):
    *_, folder, _ = written
    for build, tx, message in ((Noisy, optax.sgd(0.1), "it also has opt_state/0"), (Net, TX, "lacks .*layers/kernel")):
        _, other, _ = new_state(build=build, tx=tx)
        with pytest.raises(DataError, match=message):
            read_state(folder, other)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax closes its loop early
def test_damaged_or_missing_files_are_errors(tmp_path):
    _, state, _ = new_state()
    with pytest.raises(DataError, match=f"has no {INDEX}"):
        read_state(tmp_path / "nothing", state)
    files = write_state(tmp_path / "state", state)
    for name in files:
        if "/d/" in name:
            (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        read_state(tmp_path / "state", state)
    (tmp_path / "state" / INDEX).write_text(json.dumps([1]))
    with pytest.raises(DataError, match="damaged"):
        read_state(tmp_path / "state", state)
