"""The types of the fields of arguments, checked by their annotations."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from trainformer.core.errors import BadArgument, expected

_WORDS = {str: ("a string",), bool: ("True", "False"), dict: ("a dict",), list: ("a list",), NoneType: ("None",)}
_ACCEPTED: dict[Any, tuple[type, ...]] = {dict: (Mapping,), list: (list, tuple)}


def check_types(arguments: Any) -> None:
    """Raise for a value that has not the type of its field. Numbers, tuples and `Any` are left to other checks.

    The `do` in the metadata of a field is what to do instead.
    """
    hints = typing.get_type_hints(type(arguments))
    for field in dataclasses.fields(arguments):
        kinds, value = _kinds(hints[field.name]), getattr(arguments, field.name)
        if not field.init or not all(kind in _WORDS for kind in kinds):
            continue
        if not isinstance(value, tuple(part for kind in kinds for part in _ACCEPTED.get(kind, (kind,)))):
            *words, last = [word for kind in kinds for word in _WORDS[kind]]
            what = f"{field.name} to be {', '.join(words)}{' or ' if words else ''}{last}"
            raise BadArgument(expected(what, value, field.metadata.get("do", "")))


def _kinds(hint: Any) -> list[Any]:
    """The types that an annotation names."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    kinds = [typing.get_origin(member) or member for member in members]
    return [list if kind is Sequence else kind for kind in kinds]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, type(int | str))
