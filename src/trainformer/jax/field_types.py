"""The types of the fields of arguments, checked by their annotations."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from types import NoneType
from typing import Any

from trainformer.core.errors import BadArgument, expected

_WORDS = {
    str: ("a string",),
    bool: ("True", "False"),
    dict: ("a dict",),
    list: ("a list",),
    Sequence: ("a list",),
    NoneType: ("None",),
}


def check_types(arguments: Any) -> None:
    """Raise for a value that has not the type of its field. Numbers, tuples and `Any` are left to other checks."""
    for name, kinds in _kinds(type(arguments)).items():
        value = getattr(arguments, name)
        if not isinstance(value, kinds):
            *words, last = [word for kind in kinds for word in _WORDS[kind]]
            raise BadArgument(expected(f"{name} to be {', '.join(words)}{' or ' if words else ''}{last}", value))


def _kinds(cls: Any) -> dict[str, tuple[type, ...]]:
    """The types of the fields that are checked here."""
    hints, found = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        members = typing.get_args(hints[field.name]) if _is_union(hints[field.name]) else (hints[field.name],)
        kinds = tuple(typing.get_origin(member) or member for member in members)
        if field.init and all(kind in _WORDS for kind in kinds):
            found[field.name] = kinds
    return found


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, type(int | str))
