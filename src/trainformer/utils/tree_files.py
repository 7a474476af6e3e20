"""Trees of plain values and NumPy arrays in files: JSON, plus an .npz for arrays. Reading executes no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.files import check_archive, decode_json

_ARRAY = "__array__"


def write_tree(folder: Path, stem: str, tree: Any) -> list[str]:
    """Write a tree; returns the names of its files. Tuples are read back as lists."""
    arrays: dict[str, np.ndarray] = {}
    content = _extract_arrays(tree, stem, arrays)
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=2))
    if not arrays:
        return [f"{stem}.json"]
    np.savez(folder / f"{stem}.npz", **arrays)  # type: ignore[arg-type]
    return [f"{stem}.json", f"{stem}.npz"]


def read_tree(folder: Path, names: list[str]) -> Any:
    """Read what `write_tree` wrote."""
    path = folder / next(name for name in names if name.endswith(".json"))
    try:
        content = decode_json(path.read_text())
        array_files = [name for name in names if name.endswith(".npz")]
        if not array_files:
            return content
        check_archive(folder / array_files[0])
        with np.load(folder / array_files[0], allow_pickle=False) as arrays:
            return _insert_arrays(content, arrays)
    except DataError:
        raise
    except Exception as error:  # NumPy raises anything: BadZipFile, TokenError, MemoryError, ...
        raise DataError(f"{path} cannot be read: it is damaged. ({error})") from error


def read_array(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """Read a ``.npy`` file; whatever is wrong with it is a `DataError`."""
    try:
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except Exception as error:  # as above
        raise DataError(f"{path} cannot be read as an array: it is damaged. ({error})") from error


def _extract_arrays(tree: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise BadArgument(expected(f"strings as keys of {name}, to write it to a checkpoint", list(tree)[:3]))
        return {key: _extract_arrays(value, f"{name}.{key}", arrays) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_extract_arrays(value, f"{name}.{index}", arrays) for index, value in enumerate(tree)]
    if hasattr(tree, "__array__"):
        array = np.asarray(tree)
        if array.dtype.kind in "biuf":
            arrays[str(len(arrays))] = array
            return {_ARRAY: str(len(arrays) - 1)}
    what = f"{name} to hold plain values and arrays, to write it to a checkpoint"
    raise BadArgument(expected(what, type(tree).__name__, "Let state_dict() return plain values."))


def _insert_arrays(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_ARRAY}:
            return arrays[tree[_ARRAY]]
        return {key: _insert_arrays(value, arrays) for key, value in tree.items()}
    return [_insert_arrays(value, arrays) for value in tree] if isinstance(tree, list) else tree
