"""Sources of batches: resumable loading of data sets, and loaders that users bring.

The order of an epoch is a function of (seed, epoch); the position in it is a number of samples. To resume is to start
at that number: no batch is read in vain, and another batch size or number of workers sees the same samples.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Origin, Sized
from trainformer.data.fetch import Collate, Fetched, Fetcher, is_in_memory
from trainformer.data.order import distinct_draws, epoch_order, preserved_generators, sample_key, seed_generators
from trainformer.data.sharding import ALL, Shard, check_divisible, is_divided, undivided

logger = logging.getLogger("trainformer")

_MOST_DEATHS = 3

#: Samples in a batch.
Count = Callable[[Any], int]


class EpochOrder(Protocol):
    """What a sampler must have: the samples of an epoch, in order, as a pure function of (epoch, seed)."""

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Numbers of samples; one may occur several times."""
        ...

    def __len__(self) -> int: ...


class DatasetSource:
    """Batches of a data set with a length. `num_workers=None` chooses: none for data in memory.

    A `sampler` says which samples an epoch holds and in which order; without one it is every sample once. With
    `drop_last` the last batch is left out if it is smaller than the others. `batch_size` is that of all ranks; of each
    batch only the part of the `shard` is read.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        sampler: EpochOrder | None = None,
        drop_last: bool = False,
        seed: int = 0,
        collate: Collate | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        skip_bad: bool = False,
        shard: Shard = ALL,
    ) -> None:
        if len(dataset) == 0:
            raise DataError(expected("a data set with at least one sample", "an empty one"))
        if drop_last and len(dataset if sampler is None else sampler) < batch_size:
            size = len(dataset if sampler is None else sampler)
            advice = "Pass a smaller batch_size, or drop_last=False."
            raise BadArgument(expected(f"at least {batch_size} samples for one batch with drop_last", size, advice))
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.sampler = sampler
        self.drop_last = drop_last
        self.seed = seed
        self.num_workers = suitable_workers(dataset) if num_workers is None else num_workers
        self.shard = shard
        self._fetch = Fetcher(dataset, collate, seed, skip_bad)
        self._plan = _EpochPlan()
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._loader: DataLoader | None = None
        self._reported: set[int] = set()

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches, the last and perhaps smaller one included, unless it is dropped."""
        samples = len(self.dataset if self.sampler is None else self.sampler)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[Sized]:
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
                yield Sized(data, size, len(bad) + passed_over, Origin(self.seed, epoch, draws))
                passed_over = 0
            else:
                passed_over += len(bad)

    def _parts(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[Sized]:
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
            yield Sized(data, size if high > low else 0, len(bad), origin, whole, len(chunk))

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

    def _fetched(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[Fetched]:
        if self.num_workers == 0:
            for chunk in chunks:
                yield self._fetch(epoch, chunk)
            return
        done = deaths = 0
        while done < len(chunks):
            self._plan.set(epoch, chunks[done:])
            self._loader = self._loader or self._make_loader()
            iterator = _quiet_iter(self._loader)
            try:
                for fetched in iterator:
                    done += 1
                    yield fetched
            except (RuntimeError, EOFError, OSError) as error:
                # A worker may die anywhere, also while it hands over a batch; samples may raise the same errors.
                if not _has_dead_worker(iterator):
                    raise
                deaths += 1
                self._mourn(deaths, error)

    def _mourn(self, deaths: int, error: Exception) -> None:
        """Start workers anew: samples and their random numbers do not depend on who reads them."""
        self._loader = None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if deaths > _MOST_DEATHS:
            raise DataError(
                f"Data-loading workers died {deaths} times in one epoch, the last time with: {reason} This is often a "
                "lack of memory: lower num_workers or batch_size. The same command goes on from the last checkpoint."
            ) from error
        logger.warning("a data-loading worker died (%s) New ones go on from the same sample.", reason)

    def _report(self, bad: list[tuple[int, str]]) -> None:
        for index, reason in bad:
            if index not in self._reported:
                self._reported.add(index)
                logger.warning("sample %d cannot be read and is left out: %s", index, reason)

    def _make_loader(self) -> DataLoader:
        return DataLoader(
            _Remote(self._fetch),
            sampler=self._plan,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            persistent_workers=True,
            pin_memory=self._pin_memory,
            prefetch_factor=self._prefetch_factor,
            # Given explicitly: else torch draws a seed from the global generator, and so changes what follows.
            generator=torch.Generator().manual_seed(self.seed),
        )


def _as_it_is(fetched: Any) -> Any:
    """Instead of torch's conversion, which would make tensors of arrays, and only where there are workers."""
    return fetched


def _quiet_iter(loader: DataLoader) -> Iterator[Any]:
    """Iterate without torch's handler for SIGCHLD.

    That handler raises the moment a worker dies, wherever the main thread happens to be: in the middle of an optimizer
    step, or of a save. Without it torch notices within five seconds, when it waits for the next batch.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    return iterator


def _has_dead_worker(iterator: Any) -> bool:
    deadline = time.monotonic() + 1.0  # a process that has just closed its pipes needs a moment to be gone
    while True:
        if any(not worker.is_alive() for worker in getattr(iterator, "_workers", [])):
            return True
        if time.monotonic() > deadline:
            return False
        try:
            time.sleep(0.05)
        except RuntimeError:  # torch's own handler of SIGCHLD, if another loader has set it: a worker was killed
            return True


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

    def __getitem__(self, index: tuple[int, np.ndarray]) -> Fetched:
        return self._fetch(*index, in_worker=True)


class LoaderSource:
    """Batches of a loader the user made (a `DataLoader`, or any iterable that can be iterated again), used as it is.

    Its sampler, collation and workers are kept. The random order of an epoch is seeded by (seed, epoch); resuming
    in the middle has to read and drop what was seen, since nobody but the loader knows how to skip.

    Several ranks read the same batches and take their part of each, unless the loader divides the data itself
    (`is_divided`): then the batches are taken as they are.
    """

    def __init__(self, loader: Iterable[Any], seed: int = 0, count: Count | None = None, shard: Shard = ALL) -> None:
        self.loader = loader
        self.seed = seed
        self.shard = shard
        self.is_divided = is_divided(loader)
        self._is_cut = not shard.is_all and not self.is_divided
        self._count = count or batch_length

    @property
    def batches_per_epoch(self) -> int | None:
        """The loader's length, where it has one."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[Sized]:
        """What is left of an epoch after `batch` batches."""
        self._announce(epoch)
        if batch:
            logger.info("resuming inside epoch %d: reading %d batches again to find the place", epoch, batch)
        if self._is_cut:
            yield from self._sized(epoch, islice(self._alike(epoch), batch, None), position)
            return
        with preserved_generators():
            # Samplers draw their seed at the first `next`, not at `iter`. What follows the batches that were seen
            # is read outside, with the generators as the checkpoint left them.
            seed_generators(sample_key(self.seed, epoch, 0))
            iterator = iter(self.loader)
            for _ in islice(iterator, batch):
                pass
            head = list(islice(iterator, 1)) if batch == 0 else []
        yield from self._sized(epoch, chain(head, iterator), position)

    def _alike(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """Batches of which every rank takes its part: whatever a loader draws while it reads, all of them draw."""
        iterator: Iterator[Any] | None = None
        for number in count(first):
            with preserved_generators():
                seed_generators(sample_key(self.seed, epoch, number))
                iterator = iter(self.loader) if iterator is None else iterator
                found = list(islice(iterator, 1))
            if not found:
                return
            yield found[0]

    def _sized(self, epoch: int, batches: Iterable[Any], position: int) -> Iterator[Sized]:
        """Nobody knows which samples these are; their places in the epoch stand for them."""
        for data in batches:
            size = self._count(data)
            batch = Sized(data, size, 0, Origin(self.seed, epoch, np.arange(position, position + size)))
            position += size
            if self.shard.is_all:
                yield batch
            elif self.is_divided:
                yield batch._replace(consumed=size * self.shard.count)
            else:
                check_divisible(batch)
                yield self.shard.cut(batch)

    def _announce(self, epoch: int) -> None:
        """Tell the loader and its parts which epoch it is, where they want to know."""
        names = "sampler", "batch_sampler", "dataset"
        parts: list[Any] = [self.loader, *(getattr(self.loader, name, None) for name in names)]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


class StatefulLoaderSource(LoaderSource):
    """A loader that can say where it is and go back there (`state_dict`, `load_state_dict`): nothing is read twice."""

    def __init__(self, loader: Iterable[Any], seed: int = 0, count: Count | None = None, shard: Shard = ALL) -> None:
        super().__init__(loader, seed, count, shard)
        self._restored = False

    def state_dict(self) -> dict[str, Any]:
        """The loader's own position."""
        return self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there; the next epoch begins in the middle."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._restored = True

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[Sized]:
        """What is left of an epoch: as the loader knows, if it was restored, else by reading again."""
        restored, self._restored = self._restored, False
        if restored:
            self._announce(epoch)
            if self._is_cut:
                rest = self._alike(epoch, batch)
            else:
                with (
                    preserved_generators()
                ):  # a DataLoader draws a seed when it is iterated; the checkpoint's come next
                    rest = iter(self.loader)
            first = list(islice(rest, 1))
            # At the very end of an epoch a loader has nothing left; the next one then begins as usual.
            if first or batch:
                yield from self._sized(epoch, chain(first, rest), position)
                return
        yield from super().batches(epoch, batch, position)


class StreamSource(StatefulLoaderSource):
    """A stream that can say where it is, read in this process: resuming reads nothing twice."""

    def __init__(self, loader: DataLoader, seed: int = 0, shard: Shard = ALL) -> None:
        super().__init__(loader, seed, shard=shard)
        self.stream: Any = loader.dataset

    def state_dict(self) -> dict[str, Any]:
        """The stream's own position."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there; the next epoch begins in the middle."""
        self.stream.load_state_dict(state)
        self._restored = True


def loader_source(loader: Iterable[Any], seed: int, count: Count | None = None, shard: Shard = ALL) -> LoaderSource:
    """A source for a loader that the user brings; `count` tells the samples of a batch of unusual form."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulLoaderSource if stateful else LoaderSource)(loader, seed, count, shard)


def stream_source(
    dataset: IterableDataset,
    batch_size: int,
    *,
    seed: int,
    collate: Collate | None,
    num_workers: int,
    shard: Shard = ALL,
) -> LoaderSource:
    """Batches of a data set that can only be iterated. Streams in worker processes are read again to find the place."""
    if not shard.is_all:
        dataset = undivided(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate, num_workers=num_workers)
    stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and num_workers == 0
    return StreamSource(loader, seed, shard) if stateful else LoaderSource(loader, seed, shard=shard)


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
