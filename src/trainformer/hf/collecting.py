"""Predictions of an evaluation: nested outputs of batches, collected on the host and joined to arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainformer.utils.distributed import is_padding

PAD_INDEX = -100
KINDS = ("logits", "labels", "inputs", "losses")


class Predictions:
    """Outputs of an evaluation by kind: logits, labels, and inputs and losses if `compute_metrics` wants them.

    The nesting of tuples, lists and dicts is kept. Tensors of different lengths are padded with -100. If `concat` is
    false, the batches stay apart, and an array of each is returned in a list.
    """

    def __init__(self, concat: bool = True) -> None:
        self.concat = concat
        self._batches: dict[str, list[Any]] = {kind: [] for kind in KINDS}

    def add(self, **outputs: Any) -> None:
        """Add the outputs of a batch. The padding of a rank without samples is left out."""
        for kind, value in outputs.items():
            if value is not None:
                host = map_tensors(_to_host, value)
                self._batches[kind].append(map_tensors(lambda t: t[:0], host) if is_padding() else host)

    def gather(self, all_gather: Callable[[Any], list[Any]]) -> None:
        """Combine the batches of all ranks, in input order: those of rank 0, rank 1, ... for each global batch."""
        ranks = all_gather(self._batches)
        for kind in KINDS:
            parts = zip(*(one[kind] for one in ranks), strict=True)
            self._batches[kind] = [join(list(batch)) for batch in parts]

    def arrays(self, kind: str) -> Any:
        """Numpy arrays of all samples (or a list of them, one per batch), nested like the outputs; None if empty."""
        batches = self._batches[kind]
        if not batches:
            return None
        if not self.concat:
            return [map_tensors(_to_numpy, batch) for batch in batches]
        return map_tensors(_to_numpy, join(batches))


class EvalScope:
    """One evaluation: what is collected in it, and how much was evaluated so far."""

    def __init__(
        self,
        loss_only: bool,
        ignore_keys: Any = None,
        concat: bool = True,
        keeps: bool = True,
        on_batch: Callable[..., None] | None = None,
    ) -> None:
        self.loss_only = loss_only
        self.ignore_keys = ignore_keys
        self.predictions = Predictions(concat)
        self.batches = self.samples = 0
        self._keeps = keeps
        self._on_batch = on_batch

    def count(self, samples: int) -> None:
        """Count a batch."""
        self.batches += 1
        self.samples += samples

    def add(self, **outputs: Any) -> None:
        """Collect the outputs of a batch, and pass them to `on_batch`."""
        if self._on_batch is not None:
            self._on_batch(**outputs)
        if self._keeps:
            self.predictions.add(**outputs)


def join(pieces: list[Any]) -> Any:
    """Concatenate nested outputs of batches, which all have the same nesting."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return _concatenate(pieces)
    if isinstance(first, Mapping):
        return {name: join([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, (tuple, list)):
        parts = [join([piece[i] for piece in pieces]) for i in range(len(first))]
        return parts if isinstance(first, list) else tuple(parts)
    return first


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to all tensors of a nested value."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(function, part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(function, part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _to_host(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value if value.ndim else value[None]


def _to_numpy(value: Tensor) -> Any:
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()


def _concatenate(pieces: list[Tensor]) -> Tensor:
    """Rows of all batches, padded with -100 to the largest size of every dimension."""
    if len({piece.shape[1:] for piece in pieces}) == 1 or len({piece.ndim for piece in pieces}) > 1:
        return torch.cat(pieces)
    longest = [max(sizes) for sizes in zip(*(piece.shape[1:] for piece in pieces), strict=True)]
    padded = []
    for piece in pieces:
        missing = [most - have for most, have in zip(longest, piece.shape[1:], strict=True)]
        margins = [margin for extra in reversed(missing) for margin in (0, extra)]
        padded.append(F.pad(piece, margins, value=PAD_INDEX))
    return torch.cat(padded)
