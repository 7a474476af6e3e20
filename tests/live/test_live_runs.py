"""Runs in this process that are controlled from another thread, and the status of run folders."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from controlled import Gate, ctl
from harness import wait_for
from torch.utils.data import TensorDataset

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.checkpointing import CheckpointStore
from trainformer.core.errors import BadArgument
from trainformer.live import ControlError, address, ask, describe, list_runs
from trainformer.live.server import Request, Ticket
from trainformer.run import run_of
from trainformer.run.folder import NoFolder
from trainformer.utils.processes import process_identity


def trainer(*callbacks, **settings):
    settings = {"run_dir": "runs/here", "epochs": 2, "batch_size": 8, "precision": "fp32", "log": "none"} | settings
    return Trainer(MeanTask(), TensorDataset(*classes()), callbacks=list(callbacks), **settings)


def train_and_ask(trainer, requests):
    """Train while another thread sends requests at some steps; the replies, or the errors."""
    answers = []

    def make():
        for step, verb in requests.items():
            wait_for(lambda step=step: Path("reached.txt").exists() and Path("reached.txt").read_text() == str(step))
            try:
                answers.append(ask("here", verb, timeout=300))
            except ControlError as error:
                answers.append(str(error))

    run_of(trainer).add_callback(Gate(dict.fromkeys(requests, 1)))
    asking = threading.Thread(target=make)
    asking.start()
    trainer.fit()
    asking.join(300)
    return answers


def test_eval_without_validation_data_is_refused_and_the_run_continues():
    ours = trainer()
    refused, saved = train_and_ask(ours, {3: "eval", 5: "save"})
    assert refused == "here: There is no validation data, so nothing can be evaluated. The run continues."
    assert saved["step"] == 5
    assert ours.state.step == 16


def test_stop_saves_even_if_the_run_does_not_save_at_its_end():
    ours = trainer()
    run_of(ours).options = replace(run_of(ours).options, plan={"save_at_end": False})
    (answer,) = train_and_ask(ours, {3: "stop"})
    assert (answer["step"], Path(answer["checkpoint"]).name) == (3, "step_00000003")
    assert [saved.step for saved in CheckpointStore(Path("runs/here/checkpoints")).checkpoints()] == [3]


def test_a_late_request_is_not_carried_out_by_the_next_run():
    class Late:
        """Sends a request at the last moment: replies have been sent, and the server is about to close."""

        def on_train_end(self, trainer):
            live = run_of(trainer).live_control
            given = live._close
            live._close = lambda *args: (given(*args), live._receive(ticket))

    replies = []
    ticket = Ticket(Request("stop", "somebody"), replies.append, lambda file, reply: None)
    ours = trainer(Late(), run_dir="runs/first")
    ours.fit()
    del run_of(ours).live_control._close
    assert not run_of(ours).live_control.waiting
    again = trainer()
    run_of(again).live_control, run_of(again).live_control._run = run_of(ours).live_control, run_of(again)
    (saved,) = train_and_ask(again, {3: "save"})
    assert (saved["step"], again.state.step) == (3, 16)


def test_a_request_that_was_just_done_is_not_done_again():
    """A request during the evaluation and save of a step boundary finds both done when that step is polled again."""
    ours = trainer(val_data=TensorDataset(*classes(n=8, seed=1)))
    live, state, answers = run_of(ours).live_control, ours.state, {}
    history = [
        {"step": 4.0, "epoch": 0.5, "val/loss": 7.0},
        {"step": 6.0, "val/loss": 1.0},
        {"step": 6.0, "train/loss": 3.0},
    ]
    ours.fit()
    state.step = state.evaluated_at = state.saved_at = 6
    state.log_history[:] = history
    live._checkpointer = SimpleNamespace(store=CheckpointStore(Path("runs/here/checkpoints")), failures=5)
    for verb in ("eval", "save"):
        live._receive(Ticket(Request(verb, "me"), partial(answers.__setitem__, verb), lambda file, reply: None))
    live.apply_requests(live.take())
    assert answers == {"eval": {"ok": True, "step": 6, "metrics": {"val/loss": 1.0}}}
    live._checkpointer.failures += 1  # only failures since then count
    live.answer_finished()
    assert answers["save"] == {"ok": False, "error": "The checkpoint could not be written; the run's log.txt says why."}
    assert not live.waiting


def test_a_callback_can_call_off_a_stop_and_the_client_gets_an_error():
    class Stubborn:
        def on_save(self, trainer, path):
            trainer.control.cancel_stop()

    ours = trainer(Stubborn())
    assert train_and_ask(ours, {3: "stop"}) == ["here: A callback has cancelled it. The run continues."]
    assert ours.state.step == 16


def test_adding_and_removing_callbacks_loses_no_reply():
    class Passing:
        def on_step_end(self, trainer, step, loss):
            """Nothing."""

    class Restless:
        def on_log(self, trainer, metrics):
            run_of(trainer).add_callback(Passing())
            run_of(trainer).remove_callback(Passing)

    ours = trainer(Restless(), log_every=1, val_data=TensorDataset(*classes(n=8, seed=1)))
    saved, evaluated = train_and_ask(ours, {3: "save", 5: "eval"})
    assert Path(saved["checkpoint"]).name == "step_00000003"
    assert evaluated["step"] == 5
    assert evaluated["metrics"].keys() == {"val/loss", "val/accuracy"}


def test_a_stopped_run_can_be_resumed_explicitly():
    (answer,) = train_and_ask(trainer(), {3: "stop"})
    assert answer["status"] == "stopped"
    again = trainer()
    again.fit()
    assert again.state.step == 3
    with pytest.raises(ControlError, match=r"not running\. It was stopped at step 3") as caught:
        ask("here", "save")
    advice = str(caught.value).partition('resume="')[2].partition('"')[0]
    on = trainer(resume=advice)
    on.fit()
    assert on.state.step == 16
    undisturbed = trainer(run_dir="runs/there")
    undisturbed.fit()
    ours, theirs = (list(t.task.model.parameters()) for t in (on, undisturbed))
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


def test_each_fit_has_its_own_token_and_cleans_up():
    seen = []

    class Look:
        def on_train_begin(self, trainer):
            seen.append(address.read(Path("runs/here")))

        def on_train_end(self, trainer):
            assert address.read(Path("runs/here")) == seen[-1]

    ours = trainer(Look())
    ours.fit()
    ours.fit()
    assert len({known.token for known in seen}) == 2
    assert not any(Path(known.path).parent.exists() for known in seen)
    assert not Path("runs/here/control.json").exists()
    assert not [t for t in threading.enumerate() if t.name == "trainformer-control"]


def test_sockets_of_killed_runs_are_removed(tmp_path, monkeypatch):
    """Folders whose socket has no listener, unless they are new, from another machine, or hold other files."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="t", dir="/tmp"))
    listeners = {}
    for name in ("dead", "young", "alive", "full"):
        listeners[name], known = address.listen()
        folder = Path(known.path).parent
        (folder / "note").touch() if name == "full" else None
        listeners[name].close() if name != "alive" else None
        os.utime(folder, (0, 0)) if name != "young" else None
        listeners[name, "folder"] = folder
    empty = Path(tempfile.mkdtemp(prefix=f"{listeners['dead', 'folder'].name[:19]}", dir=tempfile.tempdir))
    far = Path(tempfile.mkdtemp(prefix="trainformer-far-", dir=tempfile.tempdir))
    for folder in (empty, far):
        os.utime(folder, (0, 0))
    listener, own = address.listen()
    left = set(Path(tempfile.tempdir).iterdir())
    kept = {listeners[name, "folder"] for name in ("young", "alive", "full")}
    for one in (listener, listeners["alive"]):
        one.close()
    shutil.rmtree(tempfile.tempdir)
    assert left == {*kept, far, Path(own.path).parent}


def test_a_run_that_cannot_listen_still_trains(monkeypatch):
    def refuse():
        raise OSError("too many open files")

    monkeypatch.setattr(address, "listen", refuse)
    ours = trainer()
    ours.fit()
    assert ours.state.step == 16
    assert "live control is off: no socket could be opened" in Path("runs/here/log.txt").read_text()


def test_a_run_without_a_folder_does_not_listen():
    threads = threading.active_count()
    with run_of(trainer()).live_control.serving(NoFolder(), None, lambda: "finished"):
        assert threading.active_count() == threads


# -- folders -----------------------------------------------------------------------------------------------


def write_run(name, status="running", process=None, identity="of another", **config):
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    content = {"status": status, "process": process or os.getpid(), "identity": identity, "time": time.time()}
    (folder / "status.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({key: {"value": value} for key, value in config.items()}))
    return folder


def test_a_reused_process_id_does_not_make_a_run_alive():
    write_run("old")
    write_run("young", identity=process_identity(os.getpid()))
    assert {info.name: info.status for info in list_runs()} == {"old": "killed", "young": "running"}
    with pytest.raises(ControlError, match=r"is gone\. Run the same command again to start over: it had no checkpoint"):
        ask("old", "save")
    with pytest.raises(ControlError, match=r"young is running \(process \d+\) but does not listen"):
        ask("young", "save")


def test_a_zombie_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = process_identity(child.pid)
    assert alive is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
    assert Path(f"/proc/{child.pid}/stat").exists() == Path("/proc/self").exists()
    assert process_identity(child.pid) is None
    child.communicate()


def test_a_run_on_another_machine_is_not_reported_as_dead():
    folder = write_run("far", process=7)
    far = address.Address(token="t", process=7, identity="of another", host="elsewhere", path="/nowhere")
    (folder / "control.json").write_text(json.dumps(vars(far)))
    assert (describe(folder).status, describe(folder).host) == ("running", "elsewhere")
    with pytest.raises(ControlError, match=f"far runs on elsewhere, and this is {socket.gethostname()}"):
        ask("far", "stop")


def test_a_missing_socket_is_reported():
    folder = write_run("mute", identity=process_identity(os.getpid()))
    gone = address.Address("t", os.getpid(), process_identity(os.getpid()), socket.gethostname(), path="/nowhere/s")
    address.publish(folder, gone)
    with pytest.raises(ControlError, match=r"its socket does not answer .*SIGTERM saves and stops"):
        ask("mute", "save")


def test_progress_is_read_from_the_logged_metrics():
    folder = write_run("half", "failed", epochs=4)
    lines = [{"step": i, "train/loss": 1 / i, "train/epoch": i / 1000} for i in range(1, 2001)]
    text = "\n".join(map(json.dumps, [*lines, {"step": 2000, "val/loss": "NaN"}]))
    (folder / "metrics.jsonl").write_text(text + '\n{"step": 2001, "tr')
    found = describe(folder)
    assert (found.step, found.loss, found.progress) == (2000, 1 / 2000, 0.5)
    folder = write_run("steps", "finished", max_steps=50)
    (folder / "metrics.jsonl").write_text('{"step": 20, "train/loss": "NaN"}\nrubbish\n')
    assert (describe(folder).steps, describe(folder).loss, describe(folder).progress) == (50, "NaN", 1.0)


def test_unknown_runs_get_a_suggestion(tmp_path):
    write_run("resnet-small", "finished")
    Path("runs/empty").mkdir()
    with pytest.raises(BadArgument, match=r"received 'resnet-smal'\. Did you mean 'resnet-small'"):
        ask("resnet-smal", "save")
    with pytest.raises(BadArgument, match=r"It has no status\.json of a run"):
        ask("empty", "save")
    with pytest.raises(BadArgument, match=r"a verb among status, save, stop, abort, eval, received 'sav'\."):
        ask("resnet-small", "sav")
    with pytest.raises(BadArgument, match="no such folder"):
        list_runs("nowhere")
    done = ctl(tmp_path, "stop", "nothing-like-it")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Expected the folder of a run, or the name of one under runs/")
    assert ctl(tmp_path, "list", "runs/empty").stdout == "no runs in runs/empty\n"


def test_control_needs_no_torch(tmp_path):
    write_run("done", "finished")
    code = "import sys\nfrom trainformer.cli import main\nmain(['ctl', 'list'])\nprint('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "done" in out
    assert out.endswith("False\n")


@pytest.mark.parametrize(
    "changes", [{"time": "now"}, {"process": 2**70}, {"process": []}, {"status": 3}, {"identity": {}}]
)
def test_a_forged_status_is_no_error(tmp_path, changes):
    content = {"status": "running", "process": 1, "identity": "x", "fingerprint": "", "time": 1e9}
    (tmp_path / "status.json").write_text(json.dumps(content | changes))
    (tmp_path / "control.json").write_text(
        json.dumps({"token": 1, "process": "x", "identity": 1, "host": [], "path": 3})
    )
    info = describe(tmp_path)
    assert not info.is_running
    assert info.age is None or info.age > 0


@pytest.mark.parametrize(
    "reply",
    [
        {"step": "x"},
        {"metrics": []},
        {"step": 1, "planned_steps": 2, "metrics": None},
        {"step": 1},
        {"step": 1, "planned_steps": {}},
    ],
)
def test_a_reply_that_cannot_be_understood_is_named(tmp_path, monkeypatch, reply):
    from trainformer.live import client

    monkeypatch.setattr(client, "_address_of", lambda folder: address.Address("t", 1, None, "here"))
    monkeypatch.setattr(client, "_exchange", lambda *_: {"ok": True, **reply})
    (tmp_path / "status.json").write_text('{"status": "running"}')
    with pytest.raises(ControlError, match="Expected a reply that this version of trainformer understands"):
        client.ask(tmp_path, "status")
