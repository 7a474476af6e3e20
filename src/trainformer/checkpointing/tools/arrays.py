"""Arrays of runs on JAX, as the tools for checkpoints know weights. jax is imported only when there are some."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import DataError
from trainformer.core.optional import require

STATE = "state"
_PARAMS = "params/"
_KIND = re.compile(r"(\w+)\[([\d, ]*)\]")


def read_arrays(folder: Path) -> dict[str, Any]:
    """Everything in the state of a run on JAX by name, as tensors."""
    require("orbax.checkpoint", "jax", "to read a checkpoint of a run on JAX")
    from trainformer.checkpointing.orbax_files import read_arrays

    return {name: _tensor(array) for name, array in read_arrays(folder).items()}


def parameters_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are the model's."""
    return {name.removeprefix(_PARAMS): value for name, value in state.items() if name.startswith(_PARAMS)}


def counts_of(folder: Path) -> Counter[str]:
    """How many numbers of which type the model has, from the list beside the arrays alone."""
    counts: Counter[str] = Counter()
    try:
        leaves = json.loads((folder / "leaves.json").read_bytes())["leaves"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder} is missing or damaged. ({error}) See what `verify` says.") from error
    for name, kind in leaves.items():
        match = _KIND.fullmatch(kind)
        if name.startswith(_PARAMS) and match is not None:
            counts[match[1]] += prod(int(size) for size in match[2].split(",") if size.strip())
    return counts


def _tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":  # NumPy knows it only by name
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    if array.dtype == np.uint32:  # random keys; torch computes little with these
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(np.array(array))
