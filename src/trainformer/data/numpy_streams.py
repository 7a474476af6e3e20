"""Sources of NumPy batches over iterables: streams of samples, and loaders that users bring. Both resume exactly.

A stream with `state_dict` and `load_state_dict` (HF `datasets`, `TokenStream`), or whose iterators have `get_state` and
`set_state` (grain), resumes at its position, and nothing is read twice. Any other is read again up to the position, and
so is an HF stream with a shuffle buffer, which no state contains.

What a stream draws from the process's generators while it reads a batch is a function of (seed, epoch, batch number),
so a resumed run draws the same numbers.
"""

from __future__ import annotations

import base64
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import HostBatch, Origin
from trainformer.data.collate import check_batching, pad_rows, stack_samples
from trainformer.data.fetcher import Collate
from trainformer.data.hub import has_state
from trainformer.data.labels import is_instance_of
from trainformer.data.order import preserved_generators, sample_key, seed_generators
from trainformer.data.sharding import WHOLE, Shard, batch_length, is_sharded, map_batch, unsharded
from trainformer.data.source import announce_epoch

logger = logging.getLogger("trainformer")

_STREAM, _ITERATOR, _NOBODY = "stream", "iterator", "nobody"  # who knows the position


class _IteratedSource(ABC):
    """Starts, reads and resumes an iteration. `lookahead` is the number of batches the caller reads ahead."""

    def __init__(self, stream: Any, *, seed: int, shard: Shard, lookahead: int) -> None:
        self.stream = unsharded(stream) if not shard.is_whole else stream
        self.seed = seed
        self.shard = shard
        self.is_sharded = is_sharded(stream)
        self._open = opener(self.stream)
        self._iterator: Iterator[Any] | None = None
        self._pending: dict[str, Any] | None = None
        self._states: deque[dict[str, Any]] | None = deque(maxlen=lookahead + 1) if lookahead else None

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
        if has_state(self.stream):
            return {"known_by": _STREAM, "place": self.stream.state_dict()}
        if not hasattr(self._iterator, "get_state"):
            return {"known_by": _NOBODY, "place": None}
        place = self._iterator.get_state()  # type: ignore[union-attr]
        if isinstance(place, bytes):  # of grain's loaders; JSON cannot store bytes
            place = {"base64": base64.b64encode(place).decode()}
        return {"known_by": _ITERATOR, "place": place}

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
            iterator.set_state(place)  # type: ignore[attr-defined]
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
        with preserved_generators():
            seed_generators(sample_key(self.seed, epoch, 0))
            self._iterator = self._open()
        if batch:
            logger.info("resuming inside epoch %d: reading %d batches again to find the position", epoch, batch)
            self._skip(epoch, batch, position)
        yield from self._host_batches(epoch, batch, position, self._next(epoch, batch))

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

    @abstractmethod
    def _read(self) -> Any:
        """The content of the next batch; None at the end."""

    @abstractmethod
    def _skip(self, epoch: int, batch: int, position: int) -> None:
        """Read the batches again that were seen."""

    @abstractmethod
    def _made(self, content: Any, begin: Origin) -> HostBatch:
        """This process's part of the batch. `begin` has the position of its first sample."""


class NumpyStreamSource(_IteratedSource):
    """Batches of a stream of samples: an iterable that can be iterated again, or a function that opens one.

    Options are those of `NumpySource`. Several processes read the same samples and take their shard of each batch,
    unless the stream shards itself (`is_sharded`).
    """

    batches_per_epoch = None

    def __init__(
        self,
        stream: Any,
        batch_size: int,
        *,
        seed: int = 0,
        collate: Collate | None = None,
        drop_last: bool = False,
        pad_last: bool = False,
        shard: Shard = WHOLE,
        lookahead: int = 0,
    ) -> None:
        check_batching(batch_size, drop_last, pad_last, shard)
        super().__init__(stream, seed=seed, shard=shard, lookahead=lookahead)
        self.batch_size = batch_size
        self.collate = collate or stack_samples
        self.drop_last = drop_last
        self.pad_last = pad_last

    @property
    def _samples_per_read(self) -> int:
        """Samples read for one batch: of all processes, or of this one if the stream shards itself."""
        return self.batch_size // self.shard.count if self.is_sharded else self.batch_size

    def _read(self) -> list[Any] | None:
        assert self._iterator is not None
        samples = list(islice(self._iterator, self._samples_per_read))
        return samples if samples and not (self.drop_last and len(samples) < self._samples_per_read) else None

    def _skip(self, epoch: int, batch: int, position: int) -> None:
        assert self._iterator is not None
        left = position // self.shard.count if self.is_sharded else position
        for number in range(-(-left // self._samples_per_read)):
            with preserved_generators():
                seed_generators(sample_key(self.seed, epoch, number))
                left -= sum(1 for _ in islice(self._iterator, min(left, self._samples_per_read)))

    def _made(self, content: list[Any], begin: Origin) -> HostBatch:
        size = len(content)
        low, high = (0, size) if self.is_sharded else self.shard.bounds(size)
        mine = content[low:high] or content[:1]
        data = self.collate(mine)
        if self.pad_last:
            data = pad_rows(data, high - low, self.batch_size // self.shard.count)
        first = begin.samples + low
        origin = Origin(begin.seed, begin.epoch, np.arange(first, first + len(mine)))
        if self.shard.is_whole:
            return HostBatch(data, size, 0, origin)
        if self.is_sharded:
            return HostBatch(data, size, 0, origin, None, size * self.shard.count)
        return HostBatch(data, high - low, 0, origin, size, size)


class NumpyLoaderSource(_IteratedSource):
    """Batches of a loader the user brings: any iterable of batches, or a function that opens one, used as it is.

    `batch_size` is the size of a full batch, needed only with `pad_last`. `count` returns the number of samples in a
    batch. Several processes read the same batches and take their shard of each, unless the loader shards the data
    itself (`is_sharded`).
    """

    def __init__(
        self,
        loader: Any,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        count: Callable[[Any], int] | None = None,
        pad_last: bool = False,
        shard: Shard = WHOLE,
        lookahead: int = 0,
    ) -> None:
        if pad_last and batch_size is None:
            raise BadArgument(expected("batch_size with pad_last, to know how many rows a batch has", None))
        check_batching(1 if batch_size is None else batch_size, False, pad_last, shard)
        super().__init__(loader, seed=seed, shard=shard, lookahead=lookahead)
        self.batch_size = batch_size
        self.pad_last = pad_last
        self._count = count or batch_length

    @property
    def batches_per_epoch(self) -> int | None:
        try:
            return len(self.stream)
        except TypeError:
            return None

    def _read(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator, None)

    def _skip(self, epoch: int, batch: int, position: int) -> None:
        for number in range(batch):
            self._next(epoch, number)

    def _made(self, content: Any, begin: Origin) -> HostBatch:
        size = self._count(content)
        origin = Origin(begin.seed, begin.epoch, np.arange(begin.samples, begin.samples + size))
        data = map_batch(lambda value: np.asarray(value) if is_instance_of(value, "torch.Tensor") else value, content)
        made = self.shard.of_loaded(HostBatch(data, size, 0, origin), self.is_sharded)
        if self.pad_last:
            assert self.batch_size is not None
            made = made._replace(data=pad_rows(made.data, made.size, self.batch_size // self.shard.count))
        return made


def opener(stream: Any) -> Callable[[], Iterator[Any]]:
    """A function that starts an iteration over a stream, or over what a function without arguments returns."""
    if isinstance(stream, Iterator):
        what = "data that can be iterated again"
        do = "Pass the function that makes it, or an object with __iter__."
        raise BadArgument(expected(what, f"a {type(stream).__name__}, which can be read only once", do))
    if isinstance(stream, Iterable) or hasattr(stream, "__iter__"):
        return lambda: iter(stream)
    if callable(stream):
        return lambda: iter(stream())
    raise BadArgument(expected("an iterable of samples or batches, or a function that opens one", type(stream)))
