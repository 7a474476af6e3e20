"""Helpers that the callbacks share: names of metrics, arguments worth showing, and the API of the run."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from typing import Any

from trainformer.callbacks.compat.huggingface import from_hf_name
from trainformer.core.secrets import mask

_PLAIN = (bool, int, float, str, os.PathLike, enum.Enum, type(None))


def trainer_api(trainer: Any) -> Any:
    """The API of the run (see `callbacks.base.TrainerLike`), which `hf.Trainer` keeps separate from its own names.

    A trainer of another library is returned unchanged; read its attributes with a default.
    """
    return getattr(trainer, "_handle", trainer)


def is_evaluation(logs: Mapping[str, Any]) -> bool:
    """Whether a log record holds the metrics of an evaluation.

    >>> is_evaluation({"eval_loss": 0.5, "epoch": 1.0}), is_evaluation({"loss": 0.5, "epoch": 1.0})
    (True, False)
    """
    return any(_split(name)[0] != "train" for name in logs)


def to_tags(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics under the names that transformers' TensorBoard callback writes, so that runs of both can be compared.

    >>> to_tags({"loss": 0.5, "learning_rate": 0.1, "eval_loss": 0.6})
    {'train/loss': 0.5, 'train/learning_rate': 0.1, 'eval/loss': 0.6}
    """
    return {"/".join(_split(name)): value for name, value in logs.items()}


def to_native(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics under the names of our loggers and progress bar.

    >>> to_native({"loss": 0.5, "learning_rate": 0.1, "eval_loss": 0.6})
    {'train/loss': 0.5, 'train/lr': 0.1, 'val/loss': 0.6}
    """
    return {from_hf_name(name): value for name, value in logs.items()}


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numeric values of a log record."""
    return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}


def _split(name: str) -> tuple[str, str]:
    prefix, _, rest = name.partition("_")
    return (prefix, rest) if prefix in ("eval", "test") and rest else ("train", name)


def all_arguments(args: Any) -> dict[str, Any]:
    """Every argument by name, of a dataclass or of an object with `to_dict`. Secrets are masked."""
    if callable(getattr(args, "to_dict", None)):
        return mask(args.to_dict())
    if dataclasses.is_dataclass(args):
        return mask({field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    return mask(vars(args))


def changed_arguments(args: Any, trainer: Any = None) -> dict[str, Any]:
    """Arguments (of a `trainformer.Trainer`: settings) that differ from their defaults. Secrets are masked."""
    record = args if dataclasses.is_dataclass(args) else trainer
    if not dataclasses.is_dataclass(record):
        return all_arguments(args)
    changed = {}
    for field in dataclasses.fields(record):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(record, field.name, default)
        # Datasets, models and callbacks are not settings, and comparing them may be slow or raise. The settings of a
        # trainer are its keyword-only fields.
        is_setting = field.init and (record is args or field.kw_only)
        if is_setting and is_plain(value) and (not is_plain(default) or _differs(value, default)):
            changed[field.name] = value
    return mask(changed)


def is_plain(value: Any) -> bool:
    """Whether a value can be compared and shown in one line.

    >>> is_plain({"betas": [0.9, 0.95]}), is_plain([object()])
    (True, False)
    """
    if isinstance(value, dict):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _differs(value: Any, default: Any) -> bool:
    is_normalised_none = default is None and value in ({}, [])
    return value != default and not is_normalised_none
