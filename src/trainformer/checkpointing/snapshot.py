"""The state of a run as one file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from trainformer.core.errors import DataError
from trainformer.utils.files import write_atomically
from trainformer.utils.tensor_files import read_tensors

FORMAT = 2


def write_snapshot(path: Path, state: dict[str, Any], of_ranks: list[dict[str, Any]] | None = None) -> None:
    """Write a state to a single file, all or nothing. `of_ranks`: components that each rank has for itself."""
    buffer = io.BytesIO()
    several = {"of_ranks": of_ranks} if of_ranks is not None and len(of_ranks) > 1 else {}
    torch.save({"format": FORMAT, "components": state, **several}, buffer)
    write_atomically(path, buffer.getvalue())


def read_snapshot(path: Path, rank: int = 0) -> dict[str, Any]:
    """Read states by component, as a rank wants them. What is not tensors and plain values is refused."""
    if not path.exists():
        raise DataError(f"There is no checkpoint at {path}.")
    state = read_tensors(path)
    if not isinstance(state, dict) or "components" not in state:
        raise DataError(f"{path} is not a trainformer checkpoint. To use weights alone, load them into task.model.")
    if state["format"] > FORMAT:
        raise DataError(f"{path} was written by a newer trainformer (format {state['format']}); please upgrade.")
    components, of_ranks = state["components"], state.get("of_ranks")
    if rank == 0:
        return components
    # Two ranks with the same random numbers would drop out the same: what a rank had not then begins anew.
    own = of_ranks[rank] if of_ranks is not None and rank < len(of_ranks) else {}
    of_one_rank = {"rng"} if of_ranks is None else of_ranks[0].keys()
    return {key: value for key, value in components.items() if key not in of_one_rank} | own
