"""Signals: the run saves at the next step boundary, leaves with 128 + signal, and goes on later as if never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import victim
from harness import complete, differences, finish, launch, output, run_folder, trained_on, wait_for
from victim import STEPS_PER_EPOCH, Case

from trainformer.checkpointing import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CASES = {
    "plain": Case(),
    "asynchronous, with workers": Case(save_async=True, workers=2),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Every case, left in peace."""
    return {name: complete(case, tmp_path_factory.mktemp("reference")) for name, case in CASES.items()}


def newest(folder):
    return CheckpointStore(run_folder(folder) / "checkpoints").newest()


def steps_done(folder):
    return len((folder / "samples.jsonl").read_text().splitlines()) if (folder / "samples.jsonl").exists() else 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_save_leave_and_go_on(tmp_path, references, name, number):
    """After the first step, a saved one, one in between, a logged one, the last of an epoch and of the run."""
    case = CASES[name]
    steps = 1, 4, 5, 6, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1, 4 * STEPS_PER_EPOCH
    case = replace(case, signals=tuple((step, number) for step in steps))
    for step in steps:
        assert finish(launch(case, tmp_path), tmp_path) == 128 + number, output(tmp_path)
        assert newest(tmp_path).step == step
        assert json.loads((tmp_path / "end.json").read_text())["handlers_restored"]
        expected = "interrupted" if step < steps[-1] else None
        status = json.loads((tmp_path / "run" / "status.json").read_text())["status"]
        assert expected in (status, None)
    complete(case, tmp_path)
    assert differences(references[name], tmp_path, retention=False) == []


def test_a_real_command_from_outside(tmp_path, references):
    """No fork, no help from inside: `python victim.py`, SIGTERM, exit code 143."""
    command = [sys.executable, victim.__file__, json.dumps({"pause": 0.005})]
    helpers = str(Path(victim.__file__).parents[1])  # pytest put it on our path; the command has its own
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": helpers}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    wait_for(lambda: steps_done(tmp_path) >= 6, seconds=120)
    process.terminate()
    assert process.wait(60) == 143
    assert newest(tmp_path).step == max(trained_on(tmp_path))
    complete(Case(), tmp_path)
    assert differences(references["plain"], tmp_path, retention=False) == []


def test_ctrl_c_reaches_the_workers_too(tmp_path, references):
    """A terminal sends SIGINT to the whole process group; the workers must live on until the run has saved."""
    case = replace(CASES["asynchronous, with workers"], pause=0.01)
    process = launch(case, tmp_path)
    assert wait_for(lambda: steps_done(tmp_path) >= 6, process)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process, tmp_path) == 130, output(tmp_path)
    complete(case, tmp_path)
    assert differences(references["asynchronous, with workers"], tmp_path, retention=False) == []


def test_a_second_sigint_stops_at_once(tmp_path, references):
    process = launch(Case(pause=3.0), tmp_path)  # a step takes nine seconds
    assert wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    assert process.is_alive()
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, tmp_path) != 0
    assert time.monotonic() - began < 2.5
    assert "KeyboardInterrupt" in output(tmp_path)
    assert json.loads((tmp_path / "end.json").read_text())["handlers_restored"]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "interrupted"
    complete(Case(), tmp_path)
    assert differences(references["plain"], tmp_path, retention=False) == []


@pytest.mark.parametrize("name", CASES)
def test_sigusr1_saves_and_goes_on(tmp_path, references, name):
    case = replace(CASES[name], signals=((5, signal.SIGUSR1), (STEPS_PER_EPOCH, signal.SIGUSR1)))
    complete(case, tmp_path)
    said = Path(tmp_path / "run" / "log.txt").read_text()
    assert "step_00000005" in said
    assert f"step_{STEPS_PER_EPOCH:08d}" in said
    assert json.loads((tmp_path / "end.json").read_text())["handlers_restored"]
    assert differences(references[name], tmp_path, retention=False) == []
