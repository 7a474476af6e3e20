"""Training state: copying and comparing trees of tensors, and the state of all random number generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainformer.backends.torch.placement import map_tensors
from trainformer.core.errors import DataError
from trainformer.utils.distributed import is_dtensor, local_tensors


def cloned(tree: Any, to_host: bool = False) -> Any:
    """A copy that later steps do not change. Tensors that share memory (tied weights) still share it in the copy."""
    seen: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        own = local_tensors([tensor])[0]  # a DTensor has no memory of its own
        place = (own.device, own.data_ptr(), own.dtype, tuple(tensor.shape), own.stride())
        if own.numel() == 0 or place not in seen:
            seen[place] = tensor.detach().to("cpu", copy=True) if to_host else tensor.detach().clone()
        return seen[place]

    return map_tensors(copy, tree)


def gathered(tree: Any) -> Any:
    """The same tree with full tensors on the host in place of DTensors. A collective: every rank must call it."""
    return map_tensors(lambda t: t.detach().full_tensor().cpu() if is_dtensor(t) else t, tree)  # type: ignore[attr-defined]


def check_fits(own: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    """Compare names and shapes before anything is changed; the error lists every difference."""
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


def capture_random() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators, in plain types only (loads with `weights_only=True`)."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    """Restore the generators. States of CUDA devices that this machine lacks are ignored."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for index, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda.cpu(), index)
