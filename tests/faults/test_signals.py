"""Signals: the run saves at the next step boundary, exits with 128 + signal, and later resumes exactly."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import victim
from harness import complete, differences, finish, launch, output, run_folder, trained_on, wait_for
from victim import STEPS_PER_EPOCH, Case

from trainformer.checkpointing import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = {
    "plain": Case(),
    "asynchronous, with workers": Case(save_async=True, workers=2),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """An uninterrupted run of every case."""
    return {name: complete(case, tmp_path_factory.mktemp("reference")) for name, case in CASES.items()}


def is_pending(process, number):
    """Whether a signal was sent to a process but not delivered yet; only Linux knows."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except FileNotFoundError:
        return False
    return any(line.startswith("ShdPnd") and int(line.split()[1], 16) >> (number - 1) & 1 for line in lines)


def newest(folder):
    return CheckpointStore(run_folder(folder) / "checkpoints").newest()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_save_exit_and_resume(tmp_path, references, name, number):
    """At the first step, at a save, in between, at a log point, and at the last step of an epoch and of the run."""
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


def test_a_real_command(tmp_path, references):
    """Not forked: `python victim.py`, SIGTERM in the middle of step 7, exit code 143."""
    command = [sys.executable, victim.__file__, json.dumps({"block_in_step": 7})]
    paths = [str(Path(victim.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    wait_for((tmp_path / "in_step").exists)
    process.terminate()
    (tmp_path / "release").touch()
    assert process.wait(300) == 143
    assert newest(tmp_path).step == max(trained_on(tmp_path))
    complete(Case(), tmp_path)
    assert differences(references["plain"], tmp_path, retention=False) == []


def test_ctrl_c_does_not_kill_the_workers(tmp_path, references):
    """A terminal sends SIGINT to the whole process group; the workers must survive until the run has saved."""
    case = CASES["asynchronous, with workers"]
    process = launch(replace(case, block_in_step=7), tmp_path)
    assert wait_for((tmp_path / "in_step").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "release").touch()
    assert finish(process, tmp_path) == 130, output(tmp_path)
    complete(case, tmp_path)
    assert differences(references["asynchronous, with workers"], tmp_path, retention=False) == []


def test_a_second_sigint_stops_at_once(tmp_path, references):
    """In the middle of a step that would never end: the first one only sets a flag, the second one interrupts."""
    process = launch(Case(block_in_step=2), tmp_path)
    assert wait_for((tmp_path / "in_step").exists, process)
    os.kill(process.pid, signal.SIGINT)
    # Pending signals of a kind are merged. So wait until this one is handled: delivered, then two ticks of the loop.
    assert wait_for(lambda: not is_pending(process.pid, signal.SIGINT), process)
    ticks = (tmp_path / "in_step").stat().st_size
    assert wait_for(lambda: (tmp_path / "in_step").stat().st_size >= ticks + 2, process)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, tmp_path) not in (0, 130)
    assert not (tmp_path / "release").exists()
    assert "KeyboardInterrupt" in output(tmp_path)
    assert json.loads((tmp_path / "end.json").read_text())["handlers_restored"]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "interrupted"
    complete(Case(), tmp_path)
    assert differences(references["plain"], tmp_path, retention=False) == []


@pytest.mark.parametrize("name", CASES)
def test_sigusr1_saves_and_continues(tmp_path, references, name):
    case = replace(CASES[name], signals=((5, signal.SIGUSR1), (STEPS_PER_EPOCH, signal.SIGUSR1)))
    complete(case, tmp_path)
    log = Path(tmp_path / "run" / "log.txt").read_text()
    assert "step_00000005" in log
    assert f"step_{STEPS_PER_EPOCH:08d}" in log
    assert json.loads((tmp_path / "end.json").read_text())["handlers_restored"]
    assert differences(references[name], tmp_path, retention=False) == []
