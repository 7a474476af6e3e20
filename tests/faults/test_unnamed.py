"""Runs without a name: the same command resumes its unfinished run, and no other command does."""

import hashlib
import json
import os
import signal

import pytest
from harness import complete, differences, finish, kill_in_save, launch, output, wait_for
from victim import Case, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UNNAMED = Case(run_dir=None)
KILLED = Case(run_dir=None, signals=((14, signal.SIGKILL),))


def runs(folder):
    return sorted((folder / "runs").iterdir())


def status(run):
    return json.loads((run / "status.json").read_text())["status"]


def content(run):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}


def killed_run(folder):
    """A run that was killed in its second epoch."""
    assert finish(launch(KILLED, folder), folder) == -signal.SIGKILL
    (run,) = runs(folder)
    assert status(run) == "running"
    return run


def test_the_same_command_resumes_the_unfinished_run(tmp_path):
    reference = complete(UNNAMED, tmp_path / "reference")
    run = killed_run(tmp_path / "killed")
    complete(UNNAMED, tmp_path / "killed")
    assert runs(tmp_path / "killed") == [run]
    assert status(run) == "finished"
    assert differences(reference, tmp_path / "killed") == []


def test_a_finished_run_is_not_touched(tmp_path):
    complete(UNNAMED, tmp_path)
    (first,) = runs(tmp_path)
    before = content(first)
    complete(UNNAMED, tmp_path)
    assert content(first) == before
    assert [status(run) for run in runs(tmp_path)] == ["finished", "finished"]


def test_an_unfinished_run_of_another_command_is_not_touched(tmp_path):
    first = killed_run(tmp_path)
    before = content(first)
    complete(Case(run_dir=None, lr=0.02), tmp_path)
    assert content(first) == before
    complete(UNNAMED, tmp_path)
    assert [status(run) for run in runs(tmp_path)] == ["finished", "finished"]
    assert "resuming from" in (first / "log.txt").read_text()


def test_a_running_run_is_not_touched(tmp_path):
    running = launch(Case(run_dir=None, block_in_step=2), tmp_path)
    assert wait_for((tmp_path / "in_step").exists, running)
    complete(UNNAMED, tmp_path)
    assert len(runs(tmp_path)) == 2
    running.kill()
    finish(running, tmp_path)
    complete(UNNAMED, tmp_path)
    assert [status(run) for run in runs(tmp_path)] == ["finished", "finished"]


@pytest.mark.parametrize("whose", ["the new process", "a stranger"])
def test_process_ids_are_reused(tmp_path, monkeypatch, whose):
    """In a container every run may have process id 1, and after a reboot an id may belong to any process."""
    run = killed_run(tmp_path)
    record = json.loads((run / "status.json").read_text())
    record["process"] = os.getpid() if whose == "the new process" else os.getppid()
    (run / "status.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    train(UNNAMED)
    assert runs(tmp_path) == [run]
    assert status(run) == "finished"


def test_killed_before_anything_was_saved(tmp_path):
    reference = complete(UNNAMED, tmp_path / "reference")
    folder = tmp_path / "killed"
    assert kill_in_save(UNNAMED, folder, save=1, sync=2), output(folder)
    complete(UNNAMED, folder)
    assert len(runs(folder)) == 1
    assert differences(reference, folder) == []
