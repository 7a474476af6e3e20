"""The structure of a sample or a batch in a few words, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 8  # parts of a batch that are listed


def shape_of(data: Any) -> str:
    """The types and shapes in a nested sample or batch, of any framework.

    >>> import numpy as np
    >>> shape_of((np.zeros((8, 4), np.float32), np.zeros(8, np.int64)))
    'a tuple of (float32 [8, 4], int64 [8])'
    >>> shape_of({"text": ["a", "b"]})
    "a dict of {'text': a list of 2 str}"
    """
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
    kind = type(data).__name__
    if isinstance(data, Mapping):
        return f"a {kind} of {{{', '.join(f'{k!r}: {shape_of(v)}' for k, v in list(data.items())[:_MOST])}}}"
    if isinstance(data, (list, tuple)):
        kinds = sorted({type(part).__name__ for part in data})
        plain = not any(hasattr(part, "shape") or isinstance(part, (Mapping, list, tuple)) for part in data)
        if len(data) > _MOST or (plain and len(kinds) == 1):
            return f"a {kind} of {len(data)} {' and '.join(kinds)}"
        return f"a {kind} of ({', '.join(map(shape_of, data))})"
    return kind
