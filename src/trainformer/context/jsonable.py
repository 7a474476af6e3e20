"""Converts any value to readable JSON types, for configurations, metrics files, logging services and the CLI.

The conversion is one-way: a path becomes a string and stays one. Arrays and tensors are recognised by their
attributes, so no framework is imported.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any

LARGEST_ARRAY_SHOWN = 64  # elements; larger arrays are shown as shape and dtype


def jsonable(value: Any) -> Any:
    """The value in JSON types only: dicts, lists, strings, finite numbers, booleans and None.

    NaN and infinities become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, since JSON has no numbers for
    them and strict parsers refuse the bare words; `float` reads all three back.

    >>> from pathlib import Path
    >>> jsonable({"shape": (3, 8), "folder": Path("runs"), "act": math.tanh, "lr": float("inf")})
    {'shape': [3, 8], 'folder': 'runs', 'act': 'math.tanh', 'lr': 'Infinity'}
    """
    if value is None or type(value) in (str, int, bool):  # first, for speed
        return value
    if isinstance(value, Enum):
        return str(value.value) if isinstance(value.value, str) else value.name
    # str(), int() and float() convert subclasses such as NumPy's, which are not safe to unpickle.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return float(value) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [jsonable(item) for item in value]
    if isinstance(value, Set):
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return _array(value)
    return _describe(value)


def _array(array: Any) -> Any:
    if math.prod(array.shape) <= LARGEST_ARRAY_SHOWN and not getattr(array, "is_meta", False):
        return jsonable(array.tolist())
    return f"{type(array).__name__}(shape={tuple(array.shape)}, dtype={array.dtype})"


def _describe(value: Any) -> str:
    """A name or text that is the same in every process: never one with a memory address."""
    if isinstance(value, functools.partial):
        return f"partial({_describe(value.func)})"
    if hasattr(value, "__qualname__"):  # functions and classes
        return _dotted_name(value)
    text = str(value)
    return _dotted_name(type(value)) if callable(value) or " at 0x" in text else text


def _dotted_name(value: Any) -> str:
    module = value.__module__
    return value.__qualname__ if module in (None, "builtins") else f"{module}.{value.__qualname__}"
