"""A small training process to kill, with everything on that could break an exact resume.

Random augmentation with all three generators, shuffling, gradient accumulation with an incomplete last window per
epoch, dropout, batch norm, fp16 with a loss scaler, EMA, early stopping, evaluations, and saves and log points at steps
that do not coincide.

    python victim.py '{"run_dir": "somewhere", "workers": 2}'
"""

import io
import json
import multiprocessing
import os
import random
import signal
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from file_operations import Watch, block, block_in_save, mark
from trainformer import Loss, Mixture, Trainer
from trainformer.callbacks import EMA, EarlyStopping
from trainformer.checkpointing import store
from trainformer.data import MappedStream, WebDataset

SAMPLES = 102  # 26 micro-batches, the last with 2 samples; 9 steps, the last with 2 micro-batches
STEPS_PER_EPOCH = 9


@dataclass(frozen=True)
class Case:
    """One command. The same case always means the same training, whatever faults are injected."""

    run_dir: str | None = "run"  # None: unnamed; the library chooses a folder in runs/
    data: str = "map"  # or "stream", or "tar": WebDataset shards, or "mixture": a dataset and a stream
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
    die_at: int | tuple[str, int] | None = None  # SIGKILL at this event, see `Watch`
    failing_saves: tuple[int, ...] = ()  # saves (counted from 1) that find the disk full
    fail_in_step: int | None = None  # such a save fails only when training has reached this step
    signals: tuple[tuple[int, int], ...] = ()  # (step, signal) sent to itself just after that step

    def start(self, folder):
        """The target of a forked process: train in a folder."""
        start(self, folder)

    def differences(self, reference, other, retention=True):
        """What differs between two finished runs."""
        from harness import differences

        return differences(reference, other, retention, samples=None if self.data == "mixture" else SAMPLES)


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


class Stream(IterableDataset):
    """The same samples in a fixed order, without a length or a state."""

    def __init__(self):
        self.data = Augmented(random_too=False)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


def tar_shards(folder="shards"):
    """Images of 2 x 1 pixels in tar files, with the index of the sample as label; written once."""
    if not Path(folder).exists():
        temporary = Path(f"{folder}-{os.getpid()}")
        temporary.mkdir()
        pixels = np.random.default_rng(7).integers(0, 256, (SAMPLES, 1, 2, 3), dtype=np.uint8)
        for shard in range(4):
            with tarfile.open(temporary / f"{shard}.tar", "w") as tar:
                for index in range(shard, SAMPLES, 4):
                    png = io.BytesIO()
                    Image.fromarray(pixels[index]).save(png, "png")
                    for ending, content in (("png", png.getvalue()), ("cls", str(index).encode())):
                        member = tarfile.TarInfo(f"{index:04}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        temporary.rename(folder)
    return MappedStream(WebDataset(folder), with_noise, shuffle=20)


def with_noise(image):
    """An image with random augmentation."""
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return x + 0.1 * torch.randn(3, 1, 2) + 0.1 * float(np.random.rand()) + 0.1 * random.random()


def mixture():
    """A dataset that repeats and a stream without a state, with weights that change."""
    weights = [(0, {"repeated": 0.3, "stream": 0.7}), (12, {"repeated": 0.8, "stream": 0.2})]
    return Mixture({"repeated": Augmented(size=15), "stream": Stream()}, weights, epoch=SAMPLES)


def training_data(kind):
    """The samples of a case."""
    return {"map": Augmented, "stream": Stream, "tar": tar_shards, "mixture": mixture}[kind]()


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
        mark("step")
        x, y, index = batch if len(batch) == 3 else (batch[0].flatten(1), batch[1] % 3, batch[1])
        self.seen += index.tolist()
        time.sleep(self.case.pause)
        self.micro_batches += 1
        if self.case.block_in_step is not None and self.micro_batches == 3 * self.case.block_in_step - 1:
            block("in_step", until="release")
        if self.case.data == "mixture":
            losses = F.cross_entropy(self.model(x), y, reduction="none")
            return Loss(losses.sum(), len(losses), per_sample=losses)
        return F.cross_entropy(self.model(x), y)

    def eval_step(self, batch):
        mark("evaluation")
        x, y, _ = batch
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).float().mean()}


class Recorder:
    """Records the samples of every step (one line, one system call), then sends itself the signal of that step."""

    def __init__(self, task, path, signals=()):
        self.task, self.path, self.signals = task, path, dict(signals)

    def on_step_end(self, trainer, step, loss):
        record_samples(step, trainer.state.epoch, self.task.seen, self.path)
        self.task.seen = []
        mark("step", step)
        if step in self.signals:
            signal.raise_signal(self.signals[step])  # to this thread: handled before the next line


def record_samples(step, epoch, samples, path="samples.jsonl"):
    """Append a line, in one system call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps({"step": step, "epoch": epoch, "samples": samples}) + "\n").encode())
    os.close(descriptor)


def make_trainer(case, callbacks=()):
    """The trainer of a case, with records in the working directory."""
    task = Task(case)
    return Trainer(
        task,
        training_data(case.data),
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
        block_in_save(case.block_in_save)
    watch = Watch(Path.cwd(), case.die_at)
    before = handlers()
    try:
        make_trainer(case).fit()
    finally:
        write_end(watch, before)  # not reached by a process that is killed


def write_end(watch, handlers_before):
    """Record what a process has done."""
    end = {
        "operations": watch.counts["operation"],
        "events": watch.counts | {"seconds": time.monotonic() - watch.began},
    }
    Path("end.json").write_text(json.dumps(end | {"handlers_restored": handlers() == handlers_before}))


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
    enter(folder)
    train(case)


def enter(folder):
    """Make a forked process one that was started in a folder, with the output in a file there."""
    os.setpgid(0, 0)
    os.chdir(folder)
    # Workers must be children of the victim, as usual, not of the server that it was forked from.
    multiprocessing.set_start_method("fork", force=True)
    output = os.open("output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)


if __name__ == "__main__":
    train(Case(**json.loads(sys.argv[1])))
