"""One process at a time in a run folder, and one set of settings; the locks of dead processes are recognised."""

import json
import os
import signal
import socket
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from forking import SERVER
from trainformer import Trainer, hf
from trainformer.core.errors import BadArgument
from trainformer.mini import BaseTrainer
from trainformer.mini.checkpointing import CheckpointingHook
from trainformer.utils import locks
from trainformer.utils.locks import LOCK, FolderInUse, FolderLock

pytestmark = pytest.mark.timeout(600)

DATA = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))


class Task:
    def __init__(self):
        self.model = nn.Linear(4, 2)

    def train_step(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def eval_step(self, batch):
        return {"loss": self.train_step(batch)}


def trainer(folder, **options):
    return Trainer(Task(), DATA, **{"epochs": 1, "batch_size": 4, "log": "none", "run_dir": folder, **options})


def hold(folder, ready):
    """Keep the lock until the process is killed."""
    FolderLock(folder, "training").acquire()
    ready.set()
    time.sleep(3600)


def try_once(folder, start, results):
    start.wait()
    try:
        FolderLock(folder, "training").acquire()
    except FolderInUse:
        results.put("in use")
        return
    results.put("held")
    time.sleep(3600)


@pytest.fixture
def owner(tmp_path):
    """A process that holds the lock of a folder."""
    ready = SERVER.Event()
    process = SERVER.Process(target=hold, args=(tmp_path, ready), daemon=True)
    process.start()
    assert ready.wait(300)
    yield process
    process.kill()
    process.join()


# -- the lock ------------------------------------------------------------------------------------------------


def test_the_error_names_the_owner_and_a_killed_owner_is_gone_at_once(tmp_path, owner):
    with pytest.raises(FolderInUse, match=f"process {owner.pid} on {socket.gethostname()} has been training there"):
        FolderLock(tmp_path, "training").acquire()
    owner.kill()
    owner.join()
    with FolderLock(tmp_path, "training").held():
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_only_one_of_many_processes_gets_the_lock_of_a_dead_one(tmp_path, owner):
    owner.kill()
    owner.join()
    start, results = SERVER.Event(), SERVER.Queue()
    contenders = [SERVER.Process(target=try_once, args=(tmp_path, start, results), daemon=True) for _ in range(6)]
    for process in contenders:
        process.start()
    start.set()
    found = sorted(results.get(timeout=300) for _ in contenders)
    for process in contenders:
        process.kill()
        process.join()
    assert found == ["held"] + ["in use"] * 5


def elsewhere(tmp_path):
    """The lock of a process on another machine, whose identity says nothing here."""
    content = {
        "host": "elsewhere",
        "process": 1,
        "identity": "1-1-1",
        "namespace": "",
        "purpose": "training",
        "time": 0,
    }
    (tmp_path / LOCK).write_text(json.dumps(content))


def test_an_owner_elsewhere_is_alive_while_its_heartbeat_is(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.2)
    elsewhere(tmp_path)
    stopped = threading.Event()

    def beat():
        while not stopped.wait(0.05):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(FolderInUse, match="process 1 on elsewhere has been training there since"):
            FolderLock(tmp_path, "training").acquire()
    finally:
        stopped.set()
        thread.join()


def test_an_owner_elsewhere_without_a_heartbeat_is_dead(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.1)
    elsewhere(tmp_path)
    with caplog.at_level("WARNING", "trainformer"), FolderLock(tmp_path, "training").held():
        pass
    assert "waiting for a sign of life" in caplog.text
    assert "taking the lock of process 1 on elsewhere" in caplog.text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"process": "x"}', '{"host": 3, "process": 1}', "\x00" * 99]
)
def test_what_is_not_a_lock_is_nobodys(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with FolderLock(tmp_path, "training").held():
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_the_heartbeat_is_seen_from_outside(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.05)
    with FolderLock(tmp_path, "training").held():
        before = (tmp_path / LOCK).stat().st_mtime_ns
        deadline = time.monotonic() + 300
        while (tmp_path / LOCK).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# -- runs ----------------------------------------------------------------------------------------------------


class Mini(BaseTrainer):
    def build_data_loader(self):
        return [tuple(row[None] for row in DATA[i]) for i in range(8)]

    def build_model(self):
        return nn.Linear(4, 2)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def build_lr_scheduler(self):
        return None

    def build_hooks(self):
        return [CheckpointingHook(2, path=self.folder)]

    def forward(self, batch):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        return loss, {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


def native_run(folder):
    trainer(folder).fit()


def outside_run(folder):
    trainer(folder.parent / "other", save_dir=str(folder)).fit()


def hf_run(folder):
    rows = [{"x": x, "labels": y} for x, y in DATA]
    hf.Trainer(Net(), hf.TrainingArguments(str(folder), max_steps=2, report_to="none"), train_dataset=rows).train()


def mini_run(folder):
    made = Mini(max_steps=4, device="cpu")
    made.folder = folder
    made.train()


@pytest.mark.parametrize("run", [native_run, outside_run, hf_run, mini_run])
def test_a_folder_in_use_is_refused_and_nothing_is_changed(tmp_path, owner, run):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FolderInUse, match=f"process {owner.pid} on"):
        run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, "config.json"}
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    run(tmp_path)


def test_a_failed_run_gives_its_lock_back(tmp_path):
    class Broken:
        def on_step_end(self, trainer, step, loss):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, callbacks=[Broken()]).fit()
    assert trainer(tmp_path).fit().state.step == 4


# -- settings ------------------------------------------------------------------------------------------------


def test_changed_settings_are_listed_and_the_run_is_not_resumed(tmp_path):
    trainer(tmp_path, lr=0.1).fit()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        BadArgument, match=r"received others: batch_size 4 -> 8, lr 0.1 -> 0.2\. .* pass resume='"
    ) as info:
        trainer(tmp_path, lr=0.2, batch_size=8, epochs=3).fit()
    assert f"resume='{tmp_path}'" in str(info.value)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in after if after[path] != before.get(path)} <= {"log.txt"}
    continued = trainer(tmp_path, lr=0.2, batch_size=8, epochs=3, resume=tmp_path).fit()
    assert continued.state.step == 4 + 2 * 2
    assert trainer(tmp_path, lr=0.2, batch_size=8, epochs=4).fit().state.step == 10  # now these are its settings


def test_a_model_that_has_moved_is_the_same_model(tmp_path):
    class Named(Task):
        def __init__(self, model_name):
            super().__init__()
            self.model_name = model_name

        def config_dict(self):
            return {"model_name": self.model_name}

    def run(model_name, epochs):
        made = Trainer(Named(model_name), DATA, epochs=epochs, batch_size=4, log="none", run_dir=tmp_path)
        return made.fit().state.step

    run("/scratch/1/model", 1)
    assert run("/scratch/2/model", 2) == 8
    with pytest.raises(BadArgument, match="'/scratch/2/model' -> 'gpt2'"):
        run("gpt2", 3)


def test_other_data_counts_as_a_change(tmp_path):
    trainer(tmp_path).fit()
    other = Trainer(Task(), TensorDataset(*DATA[:12]), epochs=2, batch_size=4, log="none", run_dir=tmp_path)
    with pytest.raises(BadArgument, match="num_samples 16 -> 12"):
        other.fit()


def test_what_does_not_change_the_training_may_change(tmp_path):
    trainer(tmp_path).fit()
    options = {"epochs": 2, "save_every": "1epochs", "log_every": 1, "num_workers": 0, "eval_every": None}
    assert trainer(tmp_path, **options).fit().state.step == 8


def test_mini_refuses_to_resume_with_other_settings(tmp_path):
    def run(**options):
        made = Mini(workspace=tmp_path, device="cpu", **options)
        made.folder = None
        made.train()
        return made

    run(max_steps=4, grad_clip=1.0)
    with pytest.raises(BadArgument, match=r"gradient_clip 1.0 -> 2.0\. .* pass load='.*checkpoint_step_4.pt' to it"):
        run(max_steps=6, grad_clip=2.0)
    assert run(max_steps=6, grad_clip=1.0).step == 6
