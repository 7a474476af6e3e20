"""The state of a run as one file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from trainformer.backends.torch.codec import read_tensors
from trainformer.core.errors import DataError
from trainformer.session.folder import write_atomically

FORMAT = 2


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
