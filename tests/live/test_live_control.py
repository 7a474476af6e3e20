"""Every verb of `trainformer ctl` on a run in another process, and what it leaves behind."""

import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from controlled import asked, control_file, ctl, finish_ctl, launch_gated, log_of, start_ctl, wait_at
from harness import compare_states, complete, differences, final_state, finish, kept, output, records
from victim import Case

from trainformer.checkpointing import CheckpointStore

CASES = {"sync": Case(), "async": Case(save_async=True, slow=0.02)}


def newest(folder):
    return CheckpointStore(folder / "run" / "checkpoints").newest()


def evaluations(folder, step):
    of_step = [r for r in records(folder) if r["step"] == step and "val/loss" in r]
    return [{name: value for name, value in r.items() if name != "step"} for r in of_step]


def status(folder):
    return json.loads((folder / "run" / "status.json").read_text())["status"]


def is_cleaned_up(folder, address):
    return not (folder / "run" / "control.json").exists() and not Path(address["path"]).parent.exists()


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_save_replies_when_the_checkpoint_is_complete(tmp_path, undisturbed_run, kind):
    process = launch_gated(CASES[kind], tmp_path, {5: 1, 6: 1})
    answer = asked(tmp_path, "save", "run")
    # It is complete at the moment of the reply, while the run continues.
    checkpoints = CheckpointStore(tmp_path / "run" / "checkpoints").checkpoints()
    saved = next(c for c in checkpoints if c.step == 5)
    saved.verify()
    assert answer["step"] == 5
    assert Path(answer["checkpoint"]) == saved.path
    wait_at(process, tmp_path, 6)
    assert ctl(tmp_path, "save", "run").stdout == f"saved at step 6: {tmp_path / 'run/checkpoints/step_00000006'}\n"
    assert finish(process, tmp_path) == 0
    assert differences(undisturbed_run(CASES[kind]), tmp_path, retention=False) == []


def test_eval_replies_with_the_metrics_and_logs_them(tmp_path, undisturbed):
    process = launch_gated(Case(), tmp_path, {5: 1, 9: 1})
    answer = asked(tmp_path, "eval", "run")
    assert answer["step"] == 5
    assert evaluations(tmp_path, 5) == [answer["metrics"]]
    wait_at(process, tmp_path, 9)
    # An evaluation that is due anyway runs once.
    assert asked(tmp_path, "eval", "run")["metrics"] == evaluations(undisturbed, 9)[0]
    assert finish(process, tmp_path) == 0
    assert len(evaluations(tmp_path, 9)) == 1


def test_a_controlled_run_ends_with_the_same_weights(tmp_path, undisturbed):
    """Saves and evaluations at odd steps, at the last of an epoch, two at once: training is unaffected."""
    process = launch_gated(Case(), tmp_path, {1: 1, 7: 2, 18: 2, 23: 1, 35: 1})
    for step, verbs in ((1, ["eval"]), (7, ["save", "eval"]), (18, ["eval", "save"]), (23, ["save"]), (35, ["eval"])):
        wait_at(process, tmp_path, step)
        for verb in verbs:
            assert asked(tmp_path, verb, "run", "--no-wait")["accepted"]
    assert finish(process, tmp_path) == 0, output(tmp_path)
    ours, theirs = final_state(tmp_path), final_state(undisturbed)
    # The log history has the extra evaluations; everything else is bitwise equal.
    assert compare_states(ours, theirs) == ["run"]
    train = [[r for r in records(folder) if "train/loss" in r] for folder in (undisturbed, tmp_path)]
    assert train[0] == train[1]


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_stop_saves_and_ends_the_run(tmp_path, kind):
    process = launch_gated(CASES[kind], tmp_path, {5: 1})
    address = control_file(tmp_path / "run")
    answer = asked(tmp_path, "stop", "run")
    # All of this holds when the reply arrives, not some time later.
    assert (answer["step"], answer["status"], status(tmp_path)) == (5, "stopped", "stopped")
    assert newest(tmp_path).step == 5
    assert answer["checkpoint"] == str(newest(tmp_path).path)
    assert finish(process, tmp_path) == 0
    assert "stopped at step 5 by trainformer ctl: requested by " in log_of(tmp_path)
    assert f"@{socket.gethostname()} (pid " in log_of(tmp_path)
    assert is_cleaned_up(tmp_path, address)
    late = ctl(tmp_path, "save", "run")
    assert late.returncode == 1
    assert "run is not running. It was stopped at step 5." in late.stderr
    complete(CASES[kind], tmp_path)  # as after early stopping: the run is over
    assert newest(tmp_path).step == 5


def test_abort_discards_progress_since_the_last_checkpoint(tmp_path, undisturbed):
    process = launch_gated(Case(), tmp_path, {6: 1})
    answer = asked(tmp_path, "abort", "run")
    assert (answer["step"], answer["status"]) == (6, "aborted")
    assert finish(process, tmp_path) == 0
    assert status(tmp_path) == "aborted"
    assert list(kept(tmp_path)) == ["step_00000004"]
    assert answer["checkpoint"].endswith("step_00000004")
    assert "Run the same command again to resume from step 4." in ctl(tmp_path, "eval", "run").stderr
    complete(Case(), tmp_path)
    assert differences(undisturbed, tmp_path) == []


def test_status_replies_in_the_middle_of_a_step(tmp_path):
    process = launch_gated(Case(), tmp_path, {20: 1})
    answer = asked(tmp_path, "status", "run")
    assert (answer["step"], answer["planned_steps"], answer["epoch"], answer["status"]) == (20, 36, 2, "running")
    assert answer["process"] == process.pid
    logged = {r["step"]: r for r in records(tmp_path) if "train/loss" in r}
    assert answer["metrics"]["train/loss"] == logged[18]["train/loss"]
    assert answer["evaluation"]["step"] == 18
    assert answer["best"]["val/loss"] == min(r["val/loss"] for r in records(tmp_path) if "val/loss" in r)
    assert answer["checkpoint"].endswith("checkpoints/step_00000018") or answer["checkpoint"].endswith("16")
    assert answer["eta_seconds"] == pytest.approx(16 / answer["steps_per_second"])
    said = ctl(tmp_path, "status", "run").stdout
    assert "20 of 36 (55.6%)" in said
    ctl(tmp_path, "abort", "run")
    assert finish(process, tmp_path) == 0
    assert json.loads(ctl(tmp_path, "status", "run", "--json").stdout)["status"] == "aborted"


def test_concurrent_clients_all_get_a_reply(tmp_path, undisturbed):
    process = launch_gated(Case(), tmp_path, {5: 3})
    clients = [start_ctl(tmp_path, verb, "run", "--json") for verb in ("save", "eval", "save")]
    answers = [json.loads(finish_ctl(client).stdout) for client in clients]
    assert [a["step"] for a in answers] == [5, 5, 5]
    assert answers[0] == answers[2]
    assert "val/loss" in answers[1]["metrics"]
    assert finish(process, tmp_path) == 0


def test_a_busy_run_carries_out_the_request_later(tmp_path):
    process = launch_gated(Case(), tmp_path, {5: 2})
    late = ctl(tmp_path, "save", "run", "--timeout", "0.5")
    assert late.returncode == 1
    assert "did not answer within 0.5 s: it is at step 5 and busy" in late.stderr
    assert asked(tmp_path, "eval", "run")["step"] == 5  # the second request opens the gate
    assert finish(process, tmp_path) == 0
    assert "saved run/checkpoints/step_00000005" in log_of(tmp_path)


@pytest.mark.slow
def test_a_suspended_process_is_not_reported_as_dead(tmp_path):
    process = launch_gated(Case(), tmp_path, {5: 1})
    os.kill(process.pid, signal.SIGSTOP)
    silent = ctl(tmp_path, "status", "run", "--timeout", "0.5")
    os.kill(process.pid, signal.SIGCONT)
    assert silent.returncode == 1
    assert "exists but does not respond" in silent.stderr
    assert asked(tmp_path, "abort", "run")["status"] == "aborted"
    assert finish(process, tmp_path) == 0


@pytest.mark.slow
def test_a_request_after_the_end_of_training_is_refused(tmp_path):
    process = launch_gated(Case(), tmp_path, at_end=2)
    clients = [start_ctl(tmp_path, verb, "run") for verb in ("save", "stop")]
    for client in clients:
        done = finish_ctl(client)
        assert done.returncode == 1
        assert "has ended at step 36 (finished) before this could be done" in done.stderr
    assert finish(process, tmp_path) == 0
    assert status(tmp_path) == "finished"


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failed_save_gets_an_error_reply_and_the_run_continues(tmp_path, undisturbed_run, asynchronous):
    case = Case(failing_saves=(1,), save_async=asynchronous)
    process = launch_gated(case, tmp_path, {2: 1})
    failed = ctl(tmp_path, "save", "run")
    assert failed.returncode == 1
    assert "run: The checkpoint could not be written; the run's log.txt says why." in failed.stderr
    assert "No space left on device" in log_of(tmp_path)
    assert finish(process, tmp_path) == 0
    assert differences(undisturbed_run(replace(case, failing_saves=())), tmp_path, retention=False) == []


def test_a_failed_run_cleans_up(tmp_path):
    """The saves at steps 2, 4 and 7 find the disk full, and the third ends the run."""
    process = launch_gated(Case(failing_saves=(1, 2, 3)), tmp_path, {2: 1, 7: 2})
    address = control_file(tmp_path / "run")
    assert ctl(tmp_path, "save", "run", "--no-wait").returncode == 0
    wait_at(process, tmp_path, 7)
    for done in map(finish_ctl, [start_ctl(tmp_path, verb, "run") for verb in ("save", "stop")]):
        assert done.returncode == 1
        assert "run: The run has ended at step 7 (failed: SaveFailed 3 saves in a row failed" in done.stderr
    assert finish(process, tmp_path) == 1
    assert status(tmp_path) == "failed"
    assert is_cleaned_up(tmp_path, address)


def test_an_interrupted_run_cleans_up(tmp_path):
    process = launch_gated(Case(signals=((5, signal.SIGTERM),)), tmp_path, {4: 1})
    address = control_file(tmp_path / "run")
    assert ctl(tmp_path, "save", "run", "--no-wait").returncode == 0
    assert finish(process, tmp_path) == 128 + signal.SIGTERM
    assert is_cleaned_up(tmp_path, address)


def test_a_killed_run_is_reported_as_killed_and_replaced_by_the_next(tmp_path, undisturbed):
    process = launch_gated(Case(), tmp_path, {6: 1})
    before = control_file(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    finish(process, tmp_path)
    assert Path(before["path"]).exists()  # stale, like the file
    for verb in ("save", "stop", "abort", "eval"):
        dead = ctl(tmp_path, verb, "run")
        assert dead.returncode == 1
        assert f"Its process ({process.pid}) is gone. Run the same command again to resume from step 4." in dead.stderr
    (listed,) = asked(tmp_path, "list", ".")
    assert (listed["name"], listed["status"], listed["checkpoint_step"]) == ("run", "killed", 4)
    process = launch_gated(Case(), tmp_path, {10: 1})
    after = control_file(tmp_path / "run")
    assert after["token"] != before["token"]
    assert not Path(before["path"]).parent.exists()
    assert asked(tmp_path, "save", "run")["step"] == 10
    assert finish(process, tmp_path) == 0
    assert is_cleaned_up(tmp_path, after)
    assert differences(undisturbed, tmp_path, retention=False) == []


def test_a_run_killed_while_a_client_waits(tmp_path):
    process = launch_gated(Case(), tmp_path, {6: 2})
    client = start_ctl(tmp_path, "save", "run", "--timeout", "250")
    assert asked(tmp_path, "status", "run")["step"] == 6
    os.kill(process.pid, signal.SIGKILL)
    finish(process, tmp_path)
    done = finish_ctl(client)
    assert done.returncode == 1
    assert "is gone" in done.stderr


def test_a_long_path_and_file_permissions(tmp_path):
    long = "/".join(["deep" * 10] * 5) + "/run"
    process = launch_gated(Case(run_dir=long), tmp_path, {5: 1})
    run = tmp_path / long
    address = control_file(run)
    socket_path = Path(address["path"])
    assert len(str(run)) > 200
    assert len(str(socket_path)) < 100
    assert (run / "control.json").stat().st_mode & 0o777 == 0o600
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700
    assert socket_path.stat().st_mode & 0o777 == 0o600
    assert asked(tmp_path, "stop", run)["step"] == 5
    assert finish(process, tmp_path) == 0
    assert not socket_path.parent.exists()


@pytest.mark.slow
def test_list_shows_the_status_of_every_run(tmp_path):
    runs = {name: Case(run_dir=f"runs/{name}", max_steps=20) for name in ("done", "going", "killed")}
    complete(runs["done"], tmp_path)
    killed = launch_gated(runs["killed"], tmp_path, {10: 1})
    os.kill(killed.pid, signal.SIGKILL)
    finish(killed, tmp_path)
    process = launch_gated(runs["going"], tmp_path, {5: 1})
    found = {run["name"]: run for run in asked(tmp_path, "list")}
    assert {name: run["status"] for name, run in found.items()} == {
        "done": "finished",
        "going": "running",
        "killed": "killed",
    }
    assert {name: (run["step"], run["steps"]) for name, run in found.items()} == {
        "done": (20, 20),
        "going": (5, 20),  # from the run itself: nothing was logged since step 3
        "killed": (9, 20),
    }
    assert found["going"]["process"] == process.pid
    text = ctl(tmp_path, "list").stdout
    assert [line.split()[:2] for line in text.splitlines() if "ed " in line or "going" in line] == [
        ["done", "finished"],
        ["killed", "killed"],
        ["going", "running"],
    ]
    assert asked(tmp_path, "abort", "going")["step"] == 5
    assert finish(process, tmp_path) == 0
