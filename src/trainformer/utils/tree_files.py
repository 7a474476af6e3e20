"""Trees of plain values and arrays of the host in files: JSON, with arrays beside it. Reading executes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected

_ARRAY = "__array__"


def write_tree(folder: Path, stem: str, tree: Any) -> list[str]:
    """Write a tree; the names of its files. Tuples come back as lists."""
    arrays: dict[str, np.ndarray] = {}
    content = _plain(tree, stem, arrays)
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=2))
    if not arrays:
        return [f"{stem}.json"]
    np.savez(folder / f"{stem}.npz", **arrays)  # type: ignore[arg-type]
    return [f"{stem}.json", f"{stem}.npz"]


def read_tree(folder: Path, names: list[str]) -> Any:
    """Read it back."""
    text = next(name for name in names if name.endswith(".json"))
    try:
        content = json.loads((folder / text).read_text())
        beside = [name for name in names if name.endswith(".npz")]
        if not beside:
            return content
        with np.load(folder / beside[0], allow_pickle=False) as arrays:
            return _filled(content, arrays)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder / text} cannot be read: it is damaged. ({error})") from error


def _plain(tree: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise BadArgument(expected(f"names as keys of {name}, to write it to a checkpoint", list(tree)[:3]))
        return {key: _plain(value, f"{name}.{key}", arrays) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_plain(value, f"{name}.{place}", arrays) for place, value in enumerate(tree)]
    if hasattr(tree, "__array__"):
        array = np.asarray(tree)
        if array.dtype.kind in "biuf":
            arrays[str(len(arrays))] = array
            return {_ARRAY: str(len(arrays) - 1)}
    what = f"{name} to hold plain values and arrays, to write it to a checkpoint"
    raise BadArgument(expected(what, type(tree).__name__, "Let state_dict() return plain values."))


def _filled(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_ARRAY}:
            return arrays[tree[_ARRAY]]
        return {key: _filled(value, arrays) for key, value in tree.items()}
    return [_filled(value, arrays) for value in tree] if isinstance(tree, list) else tree
