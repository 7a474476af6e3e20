"""A mini trainer to be killed, with all the randomness that could break an exact resume."""

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

sys.path[:0] = [str(Path(__file__).parents[1] / "faults"), str(Path(__file__).parent)]

from victim import count_operations, handlers  # noqa: E402

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
    die_at: int | None = None  # end by SIGKILL at this file operation
    signals: tuple[tuple[int, int], ...] = ()  # (step, signal) that the process gets just after that step


class Augmented(Dataset):
    """Samples with random augmentation."""

    def __len__(self):
        return 26

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=g)
        return x + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()) + 0.1 * random.random(), x[:3].argmax()


class Signals(BaseHook):
    """Sends signals to the process."""

    def __init__(self, signals):
        self.signals = dict(signals)

    def on_after_step(self, trainer):
        if trainer.step in self.signals:
            os.kill(os.getpid(), self.signals[trainer.step])


class Victim(BaseTrainer):
    """Dropout, batch norm, fp16 with a scaler, accumulation that does not divide an epoch, a schedule, EMA."""

    def __init__(self, case):
        self.case = case
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
        return [Signals(case.signals), checkpoints, LoggingHook(interval=3), EmaHook(decay=0.9)]

    def forward(self, input):
        x, y = input
        logits = self.model(x)
        return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(-1) == y).float().mean()}

    def log(self, records, dry_run=False):
        line = {"step": self.step, **{k: v for k, v in records.items() if not k.endswith("_time")}}
        with Path("records.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(case):
    torch.set_num_threads(1)
    seed_everything(case.seed)
    operations, before = count_operations(Path.cwd(), case.die_at), handlers()
    try:
        trainer = Victim(case)
        trainer.train()
        torch.save(trainer.state_dict(), "end.pt")
    finally:  # not reached by who is killed
        Path("end.json").write_text(
            json.dumps({"operations": operations[0], "handlers_restored": handlers() == before})
        )


def start(case, folder):
    """The main function of a process: train in a folder, with output to a file."""
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    train(case)
