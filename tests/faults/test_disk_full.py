"""A full disk: training continues, older checkpoints stay, three failed saves in a row end the run with an error."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from harness import complete, differences, final_state, finish, launch, output
from victim import Case

from trainformer.checkpointing import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = {"synchronous": Case(save_best=0), "asynchronous": Case(save_best=0, save_async=True)}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """An uninterrupted run of every case."""
    return {name: complete(case, tmp_path_factory.mktemp("reference")) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("failing", [(2,), (1, 2, 4, 5)])
def test_training_continues_after_a_failed_save(tmp_path, references, name, failing):
    complete(replace(CASES[name], failing_saves=failing), tmp_path)
    assert differences(references[name], tmp_path) == []
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("could not be written") == len(failing)
    assert "No space left on device" in log


@pytest.mark.parametrize("name", CASES)
def test_three_failures_in_a_row_end_the_run(tmp_path, references, name):
    case = CASES[name]
    code = finish(launch(replace(case, failing_saves=(3, 4, 5)), tmp_path), tmp_path)
    assert code == 1
    assert "SaveFailed" in output(tmp_path)
    assert "3 saves in a row failed" in output(tmp_path)
    store = CheckpointStore(tmp_path / "run/checkpoints")
    assert store.newest().step == 8
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "failed"
    complete(case, tmp_path)
    assert differences(references[name], tmp_path) == []


def test_a_failed_save_does_not_affect_the_next(tmp_path, references):
    """An asynchronous save fails only when the next one, the last of the run, is due."""
    complete(replace(CASES["asynchronous"], failing_saves=(8,), fail_in_step=36), tmp_path)
    assert (tmp_path / "run/log.txt").read_text().count("could not be written") == 1
    assert final_state(tmp_path)["run"]["run.json"]["step"] == 36
    assert differences(references["asynchronous"], tmp_path, retention=False) == []


@pytest.mark.parametrize("name", CASES)
def test_a_failing_last_save_is_not_success(tmp_path, references, name):
    """A run must not claim to have finished if its result was not saved."""
    case = CASES[name]
    code = finish(launch(replace(case, failing_saves=(9, 10)), tmp_path), tmp_path)
    assert "could not be written" in (tmp_path / "run/log.txt").read_text()
    status = json.loads((tmp_path / "run/status.json").read_text())["status"]
    assert (code, status) == (1, "failed")
    complete(case, tmp_path)
    assert differences(references[name], tmp_path) == []


# -- a really full disk --------------------------------------------------------------------------------------


class SmallDisk:
    """An in-memory file system that can be resized."""

    def __init__(self, path):
        self.path = path
        path.mkdir()

    def mount(self, size, remount=False):
        options = f"{'remount,' if remount else ''}size={size}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def unmount(self):
        subprocess.run(["umount", str(self.path)], capture_output=True, check=True)


@pytest.fixture
def disk(tmp_path):
    """A disk with space for about three checkpoints."""
    small = SmallDisk(tmp_path / "disk")
    if not sys.platform.startswith("linux") or not small.mount("250k"):
        pytest.skip("needs the permission to mount a file system")
    yield small
    small.unmount()


@pytest.mark.parametrize("name", CASES)
def test_a_really_full_disk(tmp_path, references, name, disk):
    """Every library raises a different error for a full disk; all of them must be handled."""
    case = replace(CASES[name], save_dir=str(disk.path / "checkpoints"))
    code = finish(launch(case, tmp_path), tmp_path)
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("could not be written") == 3, output(tmp_path)
    assert "SaveFailed" in output(tmp_path)
    assert code == 1
    store = CheckpointStore(disk.path / "checkpoints")
    kept = store.checkpoints()
    assert kept
    for checkpoint in kept:
        checkpoint.verify()
    assert not list(store.root.glob(".writing-*")), "a partial checkpoint fills the disk"

    assert disk.mount("20m", remount=True)
    complete(case, tmp_path)
    newest = store.newest()
    assert newest.step == 36
    newest.verify()
