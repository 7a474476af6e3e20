"""Sources of torch batches: datasets with a length, loaders that users bring, and iterable-style datasets.

The order of an epoch is a pure function of (seed, epoch), and the position in it is a number of samples. Resuming a
dataset with a length starts at that number: no batch is read twice, and the batch size and the number of workers may
change. Loaders and streams resume through their own `state_dict`, or are read again up to the position.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainformer.core.errors import DataError
from trainformer.core.types import HostBatch, Origin
from trainformer.data.fetcher import Collate, Fetched, Fetcher, Rows, is_in_memory, tensors_of, unwrap_subsets
from trainformer.data.hub import has_state
from trainformer.data.mixture.dataset import TaggedBatch, TaggedCollate, TaggedSamples, plain_integers
from trainformer.data.mixture.stream import MixtureStream
from trainformer.data.order import preserved_generators, sample_key, seed_generators
from trainformer.data.sharding import WHOLE, Shard, batch_length, is_sharded, unsharded
from trainformer.data.source import EpochOrder, MapStyleSource, announce_epoch

logger = logging.getLogger("trainformer")

_MOST_JOINED_BYTES = 1 << 28  # tensors of a mixture are copied into one up to this size, which is twice as fast
_MAX_RESTARTS = 3  # of the worker processes, per epoch

CountSamples = Callable[[Any], int]


class DatasetSource(MapStyleSource):
    """Batches of a dataset with a length. `num_workers=None` chooses: none for data in memory.

    A `sampler` decides which samples an epoch holds and in which order; by default every sample comes once.
    `drop_last` drops a smaller last batch. `batch_size` counts the samples of all ranks; each rank reads only its
    `shard` of a batch.
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
        worker_context: str | None = None,
        skip_bad: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        tensors = tensors_of(unwrap_subsets(dataset)[0]) if collate is None else None
        rows: Rows | None = None if tensors is None else partial(_select, tensors)
        if isinstance(dataset, TaggedSamples) and collate is None:
            rows = _rows_of_mixture(dataset)
            collate = TaggedCollate(_collate_mixed)
        fetch = Fetcher(dataset, collate or default_collate, seed, skip_bad, rows)
        super().__init__(dataset, batch_size, fetch, shuffle=shuffle, sampler=sampler, drop_last=drop_last, shard=shard)
        self.num_workers = default_num_workers(dataset) if num_workers is None else num_workers
        # What the workers read. The epoch is part of the index, since workers persist across epochs.
        self._plan: list[tuple[int, np.ndarray]] = []
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._worker_context = worker_context
        self._loader: DataLoader | None = None

    def _fetched(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[Fetched]:
        if self.num_workers == 0:
            for chunk in chunks:
                yield self._fetch(epoch, chunk)
            return
        done = restarts = 0
        while done < len(chunks):
            self._plan[:] = [(epoch, chunk) for chunk in chunks[done:]]
            self._loader = self._loader or self._make_loader()
            iterator = _iter_without_sigchld_handler(self._loader)
            try:
                for fetched in iterator:
                    done += 1
                    yield fetched
            except (RuntimeError, EOFError, OSError) as error:
                # A worker can die anywhere, even while it sends a batch; samples may raise the same errors.
                if not _has_dead_worker(iterator):
                    raise
                restarts += 1
                self._restart_workers(restarts, error)

    def _restart_workers(self, restarts: int, error: Exception) -> None:
        """Start new workers: samples and their random numbers do not depend on the process that reads them."""
        self._loader = None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if restarts > _MAX_RESTARTS:
            raise DataError(
                f"DataLoader workers died {restarts} times in one epoch, last with: {reason} Often this is a lack of "
                "memory: lower num_workers or batch_size. The same command resumes from the last checkpoint."
            ) from error
        logger.warning("DataLoader worker died (%s); restarting", reason)

    def _make_loader(self) -> DataLoader:
        return DataLoader(
            self._fetch,  # type: ignore[arg-type]
            sampler=self._plan,
            batch_size=None,
            collate_fn=_identity,
            num_workers=self.num_workers,
            persistent_workers=True,
            pin_memory=self._pin_memory,
            prefetch_factor=self._prefetch_factor,
            multiprocessing_context=self._worker_context,
            # Without it torch draws a seed from the global generator, which changes every later draw.
            generator=torch.Generator().manual_seed(self.seed),
        )


def _select(tensors: Sequence[torch.Tensor], indices: np.ndarray) -> tuple[torch.Tensor, ...]:
    index = torch.from_numpy(np.ascontiguousarray(indices))
    return tuple(tensor.index_select(0, index) for tensor in tensors)


def _collate_mixed(samples: list[Any]) -> Any:
    return default_collate([plain_integers(sample) for sample in samples])


def _rows_of_mixture(mixture: TaggedSamples) -> Callable[[np.ndarray], TaggedBatch] | None:
    """Reads batches of a mixture of tensors without reading single samples; None for other data."""
    parts = [tensors_of(dataset) for dataset in mixture.datasets]
    kinds = {None if part is None else tuple((t.dtype, t.device, t.shape[1:]) for t in part) for part in parts}
    if None in kinds or len(kinds) != 1:
        return None
    tensors = [part for part in parts if part is not None]
    if sum(tensor.nbytes for part in tensors for tensor in part) <= _MOST_JOINED_BYTES:
        joined = [torch.cat(several) for several in zip(*tensors, strict=True)]
        return lambda indices: TaggedBatch(mixture.locate_all(indices)[0], _select(joined, indices))

    def rows(indices: np.ndarray) -> TaggedBatch:
        numbers, places = mixture.locate_all(indices)
        by_source = np.argsort(numbers, kind="stable")
        chosen = [_select(part, places[numbers == number]) for number, part in enumerate(tensors)]
        back = np.argsort(by_source)
        return TaggedBatch(numbers, _select([torch.cat(tensors) for tensors in zip(*chosen, strict=True)], back))

    return rows


def _identity(fetched: Any) -> Any:
    """Replaces torch's default conversion, which turns arrays into tensors, and only where there are workers."""
    return fetched


def _iter_without_sigchld_handler(loader: DataLoader) -> Iterator[Any]:
    """Iterate without torch's SIGCHLD handler.

    That handler raises the moment a worker dies, wherever the main thread is: in the middle of an optimizer step or a
    save. Without it torch notices within five seconds, while it waits for the next batch.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    return iterator


def _has_dead_worker(iterator: Any) -> bool:
    deadline = time.monotonic() + 1.0  # a process that has just closed its pipes needs a moment to exit
    while True:
        if any(not worker.is_alive() for worker in getattr(iterator, "_workers", [])):
            return True
        if time.monotonic() > deadline:
            return False
        try:
            time.sleep(0.05)
        except RuntimeError:  # torch's SIGCHLD handler, if another loader has set it: a worker was killed
            return True


def default_num_workers(dataset: Any) -> int:
    """0 for data in memory, where sending a batch costs more than indexing it; else one per core but one, up to 8."""
    if is_in_memory(dataset):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores - 1))


# -- loaders and streams -----------------------------------------------------------------------------------


class LoaderSource:
    """Batches of a loader the user brings: a `DataLoader`, or any iterable that can be iterated again.

    Its sampler, collate function and workers are kept. The random order of an epoch is seeded by (seed, epoch).
    Resuming inside an epoch reads and drops the batches that were seen, since only the loader could skip them.

    Several ranks read the same batches and take their shard of each, unless the loader shards the data itself
    (`is_sharded`): then each rank takes its batches as they are. `count` returns the number of samples in a batch.
    """

    def __init__(
        self, loader: Iterable[Any], seed: int = 0, count: CountSamples | None = None, shard: Shard = WHOLE
    ) -> None:
        self.loader = loader
        self.seed = seed
        self.shard = shard
        self.is_sharded = is_sharded(loader)
        self._slices = not shard.is_whole and not self.is_sharded
        self._count = count or batch_length

    @property
    def batches_per_epoch(self) -> int | None:
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        announce_epoch(self.loader, epoch)
        if batch:
            logger.info("resuming inside epoch %d: reading %d batches again to find the position", epoch, batch)
        if self._slices:
            yield from self._host_batches(epoch, islice(self._same_on_all_ranks(epoch), batch, None), position)
            return
        with preserved_generators():
            # Samplers draw their seed at the first `next`, not at `iter`. The batches after those that were seen are
            # read outside this block, with the generators as the checkpoint left them.
            seed_generators(sample_key(self.seed, epoch, 0))
            iterator = iter(self.loader)
            for _ in islice(iterator, batch):
                pass
            head = list(islice(iterator, 1)) if batch == 0 else []
        yield from self._host_batches(epoch, chain(head, iterator), position)

    def _same_on_all_ranks(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """Batches read with generators seeded by the batch number: whatever the loader draws, all ranks draw."""
        iterator: Iterator[Any] | None = None
        for number in count(first):
            with preserved_generators():
                seed_generators(sample_key(self.seed, epoch, number))
                iterator = iter(self.loader) if iterator is None else iterator
                found = list(islice(iterator, 1))
            if not found:
                return
            yield found[0]

    def _host_batches(self, epoch: int, batches: Iterable[Any], position: int) -> Iterator[HostBatch]:
        """The loader alone knows which samples these are, so their positions in the epoch stand for them."""
        for data in batches:
            size = self._count(data)
            batch = HostBatch(data, size, 0, Origin(self.seed, epoch, np.arange(position, position + size)))
            position += size
            yield self.shard.of_loaded(batch, self.is_sharded)


class StatefulLoaderSource(LoaderSource):
    """A loader that saves and restores its own position (`state_dict`, `load_state_dict`): nothing is read twice."""

    _restored = False

    @property
    def _stateful(self) -> Any:
        """The loader, or the stream that a plain `DataLoader` reads in this process."""
        return self.loader if has_state(self.loader) else self.loader.dataset  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return self._stateful.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stateful.load_state_dict(state)
        self._restored = True

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        restored, self._restored = self._restored, False
        if restored:
            announce_epoch(self.loader, epoch)
            if self._slices:
                rest = self._same_on_all_ranks(epoch, batch)
            else:
                # A DataLoader draws a seed when it is iterated; the next draws are those of the checkpoint.
                with preserved_generators():
                    rest = iter(self.loader)
            first = list(islice(rest, 1))
            # At the very end of an epoch a loader has nothing left; the next epoch then starts as usual.
            if first or batch:
                yield from self._host_batches(epoch, chain(first, rest), position)
                return
        yield from super().batches(epoch, batch, position)


def loader_source(
    loader: Iterable[Any], seed: int, count: CountSamples | None = None, shard: Shard = WHOLE
) -> LoaderSource:
    """The source for a loader the user brings."""
    return (StatefulLoaderSource if has_state(loader) else LoaderSource)(loader, seed, count, shard)


def stream_source(
    dataset: IterableDataset,
    batch_size: int,
    *,
    seed: int,
    collate: Collate | None,
    num_workers: int,
    shard: Shard = WHOLE,
    drop_last: bool = False,
) -> LoaderSource:
    """Batches of an iterable-style dataset. With worker processes, resuming reads the stream again."""
    if not shard.is_whole:
        dataset = unsharded(dataset)
    if isinstance(dataset, MixtureStream) and collate is None:
        collate = TaggedCollate(_collate_mixed)
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": num_workers, "drop_last": drop_last}
    loader = DataLoader(dataset, batch_size=batch_size, **options)
    kind = StatefulLoaderSource if has_state(dataset) and num_workers == 0 else LoaderSource
    return kind(loader, seed, shard=shard)
