"""Which part of a batch belongs to which rank: one order for all ranks, sliced batch by batch.

Every batch is cut into contiguous parts whose sizes differ by at most one, so the samples of a step and their order do
not depend on the world size. A rank that would get no sample receives one anyway, with size 0: it takes part in the
step, and the sample counts for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import HostBatch
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
    def is_whole(self) -> bool:
        """Whether there is only one part."""
        return self.count == 1

    def bounds(self, size: int) -> tuple[int, int]:
        """Where this part of `size` samples starts and ends."""
        return size * self.index // self.count, size * (self.index + 1) // self.count

    def take(self, samples: np.ndarray) -> np.ndarray:
        """This part of the samples; if it is empty, one sample of another rank."""
        low, high = self.bounds(len(samples))
        return samples[low:high] if high > low else samples[:1]

    def slice(self, batch: HostBatch) -> HostBatch:
        """This part of a collated batch."""
        if self.is_whole:
            return batch
        low, high = self.bounds(batch.size)
        data = slice_batch(batch.data, *((low, high) if high > low else (0, 1)), batch.size)
        bad = batch.bad if self.index == 0 else 0  # counts are summed over ranks
        origin = batch.origin and batch.origin._replace(samples=self.take(batch.origin.samples))
        sources = batch.sources and batch.sources._replace(numbers=self.take(batch.sources.numbers))
        return HostBatch(data, high - low, bad, origin, batch.size, batch.size + batch.bad, sources)

    def of_loaded(self, batch: HostBatch, is_sharded: bool) -> HostBatch:
        """This part of a batch that every rank has loaded, or (`is_sharded`) the batch of a rank with its own data."""
        if is_sharded:
            return batch if self.is_whole else batch._replace(consumed=batch.size * self.count)
        if not self.is_whole:
            check_sliceable(batch)
        return self.slice(batch)


#: All samples, for a single process.
WHOLE = Shard()


def check_sliceable(batch: HostBatch) -> None:
    """Raise if a batch has no tensors with one row per sample, so that ranks could not take their part."""
    first = slice_batch(batch.data, 0, 1, batch.size)
    if batch.size > 1 and not _has_rows(first, 1):
        what = f"batches whose tensors have one row per sample ({batch.size} here), to shard them over ranks"
        do = "Give the loader a DistributedSampler, which shards the data itself."
        raise BadArgument(expected(what, f"a {type(batch.data).__name__} without such tensors", do))


def is_sharded(loader: Any) -> bool:
    """Whether a loader gives each rank its own data: its sampler or its dataset has `num_replicas`.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> data = [1, 2]
    >>> is_sharded(DataLoader(data)), is_sharded(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    (False, True)
    """
    parts = [loader, *(getattr(loader, name, None) for name in ("sampler", "dataset", "batch_sampler"))]
    parts.append(getattr(parts[-1], "sampler", None))
    by_node = getattr(parts[2], "_distributed", None)  # set by HF's split_dataset_by_node
    return by_node is not None or any(getattr(part, "num_replicas", 1) != 1 for part in parts)


def unsharded(stream: Any) -> Any:
    """A copy of a stream that would shard itself over ranks, set to one rank; other streams unchanged."""
    if hasattr(stream, "num_replicas") and hasattr(stream, "rank"):
        stream = copy.copy(stream)
        stream.num_replicas, stream.rank = 1, 0
    elif (source := getattr(stream, "source", None)) is not None and unsharded(source) is not source:
        stream = copy.copy(stream)
        stream.source = unsharded(source)
    return stream


class SampleList(list[Any]):
    """A part of a batch with one item per sample, for samples that cannot be stacked: masks, boxes, images of any size.

    >>> slice_batch({"boxes": SampleList([1, 2, 3])}, 1, 3, size=3)
    {'boxes': [2, 3]}
    """


# -- nested batches ----------------------------------------------------------------------------------------


def slice_batch(data: Any, low: int, high: int, size: int) -> Any:
    """Samples `low` to `high` of a nested batch; values without a sample dimension pass unchanged."""
    if is_array(data):
        return data[low:high] if len(data) == size else data
    if isinstance(data, SampleList):
        return SampleList(data[low:high])
    if isinstance(data, Mapping):
        return {key: slice_batch(value, low, high, size) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(slice_batch(value, low, high, size) for value in data))
    if isinstance(data, (list, tuple)):
        is_nested = any(is_array(value) or isinstance(value, (Mapping, list, tuple)) for value in data)
        if not is_nested and len(data) == size:
            return data[low:high]
        return type(data)(slice_batch(value, low, high, size) for value in data)
    return data


def map_batch(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to every value of a nested batch."""
    if isinstance(data, Mapping):
        return {key: map_batch(function, value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        parts = [map_batch(function, value) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return function(data)


def batch_length(data: Any) -> int:
    """Number of samples in a nested batch.

    >>> batch_length({"input_ids": np.zeros((4, 7)), "labels": np.zeros(4)})
    4
    """
    if is_array(data) or isinstance(data, SampleList):
        return len(data)
    if isinstance(data, Mapping):
        parts = [part for part in data.values() if is_array(part) or isinstance(part, (Mapping, list, tuple))]
        return batch_length(parts[0] if parts else next(iter(data.values()), None))  # options are no samples
    if isinstance(data, (list, tuple)) and data:
        first = data[0]
        return batch_length(first) if is_array(first) or isinstance(first, (Mapping, list, tuple)) else len(data)
    do = "Return Loss(sum, weight) from train_step and tensors from the loader."
    raise BadArgument(expected("a batch made of tensors whose first dimension is the sample", type(data).__name__, do))


def _has_rows(data: Any, size: int) -> bool:
    if is_array(data):
        return len(data) == size
    if isinstance(data, Mapping):
        return any(_has_rows(value, size) for value in data.values())
    return isinstance(data, (list, tuple)) and (len(data) == size or any(_has_rows(value, size) for value in data))
