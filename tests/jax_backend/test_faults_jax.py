"""JAX runs that are killed, stopped or moved to other devices resume exactly."""

from __future__ import annotations

import json
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
sys.path.insert(0, str(Path(__file__).parents[1] / "live"))

import jax_victim
from controlled import Gate, asked, wait_at
from harness import (
    check_epochs,
    complete,
    finish,
    kill_at_event,
    kill_in_save,
    launch,
    output,
    phase_of_kill,
    records,
)
from jax_victim import STEPS_PER_EPOCH, JaxCase

from forking import SERVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


_REFERENCES = {}


@pytest.fixture
def reference(tmp_path_factory):
    """The folder of an uninterrupted run of a case."""

    def run(case):
        if case not in _REFERENCES:
            _REFERENCES[case] = complete(case, tmp_path_factory.mktemp("reference"))
        return _REFERENCES[case]

    return run


def killed_after(step, case, folder):
    case = replace(case, signals=((step, signal.SIGKILL),))
    assert finish(launch(case, folder), folder) == -signal.SIGKILL, output(folder)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, reference, save_async):
    """Killed inside a save, at a file operation and after a step, each chosen at random."""
    case, rng = JaxCase(save_async=save_async), random.Random(f"kill {save_async}")
    uninterrupted, phases = reference(case), []
    operations = json.loads((uninterrupted / "end.json").read_text())["operations"]
    assert kill_in_save(case, tmp_path, rng.randint(1, 2), rng.randint(1, 4), rng.uniform(0, 0.1)), output(tmp_path)
    phases.append(phase_of_kill(tmp_path)[0])
    assert kill_at_event(case, tmp_path, rng.randint(operations // 8, operations // 3)), output(tmp_path)
    phases.append(phase_of_kill(tmp_path)[0])
    killed_after(rng.randint(2 * STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH - 1), case, tmp_path)
    phases.append(phase_of_kill(tmp_path)[0])
    complete(case, tmp_path)
    assert case.differences(uninterrupted, tmp_path) == []
    assert phases[0] == "save"


@pytest.mark.parametrize("data", ["generator", "grain", "huggingface"])
def test_a_killed_run_on_a_stream_resumes_at_its_position(tmp_path, reference, data):
    case, rng = JaxCase(data=data, epochs=2), random.Random(data)
    killed_after(rng.randint(5, 8), case, tmp_path)
    killed_after(rng.randint(STEPS_PER_EPOCH + 4, 2 * STEPS_PER_EPOCH - 1), case, tmp_path)
    complete(case, tmp_path)
    assert case.differences(reference(case), tmp_path) == []
    assert "resuming from run/checkpoints/step_0000001" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.parametrize("devices", [2, 8])
def test_a_run_resumes_on_other_devices(tmp_path, reference, devices):
    case = JaxCase(devices=4, dropout=0.0, epochs=2)
    killed_after(9, case, tmp_path)
    complete(replace(case, devices=devices), tmp_path)
    assert check_epochs(tmp_path) == []
    wanted, found = records(reference(case)), records(tmp_path)
    assert [sorted(record) for record in found] == [sorted(record) for record in wanted]
    for name in ("train/loss", "val/loss"):
        ours, theirs = ([r[name] for r in of if name in r] for of in (found, wanted))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    log = (tmp_path / "run/log.txt").read_text()
    assert "4 x cpu" in log
    assert f"{devices} x cpu" in log


def test_sigterm_saves_and_exits_with_143(tmp_path, reference):
    case = JaxCase()
    stopped = replace(case, signals=((7, signal.SIGTERM), (STEPS_PER_EPOCH, signal.SIGINT)))
    assert finish(launch(stopped, tmp_path), tmp_path) == 143, output(tmp_path)
    assert (tmp_path / "run/checkpoints/step_00000007/manifest.json").exists()
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "interrupted"
    assert finish(launch(stopped, tmp_path), tmp_path) == 130, output(tmp_path)
    complete(case, tmp_path)
    assert case.differences(reference(case), tmp_path, retention=False) == []


def test_a_running_job_obeys_ctl(tmp_path):
    """`trainformer ctl` from another process: status, save, stop."""
    case, gate = JaxCase(save_steps=100), Gate({5: 1, 6: 1})
    process = SERVER.Process(target=jax_victim.start, args=(case, str(tmp_path), gate))
    process.start()
    wait_at(process, tmp_path, 5)
    assert asked(tmp_path, "status", "run")["step"] == 5
    asked(tmp_path, "save", "run")
    wait_at(process, tmp_path, 6)
    assert (tmp_path / "run/checkpoints/step_00000005/manifest.json").exists()
    asked(tmp_path, "stop", "run")
    assert finish(process, tmp_path) == 0, output(tmp_path)
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "stopped"
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_00000006"
