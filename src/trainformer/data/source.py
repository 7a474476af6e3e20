"""Batches of data that are read by index: which samples make up a batch, and whose part of it is whose.

Owns the arithmetic of an epoch, which is the same for torch and JAX: the order is a function of (seed, epoch), and the
position in it is a number of samples. How samples are read, here or in workers, is left to the sources made from this.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import HostBatch, Origin
from trainformer.data.fetcher import Fetched, Fetcher
from trainformer.data.order import distinct_draws, epoch_order
from trainformer.data.sharding import Shard

logger = logging.getLogger("trainformer")


class EpochOrder(Protocol):
    """What a sampler must have: the samples of an epoch, in order, as a pure function of (epoch, seed)."""

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Numbers of samples; one may occur several times."""
        ...

    def __len__(self) -> int: ...


class OrderedSource(ABC):
    """What sources of data with a length share; see `DatasetSource` and `NumpySource`."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        fetch: Fetcher,
        *,
        shuffle: bool,
        sampler: EpochOrder | None,
        drop_last: bool,
        shard: Shard,
    ) -> None:
        if drop_last and len(dataset if sampler is None else sampler) < batch_size:
            size = len(dataset if sampler is None else sampler)
            advice = "Pass a smaller batch_size, or drop_last=False."
            raise BadArgument(expected(f"at least {batch_size} samples for one batch with drop_last", size, advice))
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.sampler = sampler
        self.drop_last = drop_last
        self.seed = fetch.seed
        self.shard = shard
        self._fetch = fetch
        self._reported: set[int] = set()

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches, the last and perhaps smaller one included, unless it is dropped."""
        samples = len(self.dataset if self.sampler is None else self.sampler)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """What is left of an epoch after `position` samples."""
        order = self._order(epoch)[position:]
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if not self.shard.is_all:
            yield from self._parts(epoch, chunks)
            return
        passed_over = 0  # samples of batches in which none could be read; they count with the next batch
        for data, size, bad, draws in self._fetched(epoch, chunks):
            self._report(bad)
            if size:
                yield HostBatch(data, size, len(bad) + passed_over, Origin(self.seed, epoch, draws))
                passed_over = 0
            else:
                passed_over += len(bad)

    def _parts(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[HostBatch]:
        """This rank's part of each batch. Every rank gets as many batches as the others, whatever it can read."""
        mine = [self.shard.of(chunk) for chunk in chunks]
        for chunk, (data, size, bad, draws) in zip(chunks, self._fetched(epoch, mine), strict=True):
            self._report(bad)
            low, high = self.shard.bounds(len(chunk))
            if low == high:
                bad = []  # of another rank, which tells of it
            if size == 0:
                data, draws = self._something_of(epoch, chunk)
            whole = None if self._fetch.skip_bad else len(chunk)
            origin = Origin(self.seed, epoch, draws)
            yield HostBatch(data, size if high > low else 0, len(bad), origin, whole, len(chunk))

    def _something_of(self, epoch: int, chunk: np.ndarray) -> tuple[Any, np.ndarray]:
        """Any sample that can be read, to take part with."""
        for draw in [*chunk, *self._order(epoch)[:64]]:
            fetched = self._fetch(epoch, np.asarray([draw]))
            if fetched.size:
                return fetched.data, fetched.draws
        raise DataError("Expected at least one sample that can be read, received none in this batch or the first 64.")

    def _order(self, epoch: int) -> np.ndarray:
        if self.sampler is None:
            order = epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)
        else:
            order = distinct_draws(self.sampler.order(epoch, self.seed), len(self.dataset))
        return order[: len(order) // self.batch_size * self.batch_size] if self.drop_last else order

    @abstractmethod
    def _fetched(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[Fetched]:
        """The batches of these draws, in order."""

    def _report(self, bad: list[tuple[int, str]]) -> None:
        for index, reason in bad:
            if index not in self._reported:
                self._reported.add(index)
                logger.warning("sample %d cannot be read and is left out: %s", index, reason)


def insist_on_samples(dataset: Any) -> None:
    """Raise for a data set without samples."""
    if len(dataset) == 0:
        raise DataError(expected("a data set with at least one sample", "an empty one"))
