"""Sources of NumPy batches, without torch: the order, resuming, seeds and shards are those of the torch loader.

`numpy_source` accepts anything a user may pass as data. `NumpySource` reads data with a length, by default on demand in
the main thread, while the device runs a compiled step. Threads pay off for samples that take long to read and release
the GIL, as image decoding does. `NumpyStreamSource` reads iterables.
"""

from __future__ import annotations

import base64
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import HostBatch, Origin
from trainformer.data.collate import check_batching, pad_rows, stack_samples
from trainformer.data.dataset import ArrayDataset, is_array
from trainformer.data.fetcher import Collate, Fetched, Fetcher, unwrap_subsets
from trainformer.data.hub import has_state, load_registered, select_split
from trainformer.data.labels import is_instance_of, is_stream
from trainformer.data.mixture.dataset import MixtureDataset, MixtureSource, TaggedCollate, sampler_progress
from trainformer.data.mixture.stream import MixtureStream
from trainformer.data.order import global_rng_state, preserved_generators, sample_key, seed_generators
from trainformer.data.sharding import WHOLE, Shard, batch_length, is_sharded, map_batch, unsharded
from trainformer.data.source import EpochOrder, MapStyleSource, announce_epoch
from trainformer.data.text.sources import load_text

logger = logging.getLogger("trainformer")

_AHEAD = 2  # batches in flight per thread
_PROBED = 4  # samples read to find out whether they draw from the process's generators
_STREAM, _ITERATOR, _NOBODY = "stream", "iterator", "nobody"  # who knows the position in a stream
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
) -> NumpySource | NumpyStreamSource | MixtureSource:
    """The source for anything `as_data` accepts, or for a loaded mixture.

    `batched` says whether an iterable yields batches instead of samples.

    By default a `DataLoader` of torch or grain yields batches, and everything else samples. `shuffle`, `skip_bad` and
    `threads` apply to data with a length, `lookahead` to streams and loaders.
    """
    data = as_data(data)
    options: Any = {"seed": seed, "collate": collate, "drop_last": drop_last, "pad_last": pad_last, "shard": shard}
    if isinstance(data, MixtureDataset | MixtureStream):
        return _mixture_source(data, batch_size, options, shuffle, skip_bad, threads, lookahead)
    batched = is_loader(data) if batched is None else batched
    if batched and (collate is not None or drop_last):
        given = "collate" if collate is not None else "drop_last"
        raise BadArgument(expected(f"no {given} with a loader, which makes its own batches", given))
    if batched or is_stream(data):
        return NumpyStreamSource(data, batch_size, batched=batched, **options, lookahead=lookahead)
    return NumpySource(data, batch_size, **options, shuffle=shuffle, skip_bad=skip_bad, threads=threads)


def _mixture_source(
    data: MixtureDataset | MixtureStream,
    batch_size: int,
    options: dict[str, Any],
    shuffle: bool,
    skip_bad: bool,
    threads: int,
    lookahead: int,
) -> MixtureSource:
    """Batches of a mixture, each of which holds an optimizer step."""
    collate, multiple = options["collate"], batch_size if options["drop_last"] else 1
    options = options | {"collate": TaggedCollate(collate or stack_samples, as_column=True)}
    if isinstance(data, MixtureStream):
        given: Any = {"multiple_of": multiple, "shuffle": shuffle, "skip_bad": skip_bad}
        data.begin(options["seed"], batch_size, shapes=collate is None, **given)
        stream = NumpyStreamSource(data, batch_size, **options, lookahead=lookahead)
        return MixtureSource(stream, data.mixture, data.progress)
    data.check_forms(shapes=collate is None)
    sampler = data.sampler(step_size=batch_size, multiple_of=multiple, shuffle=shuffle)
    source = NumpySource(data.tagged(), batch_size, **options, sampler=sampler, skip_bad=skip_bad, threads=threads)
    return MixtureSource(source, data.mixture, sampler_progress(sampler, options["seed"]))


def is_loader(data: Any) -> bool:
    """Whether something is a `DataLoader` of torch or grain."""
    kinds = ((kind.__module__.split(".")[0], kind.__name__) for kind in type(data).__mro__)
    return any(package in ("torch", "grain") and name == "DataLoader" for package, name in kinds)


class IterableSource:
    """Mixin: iterating a source gives the batches of the first epoch, as they are without a trainer."""

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        length: int | None = self.batches_per_epoch  # type: ignore[attr-defined]
        if length is None:
            raise TypeError("the number of batches of a stream is unknown")
        return length

    def __iter__(self) -> Iterator[Any]:
        return (made.data for made in self.batches(0))  # type: ignore[attr-defined]


class NumpySource(IterableSource, MapStyleSource):
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
        fetch = Fetcher(dataset, collate or stack_samples, seed, skip_bad, rows)
        super().__init__(dataset, batch_size, fetch, shuffle=shuffle, sampler=sampler, drop_last=drop_last, shard=shard)
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


class NumpyStreamSource(IterableSource):
    """Batches of an iterable that can be iterated again, or of a function that opens one; resumes exactly.

    The iterable yields samples, or (`batched`) batches that are used as they are, as those of a loader the user brings.
    For samples the options are those of `NumpySource`; for batches, `batch_size` is only needed with `pad_last`.

    Several processes read the same data and take their shard of each batch, unless the iterable shards itself
    (`is_sharded`). `lookahead` is the number of batches the caller reads ahead.

    An iterable with `state_dict` and `load_state_dict` (HF `datasets`, `TokenStream`), or whose iterators have
    `get_state` and `set_state` (grain), resumes at its position, and nothing is read twice. Any other is read again up
    to the position, and so is an HF stream with a shuffle buffer, which no state contains. What it draws from the
    process's generators while it reads a batch is a function of (seed, epoch, batch number), so a resumed run draws the
    same numbers.
    """

    def __init__(
        self,
        stream: Any,
        batch_size: int | None = None,
        *,
        batched: bool = False,
        seed: int = 0,
        collate: Collate | None = None,
        drop_last: bool = False,
        pad_last: bool = False,
        shard: Shard = WHOLE,
        lookahead: int = 0,
    ) -> None:
        if batched and pad_last and batch_size is None:
            raise BadArgument(expected("batch_size with pad_last, to know how many rows a batch has", None))
        check_batching(1 if batched and batch_size is None else batch_size, drop_last, pad_last, shard)
        if isinstance(stream, Iterator):
            received = f"a {type(stream).__name__}, which can be read only once"
            do = "Pass the function that makes it, or an object with __iter__."
            raise BadArgument(expected("data that can be iterated again", received, do))
        if not hasattr(stream, "__iter__") and not callable(stream):
            what = "an iterable of samples or batches, or a function that opens one"
            raise BadArgument(expected(what, type(stream)))
        self.stream = unsharded(stream) if not shard.is_whole else stream
        self.batch_size = batch_size or 0
        self.batched = batched
        self.seed = seed
        self.collate = collate or stack_samples
        self.drop_last = drop_last
        self.pad_last = pad_last
        self.shard = shard
        self.is_sharded = is_sharded(stream)
        # Samples read for one batch: of all processes, or of this one if the stream shards itself.
        self._samples_per_read = self.batch_size // shard.count if self.is_sharded else self.batch_size
        self._iterator: Any = None
        self._pending: dict[str, Any] | None = None
        self._states: deque[dict[str, Any]] | None = deque(maxlen=lookahead + 1) if lookahead else None

    @property
    def batches_per_epoch(self) -> int | None:
        try:
            return len(self.stream) if self.batched else None
        except TypeError:
            return None

    # -- position ------------------------------------------------------------------------------------------

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """The position of the current iteration, not counting the last `unused` batches the caller read ahead."""
        if self._pending is not None:  # nothing was read since
            return self._pending
        if self._states is None and unused == 0:
            return self._position()
        states = self._states or ()
        if unused >= max(1, len(states)):
            do = "Pass lookahead=... to the source."
            raise BadArgument(expected("at most `lookahead` unused batches", unused, do))
        return states[-1 - unused]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume there at the next call of `batches`."""
        if not isinstance(state, Mapping) or state.get("known_by") not in (_STREAM, _ITERATOR, _NOBODY):
            raise DataError(expected("the state of a stream, as state_dict() returns it", state))
        self._pending = dict(state)

    def _position(self) -> dict[str, Any]:
        known_by, place = _NOBODY, None
        if has_state(self.stream):
            known_by, place = _STREAM, self.stream.state_dict()
        elif hasattr(self._iterator, "get_state"):
            known_by, place = _ITERATOR, self._iterator.get_state()
        if isinstance(place, bytes):  # of grain's loaders; JSON cannot store bytes
            place = {"base64": base64.b64encode(place).decode()}
        return {"known_by": known_by, "place": place}

    def _resumed(self, state: dict[str, Any]) -> Iterator[Any] | None:
        """The rest of the iteration a state was saved in; None if the state has no position."""
        known_by, place = state["known_by"], state["place"]
        if isinstance(place, Mapping) and set(place) == {"base64"}:
            place = base64.b64decode(place["base64"])
        if known_by == _NOBODY:
            return None
        if known_by == _STREAM and has_state(self.stream):
            self.stream.load_state_dict(place)
            return self._open()
        iterator = self._open()
        if known_by == _ITERATOR and hasattr(iterator, "set_state"):
            iterator.set_state(place)
            return iterator
        what = f"data whose {known_by} knows its position, as when the state was saved"
        raise DataError(expected(what, type(self.stream).__name__, "Pass the same data as before."))

    # -- reading -------------------------------------------------------------------------------------------

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        announce_epoch(self.stream, epoch)
        pending, self._pending = self._pending, None
        with preserved_generators():
            seed_generators(sample_key(self.seed, epoch, batch))
            self._iterator = None if pending is None else self._resumed(pending)
        if self._iterator is not None:
            first = self._next(epoch, batch)
            # At the very end of an epoch a stream has nothing left; the next epoch then starts as usual.
            if first is not None or batch:
                yield from self._host_batches(epoch, batch, position, first)
                return
        announce_epoch(self.stream, epoch)  # again: the state was that of another epoch
        with preserved_generators():
            seed_generators(sample_key(self.seed, epoch, 0))
            self._iterator = self._open()
        if batch:
            logger.info("resuming inside epoch %d: reading %d batches again to find the position", epoch, batch)
            self._skip(epoch, batch, position)
        yield from self._host_batches(epoch, batch, position, self._next(epoch, batch))

    def _open(self) -> Any:
        return iter(self.stream if hasattr(self.stream, "__iter__") else self.stream())

    def _next(self, epoch: int, number: int) -> Any:
        """What `_read` returns, with generators seeded for this batch."""
        with preserved_generators():
            seed_generators(sample_key(self.seed, epoch, number))
            return self._read()

    def _host_batches(self, epoch: int, batch: int, position: int, content: Any) -> Iterator[HostBatch]:
        """The stream alone knows which samples these are, so their positions in the epoch stand for them."""
        for number in count(batch + 1):
            if content is None:
                return
            made = self._made(content, Origin(self.seed, epoch, position))
            if self._states is not None:
                self._states.append(self._position())
            position += made.size if made.consumed is None else made.consumed
            yield made
            content = self._next(epoch, number)

    def _read(self) -> Any:
        """The batch, or its list of samples; None at the end."""
        if self.batched:
            return next(self._iterator, None)
        samples = list(islice(self._iterator, self._samples_per_read))
        return samples if samples and not (self.drop_last and len(samples) < self._samples_per_read) else None

    def _skip(self, epoch: int, batch: int, position: int) -> None:
        """Read again what was seen. The size of the batches may have changed since, if they are made here."""
        left = position // self.shard.count if self.is_sharded else position
        for number in range(batch if self.batched else -(-left // self._samples_per_read)):
            with preserved_generators():
                seed_generators(sample_key(self.seed, epoch, number))
                left -= sum(1 for _ in islice(self._iterator, 1 if self.batched else min(left, self._samples_per_read)))

    def _made(self, content: Any, begin: Origin) -> HostBatch:
        """This process's part of the batch. `begin` has the position of its first sample."""
        if self.batched:
            data = map_batch(lambda part: np.asarray(part) if is_instance_of(part, "torch.Tensor") else part, content)
            size = batch_length(content)
            origin = begin._replace(samples=np.arange(begin.samples, begin.samples + size))
            made = self.shard.of_loaded(HostBatch(data, size, 0, origin), self.is_sharded)
        else:
            size = len(content)
            low, high = (0, size) if self.is_sharded else self.shard.bounds(size)
            mine = content[low:high] or content[:1]
            origin = begin._replace(samples=begin.samples + low + np.arange(len(mine)))
            made = HostBatch(self.collate(mine), high - low, 0, origin)
            if self.is_sharded:
                made = self.shard.of_loaded(made, is_sharded=True)
            elif not self.shard.is_whole:
                made = made._replace(global_size=size, consumed=size)
        if self.pad_last:
            made = made._replace(data=pad_rows(made.data, made.size, self.batch_size // self.shard.count))
        return made
