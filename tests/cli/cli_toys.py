"""A user's own task, found by `--task=cli_toys:Fit`, and helpers to call the commands."""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from trainformer.adapters import LoRA
from trainformer.cli.app import find_command


@dataclass(eq=False)
class Fit:
    """Fits a plane. The name of the data is the number of samples."""

    width: int = 4  # of the hidden layer
    bias: bool = True
    pause: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.model = nn.Sequential(nn.Linear(2, self.width, bias=self.bias), nn.Tanh(), nn.Linear(self.width, 1))

    def load_data(self, path):
        x = torch.randn(int(path), 2, generator=torch.Generator().manual_seed(int(path)))
        return TensorDataset(x, x.sum(-1, keepdim=True))

    def train_step(self, batch):
        time.sleep(self.pause)
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def eval_step(self, batch):
        return {"loss": self.train_step(batch)}


@dataclass(eq=False)
class Clash(Fit):
    """Has field names that the trainer and the adapter have too."""

    lr: float = 3.0
    dropout: float = 0.5
    adapter: LoRA | None = None


@dataclass(eq=False)
class Idle(Fit):
    """Has a parameter that gets no gradient."""

    def __post_init__(self):
        super().__post_init__()
        self.model.register_parameter("idle", nn.Parameter(torch.zeros(3)))


class Plain(Fit):
    """Has its own `__init__` with some untyped parameters."""

    def __init__(self, kind, depth=2, *, rate: float, names: "list[str] | None" = None):
        super().__init__()
        self.kind, self.depth, self.rate, self.names = kind, depth, rate, names


def last_weights(run):
    """The weights of a run's newest checkpoint."""
    return load_file(sorted(Path("runs", run, "checkpoints").glob("step_*"))[-1] / "model.safetensors")


def parsed(*words):
    """The call of the trainer that `trainformer train` builds from its arguments."""
    train = find_command("train")
    parser = argparse.ArgumentParser(prog="trainformer train")
    train.add_arguments(parser)
    return train.parse(parser, words).config["trainer"]
