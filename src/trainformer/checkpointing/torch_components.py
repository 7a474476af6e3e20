"""Components as files, each in its format. Reading executes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.sharded_state import ShardedState, write_sharded
from trainformer.utils.tensor_files import read_tensors, read_weights, write_tensors, write_weights


def write_part(folder: Path, stem: str, state: Any, process_group: TorchProcessGroup) -> list[str]:
    """Write what this rank holds of a component whose format is ``sharded``; the names of its files."""
    try:
        return write_sharded(folder, stem, state, process_group)
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"writing {folder / stem} failed: {error}") from error


def write_component(folder: Path, stem: str, format: str, state: Any) -> list[str]:
    """Write one component; the names of its files. Whatever a full disk makes of it is an `OSError`."""
    try:
        if format == "weights":
            return write_weights(folder, stem, state)
        if format == "tensors":
            return write_tensors(folder, stem, state)
    except (SafetensorError, RuntimeError) as error:
        # Both libraries hide the system's error behind one of their own.
        raise OSError(f"writing {folder / stem} failed: {error}") from error
    if format == "json":
        (folder / f"{stem}.json").write_text(json.dumps(state, indent=2))
        return [f"{stem}.json"]
    raise BadArgument(expected("a component's format to be 'weights', 'tensors' or 'json'", format))


def read_component(folder: Path, names: list[str], format: str) -> Any:
    """Read one component back."""
    if format == "sharded":
        return ShardedState(folder, names)
    if format == "weights":
        return read_weights(folder, names)
    if format == "tensors":
        return read_tensors(folder / names[0])
    try:
        return json.loads((folder / names[0]).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / names[0]} cannot be read as JSON: it is damaged. ({error})") from error
