"""The state of a run as one tree of tensors and plain values, in memory and as a file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainformer.backends.torch.codec import read_tensors
from trainformer.core.errors import DataError
from trainformer.session.folder import write_atomically

FORMAT = 2


def cloned(tree: Any, to_host: bool = False, seen: dict[Any, Tensor] | None = None) -> Any:
    """A copy that later steps do not change. A tensor that occurs twice (tied weights) occurs twice in the copy."""
    seen = {} if seen is None else seen
    if isinstance(tree, Tensor):
        place = (tree.device, tree.data_ptr(), tree.dtype, tuple(tree.shape), tree.stride())
        if tree.numel() == 0 or place not in seen:
            seen[place] = tree.detach().to("cpu", copy=True) if to_host else tree.detach().clone()
        return seen[place]
    if isinstance(tree, Mapping):
        return {key: cloned(value, to_host, seen) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(cloned(value, to_host, seen) for value in tree)
    return tree


def write_snapshot(path: Path, state: dict[str, Any]) -> None:
    """Write a state to a single file, all or nothing."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "components": state}, buffer)
    write_atomically(path, buffer.getvalue())


def read_snapshot(path: Path) -> dict[str, Any]:
    """Read states by component. Nothing in the file is executed: what is not tensors and plain values is refused."""
    if not path.exists():
        raise DataError(f"There is no checkpoint at {path}.")
    state = read_tensors(path)
    if not isinstance(state, dict) or "components" not in state:
        raise DataError(f"{path} is not a trainformer checkpoint. To use weights alone, load them into task.model.")
    if state["format"] > FORMAT:
        raise DataError(f"{path} was written by a newer trainformer (format {state['format']}); please upgrade.")
    return state["components"]


def check_fits(own: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    """Compare names and shapes before anything is changed, and say everything that differs."""
    missing = sorted(own.keys() - saved.keys())
    unknown = sorted(saved.keys() - own.keys())
    shapes = [
        f"{key}: {tuple(saved[key].shape)} in the checkpoint, {tuple(own[key].shape)} here"
        for key in own.keys() & saved.keys()
        if isinstance(own[key], Tensor) and isinstance(saved[key], Tensor) and own[key].shape != saved[key].shape
    ]
    problems = [
        f"{label}: {', '.join(items[:8])}{' ...' if len(items) > 8 else ''}"
        for label, items in (
            ("missing in the checkpoint", missing),
            ("unknown here", unknown),
            ("of another shape", sorted(shapes)),
        )
        if items
    ]
    if problems:
        raise DataError(f"The checkpoint's {what} does not fit. " + "; ".join(problems) + ". Nothing was loaded.")
