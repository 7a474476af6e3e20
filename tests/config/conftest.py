"""A small project in the current folder: the package `lab`, whose objects remember their arguments."""

import importlib
import sys
from pathlib import Path

import pytest

LAB = '''
import os
import subprocess
from builtins import eval
from os import system

import torch

BUILT = []


class Thing:
    """Takes anything."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        BUILT.append(self)


class Sly:
    @property
    def door(self):
        BUILT.append("opened")
        return Thing


sly = Sly()


class Net:
    """Has a fixed signature."""

    def __init__(self, hidden_size, depth=2, head=None):
        self.hidden_size, self.depth, self.head = hidden_size, depth, head

    @classmethod
    def wide(cls, depth=1):
        return cls(1024, depth)


class Base:
    """As if it were of another package."""

    @classmethod
    def from_pretrained(cls, name):
        return cls, name

    @classmethod
    def register(cls, name): ...

    def save_pretrained(self, folder): ...


for method in (Base.from_pretrained.__func__, Base.register.__func__, Base.save_pretrained):
    method.__module__ = "transformers.modeling_utils"


class Pretrained(Base): ...


class Trainer:
    def __init__(self, model_cfg, *, optimizer_cfg, max_steps=3):
        self.model_cfg, self.optimizer_cfg, self.max_steps = model_cfg, optimizer_cfg, max_steps

    def train(self):
        print("trained", self.max_steps)


class Broken:
    def __init__(self, size=1):
        raise RuntimeError("no such size")


def job(n=1):
    print("job", n)
    return n
'''


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """The module, found from the current folder, whose settings trust it."""
    Path("pyproject.toml").write_text('[tool.trainformer]\ntrust = ["lab"]\n')
    Path("lab").mkdir()
    Path("lab/__init__.py").write_text(LAB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lab", raising=False)
    yield importlib.import_module("lab")
    del sys.modules["lab"]


@pytest.fixture
def write():
    """Write a file below the current folder; its name."""

    def written(text, name="run.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return written
