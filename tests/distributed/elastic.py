"""A run of several processes that a test kills, stops, and resumes with another world size.

    python elastic.py FOLDER [--kill RANK:STEP] [--signal RANK:STEP] [--fail RANK:STEP] [--strategy NAME] [--steps N]

Every rank writes which samples it trained on, step by step, to FOLDER/seen-<number>.jsonl; what it was left with goes
to FOLDER/end-<world>-<rank>.pt.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainformer import Trainer
from trainformer.distributed import Launch

SAMPLES, BATCH, EPOCHS = 50, 12, 4


class Noisy:
    """Random numbers in every step: they belong to a rank, and must come back with it."""

    def __init__(self, dropout):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)).double()
        self.seen = []

    def train_step(self, batch):
        x, y, number = batch
        self.seen += number.tolist()
        return F.cross_entropy(self.model(x), y)

    def eval_step(self, batch):
        x, y, _ = batch
        return {"loss": F.cross_entropy(self.model(x), y)}


class Diary:
    """Writes down what every step saw; plays the accidents."""

    def __init__(self, folder, options, rank):
        self.path = folder / f"seen-{len(list(folder.glob('seen-*')))}-{rank}-{os.getpid()}.jsonl"
        self.folder = folder
        self.accidents = {name: getattr(options, name) for name in ("kill", "signal", "fail")}
        self.rank = rank

    def on_epoch_begin(self, trainer, epoch):
        self.epoch = epoch

    def on_step_end(self, trainer, step, loss):
        line = {"epoch": self.epoch, "step": step, "samples": trainer.task.seen, "loss": float(loss)}
        trainer.task.seen = []
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for name, place in self.accidents.items():
            if place == f"{self.rank}:{step}" and not (self.folder / f"had-{name}").exists():
                (self.folder / f"had-{name}").touch()
                getattr(self, name)()

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def signal(self):
        os.kill(os.getpid(), signal.SIGTERM)

    def fail(self):
        raise ValueError("this rank has had enough")


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("--kill", "--signal", "--fail"):
        parser.add_argument(name)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args(arguments)
    launch = Launch.find()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, x[:, :3].argmax(-1), torch.arange(SAMPLES))
    task = Noisy(options.dropout)
    trainer = Trainer(
        task,
        data,
        TensorDataset(*data[:7]),
        epochs=EPOCHS,
        batch_size=BATCH,
        lr=0.01,
        log_every=3,
        save_every=2,
        save_last=2,
        save_best=0,
        run_dir=options.folder / "run",
        strategy=options.strategy,
        device="cpu",
        precision="no",
        rank_timeout=600.0,
        callbacks=[Diary(options.folder, options, launch.rank)],
    )
    trainer.fit()
    history = [[record["step"], record["train/loss"]] for record in trainer.state.log_history if "train/loss" in record]
    end = {"model": task.model.state_dict(), "history": torch.tensor(history), "step": trainer.state.step}
    torch.save(end, options.folder / f"end-{launch.world_size}-{launch.rank}.pt")


if __name__ == "__main__":
    main()
