"""A small training process to kill, with everything on that could break an exact resume.

Random augmentation with all three generators, shuffling, gradient accumulation with an incomplete last window per
epoch, dropout, batch norm, fp16 with a loss scaler, EMA, early stopping, evaluations, and saves and log points at steps
that do not coincide.

    python victim.py '{"run_dir": "somewhere", "workers": 2}'
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from file_operations import block, block_in_save, count_operations
from trainformer import Trainer
from trainformer.callbacks import EMA, EarlyStopping
from trainformer.checkpointing import store

SAMPLES = 102  # 26 micro-batches, the last with 2 samples; 9 steps, the last with 2 micro-batches
STEPS_PER_EPOCH = 9


@dataclass(frozen=True)
class Case:
    """One command. The same case always means the same training, whatever faults are injected."""

    run_dir: str | None = "run"  # None: unnamed; the library chooses a folder in runs/
    workers: int = 0
    save_async: bool = False
    epochs: int = 4
    max_steps: int | None = None
    save_every: int | None = 4
    log_every: int = 3
    eval_every: int = 1
    save_best: int = 2
    save_last: int = 3
    patience: int = 10
    precision: str = "fp16"
    lr: float = 0.01
    save_dir: str = "checkpoints"

    # Injected faults; none of them may change the result.
    pause: float = 0.0  # extra seconds per micro-batch
    slow: float = 0.0  # extra seconds per fsync of a checkpoint file
    block_in_save: tuple[int, int] | None = None  # (save, fsync): block there until killed, see `file_operations`
    block_in_step: int | None = None  # block inside this step, from "in_step" to "release" (files)
    die_at: int | None = None  # SIGKILL at this file operation
    failing_saves: tuple[int, ...] = ()  # saves (counted from 1) that find the disk full
    fail_in_step: int | None = None  # such a save fails only when training has reached this step
    signals: tuple[tuple[int, int], ...] = ()  # (step, signal) sent to itself just after that step


class Augmented(Dataset):
    """Samples that differ in every epoch, each with its index."""

    def __init__(self, size=SAMPLES, random_too=True):
        g = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 6, generator=g)
        self.y = self.x[:, :3].argmax(-1)
        self.random_too = random_too

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if self.random_too:
            x = x + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return x, self.y[index], index


class Task:
    """Classification; remembers the samples it has seen since the last step."""

    def __init__(self, case):
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3), nn.Dropout(0.1)
        )
        self.case = case
        self.micro_batches = 0
        self.seen = []

    def train_step(self, batch):
        x, y, index = batch
        self.seen += index.tolist()
        time.sleep(self.case.pause)
        self.micro_batches += 1
        if self.case.block_in_step is not None and self.micro_batches == 3 * self.case.block_in_step - 1:
            block("in_step", until="release")
        return F.cross_entropy(self.model(x), y)

    def eval_step(self, batch):
        x, y, _ = batch
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).float().mean()}


class Recorder:
    """Records the samples of every step (one line, one system call), then sends itself the signal of that step."""

    def __init__(self, task, path, signals=()):
        self.task, self.path, self.signals = task, path, dict(signals)

    def on_step_end(self, trainer, step, loss):
        line = {"step": step, "epoch": trainer.state.epoch, "samples": self.task.seen}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.close(descriptor)
        self.task.seen = []
        if step in self.signals:
            signal.raise_signal(self.signals[step])  # to this thread: handled before the next line


def make_trainer(case, callbacks=()):
    """The trainer of a case, with records in the working directory."""
    task = Task(case)
    return Trainer(
        task,
        Augmented(),
        Augmented(size=20, random_too=False),
        callbacks=[
            EMA(decay=0.9),
            EarlyStopping(patience=case.patience),
            Recorder(task, Path("samples.jsonl").absolute(), case.signals),
            *callbacks,
        ],
        run_dir=case.run_dir,
        epochs=case.epochs,
        max_steps=case.max_steps,
        batch_size=4,
        accumulation_steps=3,
        lr=case.lr,
        precision=case.precision,
        num_workers=case.workers,
        log_every=case.log_every,
        save_every=case.save_every,
        save_best=case.save_best,
        save_last=case.save_last,
        save_dir=case.save_dir,
        eval_every=case.eval_every,
        save_async=case.save_async,
        log="none",
        device="cpu",
    )


def train(case):
    """Train to the end, with the faults of the case."""
    torch.set_num_threads(1)
    slow_down_saves(case.slow)
    fail_saves(case.failing_saves, case.fail_in_step)
    if case.block_in_save is not None:
        block_in_save([store], case.block_in_save)
    operations = count_operations(Path.cwd(), case.die_at)
    before = handlers()
    try:
        make_trainer(case).fit()
    finally:
        # Not reached by a process that is killed.
        end = {"operations": operations[0], "handlers_restored": handlers() == before}
        Path("end.json").write_text(json.dumps(end))


def handlers():
    """The current handlers of the signals that a run handles."""
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]


def slow_down_saves(seconds):
    """Make saves slow, so that one is still in progress while something else happens."""
    if seconds:
        original = store.sync
        store.sync = lambda path: (time.sleep(seconds), original(path))


def fail_saves(numbers, step):
    """Let some saves raise the error of a full disk, when training has reached a step."""
    from trainformer.checkpointing import torch_files as state_files

    original, count = state_files.write_component, [0]

    def write_component(folder, stem, format, state):
        count[0] += stem == "model"
        if count[0] in numbers and stem == "optimizer":
            while step is not None and len(Path("samples.jsonl").read_text().splitlines()) < step:
                time.sleep(0.005)
            raise OSError(28, "No space left on device")
        return original(folder, stem, format, state)

    if numbers:
        state_files.write_component = write_component


def start(case, folder):
    """The target of a forked process: train in a folder, with the output in a file there."""
    os.chdir(folder)
    # Workers must be children of the victim, as usual, not of the server that it was forked from.
    multiprocessing.set_start_method("fork", force=True)
    output = os.open("output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setpgid(0, 0)
    train(case)


if __name__ == "__main__":
    train(Case(**json.loads(sys.argv[1])))
