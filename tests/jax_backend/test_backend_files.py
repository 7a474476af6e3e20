"""States in files: exact, onto other meshes, and refused where they do not fit."""

from __future__ import annotations

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import TX, Net, Noisy, are_equal, assert_close, batches, loss, new_state, put

from trainformer.backends.jax.sharding import place
from trainformer.backends.jax.step import jit_train_step, make_train_step
from trainformer.checkpointing.jax_files import INDEX, like_of, read_params, read_state, snapshot, write_state
from trainformer.core.errors import DataError

DATA = batches(2)


def same(state, other):
    return are_equal(state, other)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A state after one step, that and the step after it, and the folder it was written to."""
    mesh, state, shardings = new_state((1, 4, 1, 1), Noisy)
    step = jit_train_step(make_train_step(loss), mesh, shardings)
    state, _ = step(state, put(mesh, DATA[0]))
    folder = tmp_path_factory.mktemp("checkpoint") / "state"
    files = write_state(folder, state)
    kept = place(state, shardings)
    after, _ = step(state, put(mesh, DATA[1]))
    return mesh, step, kept, after, folder, files


def test_a_state_comes_back_bit_by_bit_and_goes_on_the_same(written):
    mesh, step, kept, after, folder, _ = written
    _, other, _ = new_state((1, 4, 1, 1), Noisy, seed=7)
    read = read_state(folder, other)
    assert not same(other, kept)
    assert same(read, kept)
    assert [leaf.sharding for leaf in jax.tree.leaves(read)] == [leaf.sharding for leaf in jax.tree.leaves(kept)]
    again, _ = step(read, put(mesh, DATA[1]))
    assert same(again, after)
    assert step.compilations.count == 1


@pytest.mark.parametrize("dims", [(1, 2, 1, 1), (2, 2, 2, 1)])
def test_a_state_comes_back_on_fewer_and_more_devices(written, dims):
    _, _, kept, after, folder, _ = written
    mesh, other, shardings = new_state(dims, Noisy, seed=7)
    read = read_state(folder, like_of(jax.eval_shape(lambda: other), shardings))
    assert same(read, kept)
    assert jax.tree.leaves(jax.tree.map(lambda leaf, where: leaf.sharding == where, read, shardings)).count(False) == 0
    again, _ = jit_train_step(make_train_step(loss), mesh, shardings)(read, put(mesh, DATA[1]))
    assert_close(again.params, after.params, atol=1e-4)


def test_the_files_are_named_and_do_not_know_where_they_are(written, tmp_path):
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
    assert same(read_state(moved / "state", kept), kept)


def test_a_snapshot_outlives_the_state_and_can_be_written_by_another_thread(tmp_path):
    mesh, state, shardings = new_state((1, 4, 1, 1))
    before = snapshot(state)
    copy = {name: np.array(array) for name, array in before.arrays.items()}
    step = jit_train_step(make_train_step(loss), mesh, shardings)
    writing = threading.Thread(target=write_state, args=(tmp_path / "state", before))
    new, _ = step(state, put(mesh, DATA[0]))
    writing.start()
    new, _ = step(new, put(mesh, DATA[1]))
    writing.join()
    assert are_equal(before.arrays, copy)
    read = read_state(tmp_path / "state", new)
    assert are_equal(snapshot(read).arrays, copy)
    assert int(read.step) == 0


def test_narrow_numbers_and_other_keys_come_back_exactly(tmp_path):
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


def test_weights_alone_start_another_run(written):
    *_, kept, _, folder, _ = written
    _, other, _ = new_state((1, 2, 1, 1), Noisy, tx=optax.sgd(0.1), seed=7)
    assert are_equal(read_params(folder, other.params), kept.params)


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
def test_what_does_not_fit_is_named(written, how, message):
    *_, kept, _, folder, _ = written
    with pytest.raises(DataError, match=message):
        read_state(folder, changed(kept, how))


def test_another_optimizer_or_model_does_not_fit(written):
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
