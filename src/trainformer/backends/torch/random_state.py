"""All random generators of a process, in and out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_random() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators, of plain types only (readable with `weights_only`)."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    """Put the generators back. CUDA states of devices that are not here are left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for index, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda.cpu(), index)
