"""Sources of batches: resumable loading of data sets, and loaders that users bring.

The order of an epoch is a function of (seed, epoch); the position in it is a number of samples. To resume is to start
at that number: no batch is read in vain, and another batch size or number of workers sees the same samples.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Sized
from trainformer.data.fetch import Collate, Fetcher, is_in_memory
from trainformer.data.order import epoch_order, preserved_generators, sample_key, seed_generators

logger = logging.getLogger("trainformer")


class DatasetSource:
    """Batches of a data set with a length. `num_workers=None` chooses: none for data in memory."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        collate: Collate | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        if len(dataset) == 0:
            raise DataError(expected("a data set with at least one sample", "an empty one"))
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = suitable_workers(dataset) if num_workers is None else num_workers
        self._fetch = Fetcher(dataset, collate, seed)
        self._plan = _EpochPlan()
        self._loader = self._make_loader(pin_memory) if self.num_workers > 0 else None

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches, the last and perhaps smaller one included."""
        return -(-len(self.dataset) // self.batch_size)

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[Sized]:
        """What is left of an epoch after `position` samples."""
        order = epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)[position:]
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if self._loader is None:
            for chunk in chunks:
                yield Sized(self._fetch(epoch, chunk), len(chunk))
        else:
            self._plan.set(epoch, chunks)
            for chunk, data in zip(chunks, self._loader, strict=True):
                yield Sized(data, len(chunk))

    def _make_loader(self, pin_memory: bool) -> DataLoader:
        return DataLoader(
            _Remote(self._fetch),
            sampler=self._plan,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=True,
            pin_memory=pin_memory,
            # Given explicitly: else torch draws a seed from the global generator, and so changes what follows.
            generator=torch.Generator().manual_seed(self.seed),
        )


class _EpochPlan(Sampler[tuple[int, np.ndarray]]):
    """Tells workers what to read: the epoch goes along, since they live on from one epoch to the next."""

    def __init__(self) -> None:
        self._epoch = 0
        self._chunks: list[np.ndarray] = []

    def set(self, epoch: int, chunks: list[np.ndarray]) -> None:
        self._epoch, self._chunks = epoch, chunks

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        return ((self._epoch, chunk) for chunk in self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)


class _Remote(Dataset):
    """The fetcher as a worker sees it: an index is a whole batch."""

    def __init__(self, fetch: Fetcher) -> None:
        self._fetch = fetch

    def __getitem__(self, index: tuple[int, np.ndarray]) -> Any:
        return self._fetch(*index, in_worker=True)


class LoaderSource:
    """Batches of a loader the user made (a `DataLoader`, or any iterable that can be iterated again), used as it is.

    Its sampler, collation and workers are kept. The random order of an epoch is seeded by (seed, epoch); resuming
    in the middle has to read and drop what was seen, since nobody but the loader knows how to skip.
    """

    def __init__(self, loader: Iterable[Any], seed: int = 0) -> None:
        self.loader = loader
        self.seed = seed

    @property
    def batches_per_epoch(self) -> int | None:
        """The loader's length, where it has one."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[Sized]:
        """What is left of an epoch after `batch` batches."""
        names = "sampler", "batch_sampler", "dataset"
        parts: list[Any] = [self.loader, *(getattr(self.loader, name, None) for name in names)]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if batch:
            logger.info("resuming inside epoch %d: reading %d batches again to find the place", epoch, batch)
        with preserved_generators():
            # Samplers draw their seed at the first `next`, not at `iter`. What follows the batches that were seen
            # is read outside, with the generators as the checkpoint left them.
            seed_generators(sample_key(self.seed, epoch, 0))
            iterator = iter(self.loader)
            head = list(islice(iterator, max(batch, 1)))
        for data in head[batch:]:
            yield Sized(data, batch_length(data))
        for data in iterator:
            yield Sized(data, batch_length(data))


def stream_source(
    dataset: IterableDataset, batch_size: int, *, seed: int, collate: Collate | None, num_workers: int
) -> LoaderSource:
    """Batches of a data set that can only be iterated."""
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate, num_workers=num_workers)
    return LoaderSource(loader, seed)


def suitable_workers(dataset: Any) -> int:
    """Worker processes that suit the data and the machine.

    None for data in memory: handing a batch to another process costs more than indexing. Else one per core but one,
    at most eight.
    """
    if is_in_memory(dataset):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores - 1))


def batch_length(data: Any) -> int:
    """Number of samples in a batch of any usual shape.

    >>> batch_length({"input_ids": torch.zeros(4, 7), "labels": torch.zeros(4)})
    4
    """
    if isinstance(data, torch.Tensor) and data.ndim > 0:
        return len(data)
    if isinstance(data, Mapping):
        return batch_length(next(iter(data.values()), None))
    if isinstance(data, (list, tuple)) and data:
        first = data[0]
        return batch_length(first) if isinstance(first, (torch.Tensor, Mapping, list, tuple)) else len(data)
    raise BadArgument(
        expected(
            "a batch made of tensors whose first dimension is the sample",
            type(data).__name__,
            "Return Loss(sum, weight) from train_step and tensors from the loader.",
        )
    )
