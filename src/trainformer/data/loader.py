"""Sources of batches for torch: resumable loading of data sets, in worker processes where that pays, and of streams.

The order of an epoch is a function of (seed, epoch); the position in it is a number of samples. To resume is to start
at that number: no batch is read in vain, and another batch size or number of workers sees the same samples.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from trainformer.core.errors import DataError
from trainformer.data.fetcher import Collate, Fetched, Fetcher, is_in_memory, tensors_of, unwrap_subsets
from trainformer.data.given_loaders import Count, LoaderSource, StatefulLoaderSource, batch_length, loader_source
from trainformer.data.sharding import ALL, Shard, undivided
from trainformer.data.source import EpochOrder, OrderedSource, insist_on_samples

__all__ = [
    "Count",
    "DatasetSource",
    "EpochOrder",
    "LoaderSource",
    "StatefulLoaderSource",
    "StreamSource",
    "batch_length",
    "loader_source",
    "stream_source",
    "suitable_workers",
]

logger = logging.getLogger("trainformer")

_MOST_DEATHS = 3


class DatasetSource(OrderedSource):
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
        insist_on_samples(dataset)
        rows = tensor_rows(dataset) if collate is None else None
        fetch = Fetcher(dataset, collate or default_collate, seed, skip_bad, rows)
        super().__init__(dataset, batch_size, fetch, shuffle=shuffle, sampler=sampler, drop_last=drop_last, shard=shard)
        self.num_workers = suitable_workers(dataset) if num_workers is None else num_workers
        self._plan = _EpochPlan()
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._loader: DataLoader | None = None

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


def tensor_rows(dataset: Any) -> Callable[[np.ndarray], Any] | None:
    """Whole batches at once, of data that are nothing but tensors; None for all others."""
    tensors = tensors_of(unwrap_subsets(dataset)[0])
    return None if tensors is None else partial(_select, tensors)


def _select(tensors: Sequence[torch.Tensor], indices: np.ndarray) -> tuple[torch.Tensor, ...]:
    index = torch.from_numpy(np.ascontiguousarray(indices))
    return tuple(tensor.index_select(0, index) for tensor in tensors)


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
