"""Loaders and collect functions of a user as the loop wants them. Data sets are `data.numpy_inputs`' business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainformer.data.collate import stack_samples
from trainformer.data.numpy_loader import numpy_source
from trainformer.data.sharding import Shard


def stacking(collect: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A collect function whose result is stacked where it is still a list of samples."""

    def collate(samples: list[Any]) -> Any:
        batch = collect(samples)
        return stack_samples(batch) if isinstance(batch, list) else batch

    return collate


def as_source(loader: Any, batch_size: int, seed: int, rows: Shard) -> Any:
    """A source as it is; any other loader as a source of the batches it gives."""
    if loader is None or (hasattr(loader, "batches") and hasattr(loader, "batches_per_epoch")):
        return loader
    return numpy_source(loader, batch_size, seed=seed, batched=True, shard=rows, lookahead=2)
