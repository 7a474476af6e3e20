"""States as trees of tensors and plain values: copies of them, and whether one fits where another was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainformer.core.errors import DataError
from trainformer.utils.distributed import is_divided, local_parts


def cloned(tree: Any, to_host: bool = False, seen: dict[Any, Tensor] | None = None) -> Any:
    """A copy that later steps do not change. A tensor that occurs twice (tied weights) occurs twice in the copy."""
    seen = {} if seen is None else seen
    if isinstance(tree, Tensor):
        own = local_parts([tree])[0]  # of a divided tensor, which has no memory itself
        place = (own.device, own.data_ptr(), own.dtype, tuple(tree.shape), own.stride())
        if own.numel() == 0 or place not in seen:
            seen[place] = tree.detach().to("cpu", copy=True) if to_host else tree.detach().clone()
        return seen[place]
    if isinstance(tree, Mapping):
        return {key: cloned(value, to_host, seen) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(cloned(value, to_host, seen) for value in tree)
    return tree


def gathered(tree: Any) -> Any:
    """The same with whole tensors on the host instead of divided ones. Every rank must take part."""
    if is_divided(tree):
        return tree.detach().full_tensor().cpu()
    if isinstance(tree, Mapping):
        return {key: gathered(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(gathered(value) for value in tree)
    return tree


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
