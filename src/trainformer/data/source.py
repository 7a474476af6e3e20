"""What data sources share: the arithmetic of an epoch over indexed data, and wrappers that shard a source over ranks.

A data source (`core.types.DataSource`) yields the batches of an epoch from any position on. `MapStyleSource` is the
base for data with a length, for torch and NumPy alike: the order is a pure function of (seed, epoch), and the position
in it is a number of samples. How samples are read (here, in workers, in threads) is up to the subclasses.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import DataSource, HostBatch, Origin
from trainformer.data.fetcher import Fetched, Fetcher
from trainformer.data.order import distinct_draws, epoch_order
from trainformer.data.sharding import Shard, check_sliceable

if TYPE_CHECKING:
    from trainformer.distributed import TorchProcessGroup

logger = logging.getLogger("trainformer")

_FALLBACK_SAMPLES = 64  # tried for a rank that could read none of its own


class EpochOrder(Protocol):
    """What the engine asks of a sampler: the samples of an epoch, in order, as a pure function of (epoch, seed)."""

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Indices of samples; an index may occur several times."""
        ...

    def __len__(self) -> int: ...


class MapStyleSource(ABC):
    """Base of the sources of data with a length; see `DatasetSource` (torch) and `NumpySource`."""

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
        if len(dataset) == 0:
            raise DataError(expected("a dataset with at least one sample", "an empty one"))
        size = len(dataset if sampler is None else sampler)
        if drop_last and size < batch_size:
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
        samples = len(self.dataset if self.sampler is None else self.sampler)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """The rest of an epoch after `position` samples."""
        order = self._order(epoch)[position:]
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if not self.shard.is_whole:
            yield from self._sharded(epoch, chunks)
            return
        skipped = 0  # samples of batches of which none could be read: counted with the next batch
        for data, size, bad, draws in self._fetched(epoch, chunks):
            self._warn_about(bad)
            if size:
                yield HostBatch(data, size, len(bad) + skipped, Origin(self.seed, epoch, draws))
                skipped = 0
            else:
                skipped += len(bad)

    def _sharded(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[HostBatch]:
        """This rank's part of each batch. All ranks get the same number of batches, whatever they can read."""
        own = [self.shard.take(chunk) for chunk in chunks]
        for chunk, (data, size, bad, draws) in zip(chunks, self._fetched(epoch, own), strict=True):
            self._warn_about(bad)
            low, high = self.shard.bounds(len(chunk))
            if low == high:
                bad = []  # belongs to another rank, which counts it
            if size == 0:
                data, draws = self._any_readable(epoch, chunk)
            global_size = None if self._fetch.skip_bad else len(chunk)
            origin = Origin(self.seed, epoch, draws)
            yield HostBatch(data, size if high > low else 0, len(bad), origin, global_size, len(chunk))

    def _any_readable(self, epoch: int, chunk: np.ndarray) -> tuple[Any, np.ndarray]:
        """A sample for a rank that could read none of its own, so that it can take part in the step."""
        for draw in [*chunk, *self._order(epoch)[:_FALLBACK_SAMPLES]]:
            fetched = self._fetch(epoch, np.asarray([draw]))
            if fetched.size:
                return fetched.data, fetched.draws
        raise DataError(
            f"Expected at least one readable sample, received none in this batch or the first {_FALLBACK_SAMPLES}."
        )

    def _order(self, epoch: int) -> np.ndarray:
        if self.sampler is None:
            order = epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)
        else:
            order = distinct_draws(self.sampler.order(epoch, self.seed), len(self.dataset))
        return order[: len(order) // self.batch_size * self.batch_size] if self.drop_last else order

    @abstractmethod
    def _fetched(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[Fetched]:
        """Read the batches of these draws, in order."""

    def _warn_about(self, bad: list[tuple[int, str]]) -> None:
        for index, reason in bad:
            if index not in self._reported:
                self._reported.add(index)
                name_of = getattr(self.dataset, "name_of", "sample {}".format)
                logger.warning("%s cannot be read and is skipped: %s", name_of(index), reason)


def announce_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on a loader, its samplers and its dataset, where they have it."""
    for part in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


# -- sources over several ranks ----------------------------------------------------------------------------


class WrappedSource:
    """Passes everything but the batches on to another source, its `state_dict` included."""

    def __init__(self, source: DataSource) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def batches_per_epoch(self) -> int | None:
        return self.source.batches_per_epoch


class SlicedSource(WrappedSource):
    """A source that every rank reads in full; each takes its shard of every batch."""

    def __init__(self, source: DataSource, shard: Shard) -> None:
        super().__init__(source)
        self.shard = shard

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        for whole in self.source.batches(epoch, batch, position):
            yield self.shard.of_loaded(whole, is_sharded=False)


class DispatchedSource(WrappedSource):
    """A source that only rank 0 reads: it scatters each batch to the other ranks."""

    def __init__(self, source: DataSource, process_group: TorchProcessGroup) -> None:
        super().__init__(source)
        self.process_group = process_group

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        group, count = self.process_group, self.process_group.dp_world_size
        if not group.is_main:
            while (part := group.scatter(None)) is not None:
                if isinstance(part, str):
                    raise DataError(f"Rank 0, which reads the data for all ranks, failed. {part}")
                yield part
            return
        batches = self.source.batches(epoch, batch, position)
        while True:
            try:
                whole = next(batches, None)
                if whole is not None:
                    check_sliceable(whole)
            except Exception as error:
                group.scatter([f"{type(error).__name__}: {error}"] * count)
                raise
            if whole is None:
                group.scatter([None] * count)
                return
            yield group.scatter([Shard(index, count).slice(whole) for index in range(count)])
