"""Any value as JSON types that people can read.

Owns how a configuration looks once it leaves the process. The way is one-directional: a path becomes a string and stays
one. Arrays and tensors are recognised by their attributes, so no framework is imported.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

LARGEST_ARRAY_SHOWN = 64  # elements; of a larger array only shape and dtype are of interest to a reader


def jsonable(value: Any) -> Any:
    """A readable stand-in made of JSON types only.

    >>> from pathlib import Path
    >>> jsonable({"shape": (3, 8), "folder": Path("runs"), "act": math.tanh, "lr": float("inf")})
    {'shape': [3, 8], 'folder': 'runs', 'act': 'math.tanh', 'lr': 'inf'}
    """
    if isinstance(value, Enum):
        return str(value.value) if isinstance(value.value, str) else value.name
    if value is None or isinstance(value, bool):
        return value
    # str(), int() and float() make plain values of subclasses such as NumPy's: those are not safe to unpickle.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))  # JSON knows neither nan nor inf
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return _array(value)
    return _described(value)


def _array(array: Any) -> Any:
    small = math.prod(array.shape) <= LARGEST_ARRAY_SHOWN and not getattr(array, "is_meta", False)
    if small:
        return jsonable(array.tolist())
    return f"{type(array).__name__}(shape={tuple(array.shape)}, dtype={array.dtype})"


def _described(value: Any) -> str:
    """A name or text that is the same in every process: never one with a memory address in it."""
    if isinstance(value, functools.partial):
        return f"partial({_described(value.func)})"
    if hasattr(value, "__qualname__"):  # functions and classes
        return _dotted(value)
    text = str(value)
    return _dotted(type(value)) if callable(value) or " at 0x" in text else text


def _dotted(thing: Any) -> str:
    module = thing.__module__
    return thing.__qualname__ if module in (None, "builtins") else f"{module}.{thing.__qualname__}"
