"""`pip install trainformer[jax]` has no torch: training, callbacks and the command line do without it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def names_of(extra: str | None) -> set[str]:
    """The packages of an extra, with those of the extras that it includes."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    listed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    found: set[str] = set()
    for requirement in map(Requirement, listed):
        inner = [names_of(each) for each in requirement.extras] if requirement.name == "trainformer" else []
        found |= set().union(*inner) if inner else {requirement.name}
    return found


@pytest.mark.parametrize("extra", [None, "jax", "samples", "datasets", "config", "sweep", "tensorboard", "wandb"])
def test_extras_without_torch(extra):
    assert "torch" not in names_of(extra)


@pytest.mark.parametrize("extra", ["vision", "text", "hf", "adapters", "metric", "quantization", "onnx", "lm-eval"])
def test_extras_with_torch(extra):
    assert "torch" in names_of(extra)


@pytest.mark.slow
def test_training_callbacks_and_commands_without_torch():
    program = Path(__file__).with_name("training_without_torch.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.endswith("trained without torch\n")
    assert "'torch' is needed for `trainformer train`" in " ".join(done.stderr.split())
    assert "PyTorch was not found" not in done.stderr  # a warning of transformers
