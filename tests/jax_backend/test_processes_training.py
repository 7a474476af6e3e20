"""Multi-process JAX runs match a single process, share checkpoints, and stop together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
from process_runs import exit_codes, start

from trainformer.backends.jax.clusters import distributed_options
from trainformer.backends.jax.processes import process_group_on, process_shard
from trainformer.backends.jax.sharding import make_mesh
from trainformer.core.errors import BadArgument
from trainformer.data.sharding import WHOLE
from trainformer.models.jax import load_model
from trainformer.models.jax.huggingface import flat_params

TEXTS = {"trainer": "tokens", "rows": 32, "num_train_epochs": 3, "scheduler": "constant"}


def run(folder, processes, kind="plain", codes=0, **options):
    """Run to the end. Returns the results of each process."""
    folder.mkdir(exist_ok=True)
    assert exit_codes(start(folder, processes, kind, **options), folder) == [codes] * processes
    found = sorted(folder.glob(f"result-{kind}.*.npz"))
    return [dict(np.load(path)) for path in found]


def assert_same(ours, theirs):
    """Sums in another order differ in the last digit, which Adam amplifies where gradients are tiny."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        tolerance = 1e-6 if name in ("losses", "eval_loss") else 2e-5
        np.testing.assert_allclose(value, theirs[name], atol=tolerance, rtol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def single_process(tmp_path_factory):
    """The results of one process on all devices."""
    (found,) = run(tmp_path_factory.mktemp("one"), 1, **TEXTS)
    return found


# -- collectives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [None, "slurm", pytest.param("ompi", marks=pytest.mark.slow)])
def test_collectives_of_the_process_group(tmp_path, launcher):
    assert exit_codes(start(tmp_path, 2, "exchange", launcher), tmp_path) == [0, 0]
    results = [json.loads((tmp_path / f"results.{rank}.json").read_text()) for rank in range(2)]
    failures, rows = [one.pop("failure") for one in results], [one.pop("rows") for one in results]
    assert results[0] == results[1]
    assert results[0]["gather"] == [{"rank": 0}, {"rank": 1}]
    assert results[0]["long"] == ["", "1" * 3000]
    assert results[0]["broadcast"] == "of 0"
    assert results[0]["parts"] == [10]
    assert results[0]["total"] == [2.0, 1.0]
    assert results[0]["any"] == [False, True, True]
    assert results[0]["requests"] == [False, False, True, False, False, True]  # one step later, whichever process asked
    assert failures[0].startswith("ZeroDivisionError")
    assert failures[1].startswith("TrainformerError: Rank 0 failed")
    assert "ZeroDivisionError" in failures[1]
    assert rows == [[0, 2], [1, 2]]


def test_a_single_process_unless_the_environment_describes_several():
    mesh = make_mesh((1, -1, 1, 1))
    assert process_group_on(mesh).is_single_process
    assert process_shard(mesh) == WHOLE
    assert distributed_options({}) is distributed_options({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert distributed_options({"OMPI_COMM_WORLD_SIZE": "2"}) == {}
    assert distributed_options({"JAX_COORDINATOR_ADDRESS": "host:1"}) == {}  # jax detects the rest on known clusters
    with pytest.raises(BadArgument, match="JAX_PROCESS_ID to be an integer, received 'one'"):
        distributed_options({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_PROCESS_ID": "one"})


TASK = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_NODEID": "1"}
STEP = {**TASK, "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_GPUS_ON_NODE": "8"}
RANKS = {"SIZE": "4", "RANK": "2", "LOCAL_SIZE": "1", "LOCAL_RANK": "0"}
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in RANKS.items()}
COORDINATOR = {"JAX_COORDINATOR_ADDRESS": "host:1"}


def own(count):
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        # One process, though a cluster is around it.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),  # in sbatch
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}, None),  # perhaps of a sweep
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
        ({"MEGASCALE_NUM_SLICES": "1"}, None),
        # Several, and the share of each of the GPUs of its machine.
        ({**STEP, **own(8)}, {"num_processes": 4, "process_id": 3, "local_device_ids": [4, 5, 6, 7]}),
        ({**STEP, **own(4)}, {"num_processes": 4, "process_id": 3, "local_device_ids": [0, 1, 2, 3]}),  # bound to it
        ({**STEP, **own(1)}, {"num_processes": 4, "process_id": 3, "local_device_ids": [0]}),
        (
            {**STEP, **own(8), "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
            {"num_processes": 4, "process_id": 3, "local_device_ids": [0, 1, 2, 3, 4, 5, 6, 7]},
        ),
        ({**STEP, **own(8), "JAX_LOCAL_DEVICE_IDS": "0"}, {"num_processes": 4, "process_id": 3}),
        ({**MPI, **own(2)}, {"num_processes": 4, "process_id": 2, "local_device_ids": [0, 1]}),
        ({"TPU_PROCESS_ADDRESSES": "a:8471,b:8471", "TPU_WORKER_ID": "1"}, {}),
        ({"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}, {}),
        # A coordinator of the user's, with what the launcher says.
        (
            {**COORDINATOR, "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"},
            {"num_processes": 2, "process_id": 1, "cluster_detection_method": "deactivate"},
        ),
        ({**COORDINATOR, **MPI, **own(2)}, {"num_processes": 4, "process_id": 2, "local_device_ids": [0, 1]}),
    ],
)
def test_several_processes_are_assumed_where_a_launcher_has_started_them(environment, options):
    assert distributed_options(environment) == options


@pytest.mark.slow
def test_a_launcher_that_jax_cannot_connect_is_explained(tmp_path):
    assert exit_codes(start(tmp_path, 2, "exchange", "ompi5"), tmp_path) == [1, 1]
    assert "Set JAX_COORDINATOR_ADDRESS=first-host:port" in (tmp_path / "output-1.txt").read_text()


# -- same results ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_match_a_single_process(tmp_path, single_process):
    first, second = run(tmp_path / "two", 2, "pretrained", **TEXTS)
    assert first["sharded"] > 0  # weights sharded over the processes
    assert first["step"] == 12
    assert first["samples"] == 96
    assert first["tokens"] == 96 * 8
    assert_same(first, single_process)
    assert_same(first, second)
    for path, leaf in flat_params(load_model(tmp_path / "two" / "saved")).items():
        np.testing.assert_array_equal(np.asarray(leaf), first[path])


@pytest.mark.slow
def test_a_padded_last_batch_has_the_same_weight(tmp_path):
    options = {"rows": 61, "gradient_accumulation_steps": 2, "trainer": "rows"}
    (one,), (first, second) = run(tmp_path / "one", 1, **options), run(tmp_path / "two", 2, **options)
    assert first["samples"] == 2 * 61
    assert_same(first, one)
    assert_same(first, second)


@pytest.mark.slow
def test_uneven_rows_are_an_error_in_all_processes(tmp_path):
    run(tmp_path, 2, codes=1, rows=61)
    for number in range(2):
        assert "Use a batch size that is a multiple of 4" in (tmp_path / f"output-{number}.txt").read_text()


# -- checkpoints, signals --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes(tmp_path, single_process):
    run(tmp_path, 2, "first", **TEXTS, max_steps=5)
    run(tmp_path, 1, "second", **TEXTS, max_steps=9)
    first, second = run(tmp_path, 2, "third", **TEXTS)
    assert len(first["losses"]) == 12  # resumed, not restarted
    assert_same(first, single_process)
    assert_same(second, single_process)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_saves(tmp_path, single_process):
    started = start(tmp_path, 2, waits=0.3, log="console", save_strategy="no", **TEXTS)
    deadline = time.monotonic() + 200
    while not (tmp_path / "at-step-3.1").exists():
        assert time.monotonic() < deadline
        assert all(process.is_alive() for process in started)
        time.sleep(0.02)
    os.kill(started[1].pid, signal.SIGTERM)
    assert exit_codes(started, tmp_path) == [143, 143]
    (kept,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert 3 <= json.loads((kept / "manifest.json").read_text())["step"] < 12
    assert "training TokenTrainer" in (tmp_path / "output-0.txt").read_text()
    assert "TokenTrainer" not in (tmp_path / "output-1.txt").read_text()  # only process 0 prints
    first, second = run(tmp_path, 2, save_strategy="no", save_async=True, **TEXTS)
    assert_same(first, single_process)
    assert_same(second, single_process)


@pytest.mark.slow
def test_asynchronous_saves_do_not_hold_up_the_loop(tmp_path, single_process):
    """The write of step 4 ends after step 6 has been trained, and is a checkpoint that others resume from."""
    options = {**TEXTS, "save_async": True, "save_steps": 4}
    first, second = run(tmp_path, 2, **options, held=(4, 6), max_steps=7)
    assert (tmp_path / "held-4").exists()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert kept == ["step_00000004", "step_00000007"]
    assert_same(first, second)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / kept[1])
    resumed, _ = run(tmp_path, 2, "resumed", **options, max_steps=7)
    for name, value in first.items():  # bitwise: what was written is the state of step 4, though training went on
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    whole, _ = run(tmp_path, 2, "whole", **options)
    assert_same(whole, single_process)


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_it(tmp_path):
    options = {**TEXTS, "save_async": True, "save_steps": 2}
    wanted, _ = run(tmp_path / "whole", 2, **options, max_steps=6)
    folder = tmp_path / "killed"
    folder.mkdir()
    started = start(folder, 2, **options, held=(4, 100))  # never, as the run has 12 steps
    deadline = time.monotonic() + 200
    while not all((folder / f"at-step-5.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        assert all(process.is_alive() for process in started)
        time.sleep(0.02)
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
    assert exit_codes(started, folder) == [-signal.SIGKILL] * 2
    checkpoints = folder / "run" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_00000002"]
    assert list(checkpoints.glob(".writing-step_00000004-*"))
    found, _ = run(folder, 2, **options, max_steps=6)
    for name, value in wanted.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
