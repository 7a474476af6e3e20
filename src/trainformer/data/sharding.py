"""Which part of a batch is whose: one order for all ranks, divided batch by batch.

Every batch is cut into contiguous parts whose sizes differ by at most one, so that the samples of a step, and their
order, do not depend on the number of ranks. A rank that is left without a sample gets one all the same, to take part
with; it counts nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import HostBatch, Origin
from trainformer.data.dataset import is_array


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`.

    >>> [Shard(i, 4).bounds(10) for i in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """

    index: int = 0
    count: int = 1

    @property
    def is_all(self) -> bool:
        """Whether there is but one part."""
        return self.count == 1

    def bounds(self, size: int) -> tuple[int, int]:
        """Where the part begins and ends."""
        return size * self.index // self.count, size * (self.index + 1) // self.count

    def of(self, samples: np.ndarray) -> np.ndarray:
        """The part of the samples; where it is empty, one that belongs to another rank."""
        low, high = self.bounds(len(samples))
        return samples[low:high] if high > low else samples[:1]

    def cut(self, batch: HostBatch) -> HostBatch:
        """This rank's part of a batch that is made already."""
        if self.is_all:
            return batch
        low, high = self.bounds(batch.size)
        data = slice_batch(batch.data, low, max(high, low + 1) if low < batch.size else batch.size, batch.size)
        if low >= batch.size:
            data = slice_batch(batch.data, 0, 1, batch.size)
        bad = batch.bad if self.index == 0 else 0  # ranks add up theirs
        return HostBatch(data, high - low, bad, _part(batch.origin, low, high), batch.size, batch.size + batch.bad)


#: The part of one rank alone.
ALL = Shard()


def check_divisible(batch: HostBatch) -> None:
    """Raise if ranks could not tell which samples of a batch are theirs."""
    half = slice_batch(batch.data, 0, 1, batch.size)
    if batch.size > 1 and not _holds_rows(half, 1):
        raise BadArgument(
            expected(
                f"batches whose tensors have one row per sample ({batch.size} here), to divide them over ranks",
                f"a {type(batch.data).__name__} without such tensors",
                "Give the loader a DistributedSampler, which divides the data itself.",
            )
        )


def is_divided(loader: Any) -> bool:
    """Whether a loader gives each rank data of its own: its sampler or its data set says for how many ranks it is.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> data = [1, 2]
    >>> is_divided(DataLoader(data)), is_divided(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    (False, True)
    """
    parts = [loader, *(getattr(loader, name, None) for name in ("sampler", "dataset", "batch_sampler"))]
    parts.append(getattr(parts[-1], "sampler", None))
    by_node = getattr(parts[2], "_distributed", None)  # as HF `datasets` note it
    return by_node is not None or any(getattr(part, "num_replicas", 1) != 1 for part in parts)


def undivided(stream: Any) -> Any:
    """A stream that would divide itself over ranks as it is for one rank alone; any other as it is."""
    if hasattr(stream, "num_replicas") and hasattr(stream, "rank"):
        stream = copy.copy(stream)
        stream.num_replicas, stream.rank = 1, 0
    elif (source := getattr(stream, "source", None)) is not None and undivided(source) is not source:
        stream = copy.copy(stream)
        stream.source = undivided(source)
    return stream


def slice_batch(data: Any, low: int, high: int, size: int) -> Any:
    """Samples `low` to `high` of a nested batch; what has no sample dimension is passed on as it is."""
    if is_array(data):
        return data[low:high] if len(data) == size else data
    if isinstance(data, Mapping):
        return {key: slice_batch(value, low, high, size) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(slice_batch(value, low, high, size) for value in data))
    if isinstance(data, (list, tuple)):
        holds_parts = any(is_array(value) or isinstance(value, (Mapping, list, tuple)) for value in data)
        if not holds_parts and len(data) == size:
            return data[low:high]
        return type(data)(slice_batch(value, low, high, size) for value in data)
    return data


def _holds_rows(data: Any, size: int) -> bool:
    if is_array(data):
        return len(data) == size
    if isinstance(data, Mapping):
        return any(_holds_rows(value, size) for value in data.values())
    return isinstance(data, (list, tuple)) and (len(data) == size or any(_holds_rows(value, size) for value in data))


def _part(origin: Origin | None, low: int, high: int) -> Origin | None:
    if origin is None:
        return None
    samples = origin.samples[low:high] if high > low else origin.samples[:1]
    return Origin(origin.seed, origin.epoch, samples)
