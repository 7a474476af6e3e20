"""What callbacks tell of a run's arguments: all of them, or those that are not the default. Tokens are never shown."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any

_HIDDEN = "<not shown>"
_PLAIN = (bool, int, float, str, os.PathLike, enum.Enum, type(None))


def all_arguments(args: Any) -> dict[str, Any]:
    """Every argument by name, of a dataclass or of anything with `to_dict`."""
    if callable(getattr(args, "to_dict", None)):
        return _without_secrets(args.to_dict())
    if dataclasses.is_dataclass(args):
        return _without_secrets({field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    return _without_secrets(vars(args))


def changed_arguments(args: Any, trainer: Any = None) -> dict[str, Any]:
    """Arguments that are not the default. Where `args` only views a trainer's settings, those of the trainer."""
    record = args if dataclasses.is_dataclass(args) else trainer
    if not dataclasses.is_dataclass(record):
        return all_arguments(args)
    changed = {}
    for field in dataclasses.fields(record):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(record, field.name, default)
        # Data, models and callbacks are no settings, and comparing them may cost much or raise. Those of a trainer are
        # its keyword-only fields.
        is_setting = field.init and (record is args or field.kw_only)
        if is_setting and is_plain(value) and (not is_plain(default) or _differs(value, default)):
            changed[field.name] = value
    return _without_secrets(changed)


def is_plain(value: Any) -> bool:
    """Whether a value can be shown in a line, and compared.

    >>> is_plain({"betas": [0.9, 0.95]}), is_plain([object()])
    (True, False)
    """
    if isinstance(value, dict):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _differs(value: Any, default: Any) -> bool:
    filled_in = default is None and value in ({}, [])  # by the record itself, to be spared asking
    return value != default and not filled_in


def _without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _HIDDEN if value and name.endswith("_token") else value for name, value in values.items()}
