"""Every command on a run on torch and on the same run on JAX, compared with the trainers themselves."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from text_trainer_toys import make_folder, pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainformer
from trainformer import checkpoint
from trainformer.cli import main, recipes
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.builtin import builtin_arrays

TORCH = """\
trainer:
  type: trainformer.Trainer
  task: {{type: trainformer.tasks.CausalLM, model_name: {root}/model, max_length: 32, cache_dir: {root}/tokens}}
  data: {root}/train.jsonl
  val_data: {root}/val.jsonl
  run_dir: {root}/runs/torch
  max_steps: 4
  batch_size: 8
  eval_batch_size: 4
  lr: 0.01
  save_every: 2steps
  save_last: 9
  device: cpu
  precision: fp32
  log: none
"""
JAX = """\
trainer:
  type: trainformer.jax.SFTTrainer
  arguments:
    type: trainformer.jax.SFTConfig
    output_dir: {root}/runs/jax
    max_training_steps: 4
    total_batch_size: 8
    eval_batch_size: 4
    learning_rate: 0.01
    save_steps: 2
    max_sequence_length: 32
    sharding_array: [1, 1, 1, 1]
    cache_dir: {root}/tokens
    log: none
  model: {root}/model
  train_dataset: {root}/train.jsonl
  eval_dataset: {root}/val.jsonl
  mesh: {{type: text_trainer_toys.devices}}
"""
BACKENDS = ("torch", "jax")
CHAT = [{"role": "user", "content": "the red fox"}]


@dataclass
class Runs:
    root: Path
    trainers: dict[str, Any]  # rebuilt in Python, with the weights of the last checkpoint

    def __getitem__(self, backend: str) -> str:
        return str(self.root / "runs" / backend)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs by `trainformer run`, of the same model on the same data."""
    root = tmp_path_factory.mktemp("commands")
    make_folder(root / "model")
    write_lines(root / "train.jsonl", pairs())
    write_lines(root / "val.jsonl", pairs()[:6])
    write_lines(root / "other.jsonl", pairs()[6:11])
    trainers = {}
    for backend, text in (("torch", TORCH), ("jax", JAX)):
        (root / f"{backend}.yaml").write_text(text.format(root=root))
        assert main(["run", str(root / f"{backend}.yaml"), "--trust", "text_trainer_toys"]) == 0
        trainer = recipes.trainer_of(str(root / "runs" / backend), trust=("text_trainer_toys",))
        if backend == "torch":
            trainer.load(root / "runs" / backend)
        else:
            trainer._run.load(root / "runs" / backend)
        trainers[backend] = trainer
    return Runs(root, trainers)


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def metrics_of(trainer, data=None):
    """The metrics of a trainer, under the names of the log."""
    if hasattr(trainer, "fit"):
        return trainer.evaluate(data)
    return {name.replace("eval_", "val/"): value for name, value in trainer.eval().items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluate(runs, backend, capsys):
    trust = ["--trust", "text_trainer_toys"]
    found = answer(capsys, "evaluate", runs[backend], *trust)
    assert found["step"] == 4
    assert found["metrics"] == pytest.approx(metrics_of(runs.trainers[backend]), rel=1e-6)
    assert {"val/loss", "val/accuracy", "val/perplexity"} <= found["metrics"].keys()
    named = answer(capsys, "evaluate", runs[backend], *trust, "--batch-size", "3")
    assert named["metrics"] == pytest.approx(found["metrics"], rel=1e-5)
    # Other data need neither the training data nor the recipe.
    file = runs.root / ("torch.yaml", "jax.yaml")[backend == "jax"]
    recipe = Path(runs[backend], recipes.FILE)
    text = recipe.read_text()
    recipe.unlink()
    try:
        assert main(["evaluate", runs[backend]]) == 1
        assert "--data DATA" in " ".join(capsys.readouterr().err.split())
        other = answer(capsys, "evaluate", runs[backend], "--data", str(runs.root / "val.jsonl"))
    finally:
        recipe.write_text(text)
    assert file.is_file()
    assert other["metrics"] == pytest.approx(found["metrics"], rel=1e-5)
