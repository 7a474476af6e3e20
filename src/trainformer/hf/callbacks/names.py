"""Names of metrics: those that HuggingFace's callbacks are told, in the words of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainformer.callbacks.compat.huggingface import our_name

_EVALUATIONS = ("eval", "test")


def is_evaluation(logs: Mapping[str, Any]) -> bool:
    """Whether a record is that of an evaluation.

    >>> is_evaluation({"eval_loss": 0.5, "epoch": 1.0}), is_evaluation({"loss": 0.5, "epoch": 1.0})
    (True, False)
    """
    return any(_split(name)[0] != "train" for name in logs)


def as_tags(logs: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers' TensorBoard callback writes them, so that runs of both lie over each other.

    >>> as_tags({"loss": 0.5, "learning_rate": 0.1, "eval_loss": 0.6})
    {'train/loss': 0.5, 'train/learning_rate': 0.1, 'eval/loss': 0.6}
    """
    return {"/".join(_split(name)): value for name, value in logs.items()}


def as_native(logs: Mapping[str, Any]) -> dict[str, Any]:
    """As our own loggers and the progress bar know them.

    >>> as_native({"loss": 0.5, "learning_rate": 0.1, "eval_loss": 0.6})
    {'train/loss': 0.5, 'train/lr': 0.1, 'val/loss': 0.6}
    """
    return {our_name(name): value for name, value in logs.items()}


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """What of a record is a number."""
    return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}


def _split(name: str) -> tuple[str, str]:
    kind, _, rest = name.partition("_")
    return (kind, rest) if kind in _EVALUATIONS and rest else ("train", name)
