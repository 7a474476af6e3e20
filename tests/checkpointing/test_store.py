"""The store: a checkpoint appears whole or not at all, damage is seen and named, and retention keeps what it must."""

import hashlib
import json
import logging
import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainformer.checkpoint import inspect, verify
from trainformer.checkpointing import (
    Checkpoint,
    CheckpointStore,
    InvalidCheckpoint,
    Manifest,
    Retention,
    SharingPattern,
    StateComponent,
    protect,
)
from trainformer.checkpointing.checkpointer import BackgroundWriter


def fill(content=b"weights"):
    def write(folder):
        (folder / "model.bin").write_bytes(content)
        (folder / "run.json").write_text(json.dumps({"x": 1}))
        return {"model": ["model.bin"], "run": ["run.json"]}

    return write


def save(store, step, metrics=None, content=b"weights"):
    return store.write(Manifest(step=step, components={}, metrics=metrics or {}), fill(content))


def steps(store):
    return [c.step for c in store.checkpoints()]


def test_what_is_written_is_listed_and_verified(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    for step in (30, 5, 200_000_000):
        save(store, step, {"val/loss": 0.5})
    assert steps(store) == [5, 30, 200_000_000]
    newest = store.newest()
    assert newest.step == 200_000_000
    assert newest.manifest.metrics == {"val/loss": 0.5}
    assert [f.name for f in newest.manifest.components["model"]] == ["model.bin"]
    assert (tmp_path / "c" / "latest").read_text() == "step_200000000"
    assert not [p for p in (tmp_path / "c").iterdir() if p.name.startswith(".")]


def test_a_failing_write_leaves_nothing_behind(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def full(folder):
        (folder / "model.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.write(Manifest(step=2, components={}), full)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 7, content=b"old")
    save(store, 7, content=b"new")
    assert steps(store) == [7]
    assert (store.newest().path / "model.bin").read_bytes() == b"new"


def test_checkpoints_can_have_the_names_of_huggingface(tmp_path):
    """The step without zeros, in the order of numbers and not of letters; read by whoever knows the other names."""
    store = CheckpointStore(tmp_path, "checkpoint-{}")
    for step in (900, 1000, 30):
        save(store, step)
    assert store.path_of(900) == tmp_path / "checkpoint-900"
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1000",
        "checkpoint-30",
        "checkpoint-900",
    ]
    assert steps(CheckpointStore(tmp_path)) == [30, 900, 1000]
    (tmp_path / ".writing-checkpoint-5-999999999").mkdir()
    (tmp_path / ".replaced-checkpoint-7-999999999").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    store.clean()
    assert not list(tmp_path.glob(".writing*"))
    assert (tmp_path / "checkpoint-7").is_dir()
    assert (tmp_path / "checkpoint-x").is_dir()
    store.set_aside(after=900)
    assert (tmp_path / "abandoned-1" / "checkpoint-1000").is_dir()


def damage(path, kind):
    if kind == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    else:
        path.unlink()


@pytest.mark.parametrize("kind", ["truncate", "flip", "delete"])
@pytest.mark.parametrize("name", ["model.bin", "run.json", "manifest.json"])
def test_any_damage_is_seen_named_and_passed_over(tmp_path, kind, name, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2).path / name
    damage(path, kind)
    assert store.newest().step == 1
    assert name in caplog.text
    assert "step_00000002" in caplog.text


def test_every_byte_of_a_manifest_counts(tmp_path):
    checkpoint = save(CheckpointStore(tmp_path), 1)
    path = checkpoint.path / "manifest.json"
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 0x04
        path.write_bytes(bytes(bad))
        if bytes(bad).split() == good.split():
            continue  # white space
        with pytest.raises(InvalidCheckpoint):
            Manifest.read(checkpoint.path)
    path.write_bytes(good)
    assert Manifest.read(checkpoint.path) == checkpoint.manifest


def test_a_manifest_of_a_newer_format_says_so(tmp_path):
    checkpoint = save(CheckpointStore(tmp_path), 1)
    newer = Manifest(**{**vars(checkpoint.manifest), "format": 99})
    (checkpoint.path / "manifest.json").write_bytes(newer.to_bytes())
    with pytest.raises(InvalidCheckpoint, match="newer trainformer"):
        Manifest.read(checkpoint.path)


def _write_slowly(root, step):
    def slow(folder):
        for i in range(50):
            (folder / f"{i}.bin").write_bytes(b"x" * 1000)
            time.sleep(0.01)
        return {"model": [f"{i}.bin" for i in range(50)]}

    CheckpointStore(Path(root)).write(Manifest(step=step, components={}), slow)


@pytest.mark.parametrize("delay", [0.05, 0.2, 0.35])
def test_a_writer_killed_in_the_middle_leaves_no_checkpoint(tmp_path, delay):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    process = multiprocessing.get_context("fork").Process(target=_write_slowly, args=(str(tmp_path), 2))
    process.start()
    while not list(tmp_path.glob(".writing-*/*.bin")):
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert steps(store) == [1]
    assert store.newest().step == 1
    assert list(tmp_path.glob(".writing-*"))
    store.clean()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_drafts_of_a_living_process_are_left_alone(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_write_slowly, args=(str(tmp_path), 2))
    process.start()
    while not list(tmp_path.glob(".writing-*/*.bin")):
        time.sleep(0.005)
    CheckpointStore(tmp_path).clean()
    process.join()
    assert process.exitcode == 0
    assert steps(CheckpointStore(tmp_path)) == [2]


def test_a_replacement_that_was_cut_short_is_undone(tmp_path):
    store = CheckpointStore(tmp_path)
    checkpoint = save(store, 3, content=b"old")
    checkpoint.path.rename(tmp_path / ".replaced-step_00000003-999999999")
    assert steps(store) == []
    store.clean()
    assert steps(store) == [3]


# -- retention ---------------------------------------------------------------------------------------------


def fake(step, value=None, folder=Path("/nowhere")):
    metrics = {} if value is None else {"val/loss": value}
    return Checkpoint(folder / f"step_{step:08d}", Manifest(step=step, components={}, metrics=metrics))


def kept(retention, checkpoints):
    to_delete = {c.step for c in retention.to_delete(checkpoints)}
    return [c.step for c in checkpoints if c.step not in to_delete]


def test_last_best_and_every():
    runs = [fake(10, 0.5), fake(20, 0.0), fake(30, 0.7), fake(40), fake(50, 0.2), fake(60, math.nan), fake(70, 0.9)]
    assert kept(Retention(last=1), runs) == [70]
    assert kept(Retention(last=3), runs) == [50, 60, 70]
    assert kept(Retention(last=1, best=2), runs) == [20, 50, 70]
    assert kept(Retention(last=1, best=2, mode="max"), runs) == [30, 70]
    assert kept(Retention(last=1, every=20), runs) == [20, 40, 60, 70]
    assert kept(Retention(last=0), runs) == [70]  # the newest is never deleted


def test_protected_ones_stay(tmp_path):
    store = CheckpointStore(tmp_path)
    first = save(store, 1)
    save(store, 2)
    protect(first)
    assert kept(Retention(last=1), store.checkpoints()) == [1, 2]
    protect(first, on=False)
    assert kept(Retention(last=1), store.checkpoints()) == [2]


values = st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), min_size=1, max_size=12)


@given(values, st.integers(0, 4), st.integers(0, 4), st.sampled_from(["min", "max"]))
def test_retention_keeps_the_newest_and_the_truly_best(scores, last, best, mode):
    runs = [fake(i, v) for i, v in enumerate(scores)]
    remaining = kept(Retention(last=last, best=best, mode=mode), runs)
    assert remaining[-1] == len(scores) - 1
    assert len(remaining) <= max(last, 1) + best
    finite = sorted(v for v in scores if v is not None and not math.isnan(v))
    top = finite[:best] if mode == "min" else finite[::-1][:best]
    assert Counter(top) <= Counter(scores[i] for i in remaining)


def test_worth_keeping_compares_with_the_worst_that_is_kept():
    retention = Retention(best=2)
    runs = [fake(1, 0.1), fake(2, 0.5), fake(3, 0.9)]
    assert retention.is_worth_keeping({"val/loss": 0.3}, runs)
    assert not retention.is_worth_keeping({"val/loss": 0.6}, runs)
    assert retention.is_worth_keeping({"val/loss": 0.6}, runs[:1])
    assert not retention.is_worth_keeping({"val/loss": math.nan}, [])
    assert not retention.is_worth_keeping({}, [])
    assert retention.is_worth_keeping({"val/loss": 0.0}, runs)


# -- the background writer ---------------------------------------------------------------------------------


def test_one_save_in_flight_and_errors_come_out():
    writer, order = BackgroundWriter(), []

    def job(name, fails=False):
        def run():
            time.sleep(0.05)
            order.append(name)
            if fails:
                raise OSError("disk full")

        return run

    writer.submit(job("a"))
    assert writer.is_busy
    writer.submit(job("b", fails=True))
    assert order == ["a"]
    with pytest.raises(OSError, match="disk full"):
        writer.submit(job("c"))
    writer.wait()
    assert order == ["a", "b"]
    assert not writer.is_busy


def test_file_names_by_sharing_pattern():
    def stem(pattern):
        return StateComponent("x", None, pattern, process_group_name="tp").stem(rank=3, group=1, node=2)

    assert [stem(p) for p in SharingPattern] == ["x", "x", "x.rank3", "x.tp1", "x.node2"]


def test_cleaning_an_empty_place_is_fine(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        CheckpointStore(tmp_path / "none").clean()
        assert CheckpointStore(tmp_path / "none").newest() is None
    assert caplog.text == ""


# -- forged manifests --------------------------------------------------------------------------------------


def forge(path, **changes):
    """Change a manifest, with the digest of its content; None removes a field."""
    content = json.loads((path / "manifest.json").read_bytes()) | changes
    content = {name: value for name, value in content.items() if value is not None and name != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**content, "sha256": digest}))


def record(**changes):
    return {"model": [{"name": "model.bin", "size": 7, "sha256": "0", **changes}]}


FORGERIES = {
    "no step": {"step": None},
    "a step that is no number": {"step": "4"},
    "a negative step": {"step": -1},
    "no components": {"components": None},
    "a list of components": {"components": []},
    "a file that is no record": {"components": {"model": ["model.bin"]}},
    "a file elsewhere": {"components": record(name="../../secret")},
    "a file at an absolute path": {"components": record(name="/etc/hostname")},
    "a name that no file can have": {"components": record(name="x" * 5000)},
    "a name with a NUL": {"components": record(name="a\0b")},
    "a component elsewhere": {"components": {"../..": []}},
    "a size that is no number": {"components": record(size=[])},
    "metrics that are no numbers": {"metrics": {"val/loss": "low"}},
    "metrics that are a text": {"metrics": "low"},
    "an endless time": {"time": float("inf")},
    "an unknown field": {"more": 1},
    "a format that is no number": {"format": {}},
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_skipped_and_named(tmp_path, caplog, forgery):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2).path
    forge(path, **FORGERIES[forgery])
    with caplog.at_level(logging.WARNING):
        assert store.newest().step == 1
        assert [c.step for c in store.checkpoints()] == [1]
        Retention(last=1, best=1).to_delete(store.checkpoints())
    assert caplog.text.count(f"{path}/manifest.json is not a manifest that trainformer wrote: ") == 3
    assert len(verify(tmp_path)) == 1
    with pytest.raises(InvalidCheckpoint, match="is not a manifest that trainformer wrote"):
        inspect(path)


def test_a_manifest_of_deep_json_is_skipped(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (save(store, 2).path / "manifest.json").write_text("[" * 100_000)
    assert store.newest().step == 1


def test_fields_with_defaults_may_be_missing(tmp_path):
    path = save(CheckpointStore(tmp_path), 2).path
    forge(path, epoch=None, metrics=None, time=None)
    assert Manifest.read(path).epoch == 0
