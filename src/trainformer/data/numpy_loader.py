"""Sources of NumPy batches, without torch: the order, resuming, seeds and shards are those of the torch loader.

`numpy_source` accepts anything a user may pass as data. `NumpySource` reads data with a length; iterables are read by
`numpy_streams`.

By default samples are read on demand in the main thread, while the device runs a compiled step. Threads pay off for
samples that take long to read and release the GIL, as image decoding does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import HostBatch
from trainformer.data.collate import check_batching, pad_rows, stack_samples
from trainformer.data.dataset import ArrayDataset, is_array
from trainformer.data.fetcher import Collate, Fetched, Fetcher, unwrap_subsets
from trainformer.data.hub import load_registered, select_split
from trainformer.data.labels import is_stream
from trainformer.data.numpy_streams import NumpyLoaderSource, NumpyStreamSource
from trainformer.data.order import global_rng_state, preserved_generators, seed_generators
from trainformer.data.sharding import WHOLE, Shard
from trainformer.data.source import EpochOrder, MapStyleSource
from trainformer.data.text.sources import load_text

logger = logging.getLogger("trainformer")

_AHEAD = 2  # batches in flight per thread
_PROBED = 4  # samples read to find out whether they draw from the process's generators
_MAX_SAMPLES = 1 << 40  # more is an endless repetition, such as grain's repeat() without a number


def as_data(data: Any) -> Any:
    """Data as a dataset or a stream:

    - a path or name that `load_text` accepts: JSON Lines, JSON, CSV, Parquet, a folder of texts, `"hf:name"`, or a
      data source of another package (`load_registered`);
    - an array, a tuple of arrays, or a dict of arrays (or lists of numbers) of one length;
    - a list of samples, an HF dataset, a grain `MapDataset`, or anything else with a length and an index;
    - a stream: HF's `IterableDataset`, grain's `IterDataset`, any iterable that can be iterated again, or a function
      that opens one.

    >>> as_data({"x": [[1.0], [2.0]], "y": [[0], [1]]})[1]
    {'x': array([2.]), 'y': array([1])}
    """
    if isinstance(data, str | Path):
        registered = load_registered(str(data))
        return load_text(data) if registered is None else as_data(registered)
    if isinstance(data, Mapping):
        is_arrays = bool(data) and all(is_array(value) or isinstance(value, list | tuple) for value in data.values())
        return ArrayDataset(dict(data)) if is_arrays else as_data(select_split(data, None))
    if is_array(data) or (isinstance(data, tuple) and data and all(map(is_array, data))):
        return ArrayDataset(data)
    if (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or hasattr(data, "__iter__") or callable(data):
        return data
    what = "data to be a path, arrays, a list of samples, a dataset, or an iterable of samples"
    raise BadArgument(expected(what, type(data).__name__))


def numpy_source(
    data: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    collate: Collate | None = None,
    drop_last: bool = False,
    pad_last: bool = False,
    skip_bad: bool = False,
    shard: Shard = WHOLE,
    threads: int = 0,
    lookahead: int = 0,
    batched: bool | None = None,
) -> NumpySource | NumpyStreamSource | NumpyLoaderSource:
    """The source for anything `as_data` accepts. `batched` says whether an iterable yields batches instead of samples.

    By default a `DataLoader` of torch or grain yields batches, and everything else samples. `shuffle`, `skip_bad` and
    `threads` apply to data with a length, `lookahead` to streams and loaders.
    """
    data = as_data(data)
    if batched or (batched is None and is_loader(data)):
        if collate is not None or drop_last:
            given = "collate" if collate is not None else "drop_last"
            raise BadArgument(expected(f"no {given} with a loader, which makes its own batches", given))
        return NumpyLoaderSource(data, batch_size, seed=seed, pad_last=pad_last, shard=shard, lookahead=lookahead)
    options: dict[str, Any] = {
        "seed": seed,
        "collate": collate,
        "drop_last": drop_last,
        "pad_last": pad_last,
        "shard": shard,
    }
    if is_stream(data):
        return NumpyStreamSource(data, batch_size, **options, lookahead=lookahead)
    return NumpySource(data, batch_size, **options, shuffle=shuffle, skip_bad=skip_bad, threads=threads)


def is_loader(data: Any) -> bool:
    """Whether something is a `DataLoader` of torch or grain."""
    kinds = ((kind.__module__.split(".")[0], kind.__name__) for kind in type(data).__mro__)
    return any(package in ("torch", "grain") and name == "DataLoader" for package, name in kinds)


class NumpySource(MapStyleSource):
    """Batches of a dataset with a length, as NumPy arrays: the samples of `DatasetSource` in the same order.

    `collate` makes a batch of a list of samples; by default their arrays are stacked. `drop_last` drops a smaller last
    batch. `pad_last` fills it up with repeated samples, and adds the mask `"_valid"` to every batch, which must be a
    dict; so are batches that lost unreadable samples (`skip_bad`). `HostBatch.size` does not count repeated samples.

    `batch_size` counts the samples of all processes; each reads its `shard` of a batch and pads it to an equal share.

    The random numbers of a sample are a function of (seed, epoch, sample), drawn from `random`, `np.random` or
    `sample_rng`. With `threads`, samples are read ahead in that many threads and must draw from `sample_rng` only: data
    that use the process's generators are still read in the main thread.
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
        shard: Shard = WHOLE,
        threads: int = 0,
    ) -> None:
        check_batching(batch_size, drop_last, pad_last, shard)
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 0:
            raise BadArgument(expected("threads to be 0 or more", threads))
        if len(dataset) > _MAX_SAMPLES:
            do = "Leave out repeat(): the trainer counts epochs."
            raise BadArgument(expected("data with as many samples as an epoch has", "an endless repetition", do))
        base = unwrap_subsets(dataset)[0]
        rows = base.rows if collate is None and isinstance(base, ArrayDataset) else None
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
        self._threads_allowed: bool | None = None  # unknown before the first batch

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        rows = self.batch_size // self.shard.count
        for made in super().batches(epoch, batch, position):
            yield made._replace(data=pad_rows(made.data, made.size, rows)) if self.pad_last else made

    def _fetched(self, epoch: int, chunks: list[np.ndarray]) -> Iterator[Fetched]:
        if self.threads == 0 or not self._may_use_threads(chunks):
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

    def _may_use_threads(self, chunks: list[np.ndarray]) -> bool:
        if self._threads_allowed is None:
            probed = chunks[0][:_PROBED] if chunks else np.empty(0, np.int64)
            self._threads_allowed = not (self._fetch.draws_per_sample and _uses_global_rng(self.dataset, probed))
            if not self._threads_allowed:
                logger.warning(
                    "samples of %s draw from the process's random generators, which threads would share in any order: "
                    "reading in the main thread. Draw from trainformer.data.sample_rng() to read in threads.",
                    type(self.dataset).__name__,
                )
        return self._threads_allowed


def _uses_global_rng(dataset: Any, indices: np.ndarray) -> bool:
    """Whether reading samples draws from generators that the whole process shares."""
    with preserved_generators():
        for index in indices % len(dataset):
            seed_generators(int(index))
            before = global_rng_state()
            try:
                dataset[int(index)]
            except Exception:  # raised again when the sample is read for training
                continue
            if global_rng_state() != before:
                return True
    return False
