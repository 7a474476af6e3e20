"""A mini trainer to be killed, with all the randomness that could break an exact resume."""

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

sys.path[:0] = [str(Path(__file__).parents[1] / "faults"), str(Path(__file__).parent)]

from harness import compare_states, trained_on, without_clock  # noqa: E402
from victim import enter, handlers, record_samples, write_end  # noqa: E402

from file_operations import Watch, block_in_save, mark  # noqa: E402
from trainformer import seed_everything  # noqa: E402
from trainformer.mini import BaseHook, BaseTrainer, CheckpointingHook, EmaHook, LoggingHook  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One command and its faults."""

    max_steps: int = 22
    interval: int = 4
    exit_code: int | str = "128+signal"
    keep_previous: int | None = 2
    seed: int = 8
    pause: float = 0.0  # extra seconds per step
    block_in_save: tuple[int, int] | None = None  # (save, fsync): block there until killed
    die_at: int | tuple[str, int] | None = None  # end by SIGKILL at this event, see `Watch`
    signals: tuple[tuple[int, int], ...] = ()  # (step, signal) that the process gets just after that step
    syncs = 1  # fsyncs in a save: it is a single file

    def start(self, folder):
        """The target of a forked process: train in a folder."""
        start(self, folder)

    def differences(self, reference, other, retention=True):
        """What differs between two finished runs."""
        (ours, our_records), (theirs, their_records) = ending(reference), ending(other)
        found = compare_states(ours, theirs) + ([] if our_records == their_records else ["records"])
        found += [] if trained_on(reference) == trained_on(other) else ["a step was trained on different samples"]
        kept = [sorted(p.name for p in (folder / "ws/checkpoints").iterdir()) for folder in (reference, other)]
        return found + ([] if kept[0] == kept[1] or not retention else [f"files: {kept[0]} and {kept[1]}"])


class Augmented(Dataset):
    """Samples with random augmentation."""

    def __len__(self):
        return 26

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=g)
        return x + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()) + 0.1 * random.random(), x[:3].argmax(), index


class Signals(BaseHook):
    """Sends signals to the process."""

    def __init__(self, signals):
        self.signals = dict(signals)

    def on_after_step(self, trainer):
        record_samples(trainer.step, 0, trainer.seen)
        trainer.seen = []
        mark("step", trainer.step)
        if trainer.step in self.signals:
            os.kill(os.getpid(), self.signals[trainer.step])


class Evaluates(BaseHook):
    """Evaluates every three steps, on data that are augmented at random, and remembers the best result."""

    best = -1.0

    def on_after_step(self, trainer):
        if trainer.step % 3:
            return
        trainer.model.eval()
        right = 0
        with torch.no_grad():
            for x, y, _ in DataLoader(Augmented(), batch_size=13):
                mark("evaluation")
                right += int((trainer.model(x).argmax(-1) == y).sum())
        trainer.model.train()
        mark("step")
        self.best = max(self.best, right / 26)

    def on_state_dict(self, trainer, state_dict):
        state_dict["best"] = self.best

    def on_load_state_dict(self, trainer, state_dict):
        self.best = state_dict["best"]


class Victim(BaseTrainer):
    """Dropout, batch norm, fp16 with a scaler, accumulation that does not divide an epoch, a schedule, EMA."""

    def __init__(self, case):
        self.case, self.seen = case, []
        super().__init__(
            case.max_steps,
            grad_clip=1.0,
            mixed_precision="fp16",
            gradient_accumulation_steps=3,
            workspace="ws",
            device="cpu",
        )

    def build_data_loader(self):
        return DataLoader(Augmented(), batch_size=4, shuffle=True)

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=self.case.max_steps + 1)

    def build_hooks(self):
        # The checkpoint is asked for before the average has moved: it must hold the average all the same.
        case = self.case
        checkpoints = CheckpointingHook(case.interval, keep_previous=case.keep_previous, exit_code=case.exit_code)
        return [Signals(case.signals), checkpoints, LoggingHook(interval=3), EmaHook(decay=0.9), Evaluates()]

    def forward(self, input):
        mark("step")
        time.sleep(self.case.pause)
        x, y, index = input
        self.seen += index.tolist()
        logits = self.model(x)
        return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(-1) == y).float().mean()}

    def log(self, records, dry_run=False):
        line = {"step": self.step, **{k: v for k, v in records["train"].items() if not k.endswith("_time")}}
        with Path("records.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(case):
    torch.set_num_threads(1)
    seed_everything(case.seed)
    if case.block_in_save is not None:
        block_in_save(case.block_in_save)
    watch, before = Watch(Path.cwd(), case.die_at), handlers()
    try:
        trainer = Victim(case)
        trainer.train()
        torch.save(trainer.state_dict(), "end.pt")
    finally:  # not reached by who is killed
        write_end(watch, before)


def start(case, folder):
    """The main function of a process: train in a folder, with output to a file."""
    enter(folder)
    train(case)


def ending(folder):
    """The final state and records of a run, without timings."""
    state = {key: strip_times(value) for key, value in torch.load(folder / "end.pt").items() if key != "context"}
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return without_clock(state), {line["step"]: line for line in lines}


def strip_times(tree):
    if isinstance(tree, dict):
        return {k: strip_times(v) for k, v in tree.items() if not str(k).endswith("_time")}
    return [strip_times(item) for item in tree] if isinstance(tree, list) else tree
