"""Compares the first step of a trainer on JAX with that of the torch task: loss, metrics and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict

from trainformer.models.jax.huggingface import flat_params, load_model

LEARNING_RATE = 0.1
ONE_STEP = {
    "max_steps": 1,
    "logging_steps": 1,
    "optimizer": "sgd",
    "learning_rate": LEARNING_RATE,
    "max_grad_norm": None,
}
ON_TORCH = {"max_steps": 1, "log_every": 1, "lr": LEARNING_RATE, "gradient_clip": None}
_OF_THE_RUN = ("lr", "epoch", "samples", "second", "tokens", "memory", "wait", "grad_norm", "recompil", "blocked")

# Parameters of both sides, which have no norm or rotation between them and the loss in common.
WEIGHTS = {
    "layers/attention/v_proj/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/mlp/up_proj/kernel": "model.layers.{}.mlp.up_proj.weight",
    "embed_tokens/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
}


def metrics_of(trainer: Any, prefix: str = "train/") -> dict[str, float]:
    """What was logged about the first step, without what describes the run itself."""
    found: dict[str, float] = {}
    for record in trainer.state.log_history:
        found |= {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if not any(word in name for word in _OF_THE_RUN)}


def assert_same_metrics(mine: dict[str, float], wanted: dict[str, float], tolerance: float = 1e-5) -> None:
    assert "loss" in mine
    assert mine.keys() == wanted.keys()
    for name, value in wanted.items():
        assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def assert_same_gradients(trained: Any, before: Any, on_torch: Any, extra: dict[str, str] | None = None) -> None:
    """Gradients of one SGD step, from the weights before and after it. `on_torch` is torch's model after it."""
    after, start = flatten_dict(trained.params, sep="/"), flat_params(load_model(before))
    torch_before = {name: value.numpy() for name, value in _state_dict(before, on_torch).items()}
    torch_after = {name: value.detach().numpy() for name, value in on_torch.state_dict().items()}
    largest = 0.0
    for path, name in {**WEIGHTS, **(extra or {})}.items():
        mine = (np.asarray(start[path]) - np.asarray(after[path])) / LEARNING_RATE
        layers = range(len(mine)) if "{}" in name else [None]
        for layer in layers:
            key = name if layer is None else name.format(layer)
            wanted = (torch_before[key] - torch_after[key]) / LEARNING_RATE
            wanted = wanted.T if path.endswith("kernel") else wanted
            # Differences of weights of about 1 have steps of 1e-7.
            np.testing.assert_allclose(mine if layer is None else mine[layer], wanted, atol=2e-5, err_msg=key)
            largest = max(largest, float(np.abs(wanted).max()))
    assert largest > 1e-3  # there is a gradient


def _state_dict(folder: Any, like: Any) -> Any:
    return type(like).from_pretrained(folder, dtype=torch.float32).state_dict()
