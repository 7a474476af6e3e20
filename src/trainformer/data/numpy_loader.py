"""Sources of NumPy batches, without torch: the order, resuming, seeds and shards of the torch loader.

Owns reading data with a length: `NumpySource`. What can only be iterated is read by `numpy_streams`; what a user may
pass as data is found out by `numpy_inputs`.

By default samples are read when they are asked for, in the main thread: a step that is compiled runs on the device
meanwhile. Threads are for samples that take long to read and let other threads run, as decoding an image does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import HostBatch
from trainformer.data.dataset import Arrays
from trainformer.data.fetcher import Collate, Fetched, Fetcher, unwrap_subsets
from trainformer.data.order import global_draws, preserved_generators, seed_generators
from trainformer.data.sharding import ALL, Shard
from trainformer.data.source import EpochOrder, OrderedSource, insist_on_samples
from trainformer.data.stacking import filled_up, stack_samples

logger = logging.getLogger("trainformer")

_AHEAD = 2  # batches that wait for each thread
_TRIED = 4  # samples by which it is found out whether they draw from the process's generators
_MOST_SAMPLES = 1 << 40  # more is no number of samples: an endless repetition, as grain's repeat() without a number


class NumpySource(OrderedSource):
    """Batches of a data set with a length, as NumPy arrays: the samples of `DatasetSource` in the same order.

    `collate` makes a batch of a list of samples; by default their arrays are stacked. A last batch that is smaller
    than the others is left out with `drop_last`. With `pad_last` it has all its rows, some of them repeated, and every
    batch, which must be a dict, says under `"_valid"` which of its rows count; so does one from which samples that
    cannot be read were left out (`skip_bad`). `HostBatch.size` is the number of samples without repetitions.

    `batch_size` is that of all processes; of each batch only the part of the `shard` is read, and padded to an equal
    part of the rows.

    Random numbers of a sample are a function of (seed, epoch, sample), whether they are drawn from `random`,
    `np.random` or `order.sample_rng`. With `threads`, samples are read ahead in so many threads. They must then draw
    from `sample_rng` alone: data that use the process's generators are read in the main thread all the same.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        collate: Collate | None = None,
        sampler: EpochOrder | None = None,
        drop_last: bool = False,
        pad_last: bool = False,
        skip_bad: bool = False,
        shard: Shard = ALL,
        threads: int = 0,
    ) -> None:
        check_batching(batch_size, drop_last, pad_last, shard)
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 0:
            raise BadArgument(expected("threads to be 0 or more", threads))
        insist_on_samples(dataset)
        _refuse_endless(dataset)
        base = unwrap_subsets(dataset)[0]
        rows = base.rows if collate is None and isinstance(base, Arrays) else None
        super().__init__(
            dataset,
            batch_size,
            Fetcher(dataset, collate or stack_samples, seed, skip_bad, rows),
            shuffle=shuffle,
            sampler=sampler,
            drop_last=drop_last,
            shard=shard,
        )
        self.pad_last = pad_last
        self.threads = threads
        self._may_use_threads: bool | None = None  # not known before the first batch

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """What is left of an epoch after `position` samples."""
        given = super().batches(epoch, batch, position)
        return padded(given, self.batch_size // self.shard.count) if self.pad_last else given

    def _fetched(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[Fetched]:
        if self.threads == 0 or not self._suits_threads(chunks):
            for chunk in chunks:
                yield self._fetch(epoch, chunk)
            return
        waiting: deque[Future[Fetched]] = deque()
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="read-samples")
        try:
            for chunk in chunks:
                waiting.append(pool.submit(self._fetch, epoch, chunk, in_thread=True))
                if len(waiting) > _AHEAD * self.threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _suits_threads(self, chunks: list[np.ndarray]) -> bool:
        if self._may_use_threads is None:
            tried = np.concatenate([chunk[:_TRIED] for chunk in chunks[:1]] or [np.empty(0, np.int64)])[:_TRIED]
            self._may_use_threads = not (self._fetch.draws_per_sample and _draws_globally(self.dataset, tried))
            if not self._may_use_threads:
                logger.warning(
                    "samples of %s draw random numbers from generators of the whole process, which threads would draw "
                    "from in any order: reading in the main thread. Draw them from "
                    "trainformer.data.order.sample_rng() to read in threads.",
                    type(self.dataset).__name__,
                )
        return self._may_use_threads


def padded(batches: Iterator[HostBatch], rows: int) -> Iterator[HostBatch]:
    """The same batches with so many rows each, and `"_valid"` to tell which of them count."""
    for batch in batches:
        yield batch._replace(data=filled_up(batch.data, batch.size, rows))


def check_batching(batch_size: int, drop_last: bool, pad_last: bool, shard: Shard) -> None:
    """Raise for arguments that cannot be meant."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise BadArgument(expected("batch_size to be a whole number from 1", batch_size))
    if drop_last and pad_last:
        raise BadArgument("Expected drop_last or pad_last, received both. The last batch is either dropped or padded.")
    if pad_last and batch_size % shard.count:
        raise BadArgument(
            expected(
                f"a batch_size that the {shard.count} processes can share equally, with pad_last",
                batch_size,
                f"Pass a multiple of {shard.count}.",
            )
        )


def _draws_globally(dataset: Any, indices: np.ndarray) -> bool:
    """Whether reading some samples draws from generators that the whole process shares."""
    with preserved_generators():
        for index in indices % len(dataset):
            seed_generators(int(index))
            before = global_draws()
            try:
                dataset[int(index)]
            except Exception:  # said when the sample is read in earnest
                continue
            if global_draws() != before:
                return True
    return False


def _refuse_endless(dataset: Any) -> None:
    if len(dataset) > _MOST_SAMPLES:
        do = "Leave out repeat(): epochs are counted here."
        raise BadArgument(expected("data with as many samples as an epoch has", "an endless repetition", do))
