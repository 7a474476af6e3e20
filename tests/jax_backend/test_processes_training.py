"""Several processes on JAX train the numbers of one, hand checkpoints to each other, and end together."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest
from process_runs import ends_of, start

from trainformer.backends.jax.mesh import make_mesh
from trainformer.backends.jax.processes import launched, peers_on, rows_of_process
from trainformer.core.errors import BadArgument
from trainformer.data.sharding import WHOLE

TEXTS = {"trainer": "tokens", "rows": 32, "num_train_epochs": 3, "scheduler": "constant"}


def run(folder, processes, kind="plain", codes=0, **options):
    """Run to the end; what each process wrote."""
    folder.mkdir(exist_ok=True)
    assert ends_of(start(folder, processes, kind, **options), folder) == [codes] * processes
    found = sorted(folder.glob(f"result-{kind}.*.npz"))
    return [dict(np.load(path)) for path in found]


def assert_same(ours, theirs):
    """Sums in another order differ in the last digit, which Adam makes more of where gradients are next to nothing."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        tolerance = 1e-6 if name in ("losses", "eval_loss") else 2e-5
        np.testing.assert_allclose(value, theirs[name], atol=tolerance, rtol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def texts_of_one(tmp_path_factory):
    """What one process on all devices makes of the texts."""
    (found,) = run(tmp_path_factory.mktemp("one"), 1, **TEXTS)
    return found


# -- telling each other ----------------------------------------------------------------------------------------


def test_what_processes_tell_each_other(tmp_path):
    assert ends_of(start(tmp_path, 2, "exchange"), tmp_path) == [0, 0]
    told = [json.loads((tmp_path / f"told.{rank}.json").read_text()) for rank in range(2)]
    failures, rows = [one.pop("failure") for one in told], [one.pop("rows") for one in told]
    assert told[0] == told[1]
    assert told[0]["gather"] == [{"rank": 0}, {"rank": 1}]
    assert told[0]["long"] == ["", "1" * 3000]
    assert told[0]["broadcast"] == "of 0"
    assert told[0]["parts"] == [10]
    assert told[0]["total"] == [2.0, 1.0]
    assert told[0]["any"] == [False, True, True]
    assert told[0]["asking"] == [False, False, True, False, False, True]  # one step later, whoever asked
    assert failures[0].startswith("ZeroDivisionError")
    assert failures[1].startswith("TrainformerError: Rank 0 failed")
    assert "ZeroDivisionError" in failures[1]
    assert rows == [[0, 2], [1, 2]]


def test_alone_unless_the_environment_says_otherwise():
    mesh = make_mesh((1, -1, 1, 1))
    assert peers_on(mesh).is_single_process
    assert rows_of_process(mesh) == WHOLE
    assert launched({}) is launched({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert launched({"OMPI_COMM_WORLD_SIZE": "2"}) == {}
    assert launched({"JAX_COORDINATOR_ADDRESS": "host:1"}) == {}  # a cluster that jax knows says the rest
    with pytest.raises(BadArgument, match="JAX_PROCESS_ID to be a whole number, received 'one'"):
        launched({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_PROCESS_ID": "one"})


# -- the same numbers ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_the_numbers_of_one(tmp_path, texts_of_one):
    first, second = run(tmp_path / "two", 2, "pretrained", **TEXTS)
    assert first["divided"] > 0  # weights that no process holds as a whole
    assert first["step"] == 12
    assert first["samples"] == 96
    assert first["tokens"] == 96 * 8
    assert_same(first, texts_of_one)
    assert_same(first, second)
    from trainformer.backends.jax.state import flat, joined, take_apart
    from trainformer.models.jax import load_model

    saved = take_apart(load_model(tmp_path / "two" / "saved"))[1]
    for path, leaf in flat(saved):
        np.testing.assert_array_equal(np.asarray(leaf), first[joined(path)])


@pytest.mark.slow
def test_a_last_batch_that_is_filled_up_counts_alike(tmp_path):
    options = {"rows": 61, "gradient_accumulation_steps": 2, "trainer": "rows"}
    (one,), (first, second) = run(tmp_path / "one", 1, **options), run(tmp_path / "two", 2, **options)
    assert first["samples"] == 2 * 61
    assert_same(first, one)
    assert_same(first, second)


@pytest.mark.slow
def test_rows_that_cannot_be_shared_are_an_error_in_all_processes(tmp_path):
    run(tmp_path, 2, codes=1, rows=61)
    for number in range(2):
        assert "Use a batch size that is a multiple of 4" in (tmp_path / f"said-{number}.txt").read_text()


# -- checkpoints, signals --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path, texts_of_one):
    run(tmp_path, 2, "begun", **TEXTS, max_steps=5)
    run(tmp_path, 1, "going", **TEXTS, max_steps=9)
    first, second = run(tmp_path, 2, "ended", **TEXTS)
    assert len(first["losses"]) == 12  # resumed, not begun anew
    assert_same(first, texts_of_one)
    assert_same(second, texts_of_one)


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_with_everything_saved(tmp_path, texts_of_one):
    started = start(tmp_path, 2, waits=0.3, log="console", save_strategy="no", **TEXTS)
    deadline = time.monotonic() + 200
    while not (tmp_path / "at-step-3.1").exists():
        assert time.monotonic() < deadline
        assert all(process.is_alive() for process in started)
        time.sleep(0.02)
    os.kill(started[1].pid, signal.SIGTERM)
    assert ends_of(started, tmp_path) == [143, 143]
    (kept,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert 3 <= json.loads((kept / "manifest.json").read_text())["step"] < 12
    assert "training TokenTrainer" in (tmp_path / "said-0.txt").read_text()
    assert "TokenTrainer" not in (tmp_path / "said-1.txt").read_text()  # one process speaks for all
    first, second = run(tmp_path, 2, save_strategy="no", save_async=True, **TEXTS)
    assert_same(first, texts_of_one)
    assert_same(second, texts_of_one)
