"""Trials in worker processes, and what happens when a worker or the sweep itself is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sweep_victims import QUIET, SCRIPT, accidents, trials_of, victim

from trainformer.core.errors import BadArgument
from trainformer.sweep import current_trial, grid, sweep, uniform
from trainformer.sweep.processes import make_slots
from trainformer.utils.processes import process_identity


def facts(results):
    return sorted((row["number"], *row["config"].values(), row["metric"], row["status"]) for row in results)


def start(**options):
    """Run the sweep `victim` in another process, in this folder."""
    Path("script.py").write_text(SCRIPT)
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": here}
    with Path("output.txt").open("ab") as output:
        words = [sys.executable, "script.py", json.dumps(options | QUIET)]
        return subprocess.Popen(words, env=environment, stdout=output, stderr=output)


def wait_for(condition, process=None, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, Path("output.txt").read_text()[-2000:]
        assert time.monotonic() < deadline, f"timed out; {Path('output.txt').read_text()[-2000:]}"
        time.sleep(0.02)


def begun(number, attempt=1):
    """The process id of a trial that has started, else 0."""
    path = Path(f"begun-{number}-{attempt}")
    return int(path.read_text() or 0) if path.exists() else 0


def test_sweep_survives_every_way_a_trial_can_end():
    results = accidents.run(method="grid", n_parallel=2, **QUIET)
    found = {row["config"]["x"]: row for row in results}
    assert [row["config"]["x"] for row in results[:4]] == [6, 5, 1, 0]
    assert {x: found[x]["attempt"] for x in found} == {0: 1, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
    assert "exit code 0 before the function returned" in found[2]["error"]
    assert found[3]["error"] == "KeyError: 'three'"
    assert found[4]["error"] == "SystemExit: four"
    assert trials_of("accidents")[0].intermediate == {1: -6.0}
    earlier = {trial.config["x"]: trial.earlier for trial in trials_of("accidents")}
    assert earlier[1] == ["its process was killed by SIGKILL"]
    assert "in accidents" in Path("sweeps/accidents/trials/0003/error.txt").read_text()
    assert Path("sweeps/accidents/trials/0006/output.txt").read_text() == "this is trial 6\n"

    attempts = [tuple(line.split()) for line in Path("attempts.txt").read_text().splitlines()]
    assert sorted((int(x), int(n)) for x, n, _, _ in attempts) == [
        (0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (5, 1), (6, 1),
    ]  # fmt: skip
    processes = [process for _, _, process, _ in attempts]
    assert str(os.getpid()) not in processes
    assert all(process_identity(int(process)) is None for process in processes)
    for x in ("3", "4"):  # the worker of a failed trial is not reused
        (place,) = [i for i, attempt in enumerate(attempts) if attempt[0] == x]
        assert processes[place] not in processes[place + 1 :]


def test_devices_and_cores_are_split_between_workers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)

    def devices(*arguments):
        return [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(*arguments)]

    assert devices(2, 0) == ["4,5", "6,7"]
    assert devices(3, 0) == ["4", "5", "6"]
    assert devices(6, 0) == ["4", "5", "6", "7", "4", "5"]
    assert devices(2, 1) == ["4", "5"]
    assert [slot["OMP_NUM_THREADS"] for slot in make_slots(3, 0)] == ["4"] * 3
    for wanted in (3, 0.5):
        with pytest.raises(BadArgument, match="There are 4 devices for 2 parallel trials"):
            make_slots(2, wanted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert make_slots(1, 0) == [{"OMP_NUM_THREADS": "2"}]


def test_trials_do_not_depend_on_the_number_of_processes():
    serial = victim.run(n_trials=6, name="serial", **QUIET)
    parallel = victim.run(n_trials=6, n_parallel=2, name="parallel", **QUIET)
    assert facts(parallel) == facts(serial)
    assert len({row["metric"] for row in serial}) == 6


def test_lambdas_and_closures_run_in_workers(capfd):
    offset = 5
    made = sweep(x=uniform(0, 1))(lambda x: x + offset)
    results = made.run(n_trials=1, isolate=True)
    assert results[0]["metric"] == results[0]["config"]["x"] + 5
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith("trial 0 completed: 5.")
    assert Path("sweeps/lambda/study.db").exists()


def test_unpicklable_functions_and_bad_reports_are_refused():
    lock = threading.Lock()
    with pytest.raises(BadArgument, match=r"cannot pickle.*in this process"):
        sweep(x=grid(1, 2))(lambda x: lock).run(method="grid", n_parallel=2, **QUIET)
    bad = sweep(x=grid(1))(lambda x: current_trial().report(x, -1))
    (row,) = bad.run(method="grid", name="bad", isolate=True, **QUIET)
    assert "at least 0, received -1" in row["error"]


def test_a_killed_sweep_resumes_with_the_same_trials():
    reference = victim.run(method="bayes", n_trials=13, name="reference", **QUIET)
    Path("hold-11").touch()
    process = start(method="bayes", n_trials=13)
    wait_for(lambda: begun(11, 1) == process.pid, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    Path("hold-11").unlink()
    results = victim.run(method="bayes", n_trials=13, **QUIET)
    assert facts(results) == facts(reference)
    assert {row["number"]: row["attempt"] for row in results if row["attempt"] > 1} == {11: 2}


@pytest.mark.slow
def test_workers_exit_with_the_sweep_and_do_not_rerun_the_script():
    reference = victim.run(n_trials=6, name="reference", **QUIET)
    for path in Path().glob("begun-*"):
        path.unlink()
    Path("hold-2").touch()
    Path("hold-3").touch()

    process = start(n_trials=6, n_parallel=2)
    wait_for(lambda: begun(2) and begun(3), process)
    workers = [begun(2), begun(3)]
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert [process_identity(worker) for worker in workers] == [None, None]
    assert sorted(path.name for path in Path().glob("sigterm-*")) == [
        "sigterm-2",
        "sigterm-3",
    ]  # a run would have saved
    statuses = [trial.status for trial in trials_of("victim")]
    assert statuses == ["completed"] * 2 + ["waiting"] * 2

    for number in (2, 3):
        Path(f"begun-{number}-1").unlink()
    process = start(n_trials=6, n_parallel=2)  # an interruption does not count as an attempt
    wait_for(lambda: begun(2) and begun(3), process)
    workers = [begun(2), begun(3)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(map(process_identity, workers)))  # the files hold-* would block them for longer
    assert Path("starts").read_text() == "xx"
    assert not Path("ended").exists()

    for number in (2, 3):
        Path(f"hold-{number}").unlink()
    results = victim.run(n_trials=6, **QUIET)
    assert facts(results) == facts(reference)
    assert {row["attempt"] for row in results} == {1}  # nor does the end of the sweep, which was not their fault


@pytest.mark.slow
def test_two_processes_share_a_storage():
    Path("hold-0").touch()
    process = start(n_trials=8, storage="shared/study.log", folder="theirs")
    wait_for(lambda: begun(0), process)
    ours = victim.run(n_trials=8, storage="shared/study.log", folder="ours", **QUIET)
    assert [row["number"] for row in ours if row["number"] == 0] == []  # the other process runs it
    assert len(ours) == 7
    Path("hold-0").unlink()
    assert process.wait(300) == 0
    everything = victim.run(n_trials=8, storage="shared/study.log", folder="ours", **QUIET)
    assert facts(everything) == facts(victim.run(n_trials=8, name="alone", **QUIET))
