"""Sources of NumPy batches over what can only be iterated: streams of samples, and loaders that users bring.

Owns resuming them exactly. A stream with `state_dict` and `load_state_dict` (HF `datasets`, `TokenStream`) or whose
iterators have `get_state` and `set_state` (grain) goes on where it was, and nothing is read twice. Any other is read
again up to the place, and so is a stream of HF `datasets` with a shuffle buffer, whose content no state holds.

Whatever a stream draws from the process's generators while it reads a batch is a function of (seed, epoch, number of
the batch), so that it draws the same after resuming.
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
from trainformer.data.fetcher import Collate
from trainformer.data.given_loaders import batch_length
from trainformer.data.hub import has_shuffle_buffer
from trainformer.data.labels import is_a
from trainformer.data.numpy_loader import check_batching
from trainformer.data.order import preserved_generators, sample_key, seed_generators
from trainformer.data.sharding import ALL, Shard, check_divisible, is_divided, undivided
from trainformer.data.stacking import filled_up, stack_samples

logger = logging.getLogger("trainformer")

_STREAM, _ITERATOR, _NOBODY = "stream", "iterator", "nobody"  # who knows the place


class _IteratedSource(ABC):
    """What the two sources share: beginning, reading and resuming an iteration."""

    def __init__(self, stream: Any, *, seed: int, shard: Shard, kept: int) -> None:
        self.stream = undivided(stream) if not shard.is_all else stream
        self.seed = seed
        self.shard = shard
        self.is_divided = is_divided(stream)
        self._open = opener(self.stream)
        self._iterator: Iterator[Any] | None = None
        self._pending: dict[str, Any] | None = None
        self._states: deque[dict[str, Any]] | None = deque(maxlen=kept + 1) if kept else None

    # -- the place -----------------------------------------------------------------------------------------

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """Where the latest iteration is, as plain values: after all batches that were given out but the last `unused`.

        A caller that takes batches ahead of time says how many it has not used yet; a source made with `kept=n` knows
        the places before the last n batches.
        """
        if self._pending is not None:  # nothing was read since
            return self._pending
        if self._states is None and unused == 0:
            return self._place()
        states = self._states or ()
        if unused >= max(1, len(states)):
            raise BadArgument(expected("at most `kept` batches that were not used", unused, "Pass kept=... before."))
        return states[-1 - unused]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there; the next call of `batches` goes on from it."""
        if not isinstance(state, Mapping) or state.get("known_by") not in (_STREAM, _ITERATOR, _NOBODY):
            raise DataError(expected("the state of a stream, as state_dict() gives it", state))
        self._pending = dict(state)

    def _place(self) -> dict[str, Any]:
        if has_state(self.stream):
            return {"known_by": _STREAM, "place": _plain(self.stream.state_dict())}
        if hasattr(self._iterator, "get_state"):
            return {"known_by": _ITERATOR, "place": _plain(self._iterator.get_state())}  # type: ignore[union-attr]
        return {"known_by": _NOBODY, "place": None}

    def _resumed(self, state: dict[str, Any]) -> Iterator[Any] | None:
        """The rest of the iteration of which a state tells; None if it does not know the place."""
        known_by, place = state["known_by"], _unplain(state["place"])
        if known_by == _NOBODY:
            return None
        if known_by == _STREAM and has_state(self.stream):
            self.stream.load_state_dict(place)
            return self._open()
        iterator = self._open()
        if known_by == _ITERATOR and hasattr(iterator, "set_state"):
            iterator.set_state(place)  # type: ignore[attr-defined]
            return iterator
        raise DataError(
            expected(
                f"data that know their place as they did when the state was saved (by their {known_by})",
                type(self.stream).__name__,
                "Pass the same data as before.",
            )
        )

    # -- reading -------------------------------------------------------------------------------------------

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """What is left of an epoch after `batch` batches with `position` samples."""
        parts: list[Any] = [self.stream, *(getattr(self.stream, name, None) for name in ("dataset", "sampler"))]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        pending, self._pending = self._pending, None
        with preserved_generators():
            seed_generators(sample_key(self.seed, epoch, batch))
            self._iterator = None if pending is None else self._resumed(pending)
        if self._iterator is not None:
            first = self._next(epoch, batch)
            # At the very end of an epoch a stream has nothing left; the next one then begins as usual.
            if first is not None or batch:
                yield from self._sized(epoch, batch, position, first)
                return
        with preserved_generators():
            seed_generators(sample_key(self.seed, epoch, 0))
            self._iterator = self._open()
        if batch:
            logger.info("resuming inside epoch %d: reading %d batches again to find the place", epoch, batch)
            self._skip(epoch, batch, position)
        yield from self._sized(epoch, batch, position, self._next(epoch, batch))

    def _next(self, epoch: int, number: int) -> Any:
        """What the next batch is made of; None at the end."""
        with preserved_generators():
            seed_generators(sample_key(self.seed, epoch, number))
            return self._read()

    def _sized(self, epoch: int, batch: int, position: int, content: Any) -> Iterator[HostBatch]:
        """Nobody knows which samples these are; their places in the epoch stand for them."""
        for number in count(batch + 1):
            if content is None:
                return
            made = self._made(content, Origin(self.seed, epoch, position))
            if self._states is not None:
                self._states.append(self._place())
            position += made.size if made.consumed is None else made.consumed
            yield made
            content = self._next(epoch, number)

    @abstractmethod
    def _read(self) -> Any:
        """What one batch is made of; None at the end."""

    @abstractmethod
    def _skip(self, epoch: int, batch: int, position: int) -> None:
        """Read again what was seen."""

    @abstractmethod
    def _made(self, content: Any, begin: Origin) -> HostBatch:
        """This process's part of the batch. `begin` holds the place of its first sample."""


class StreamSource(_IteratedSource):
    """Batches of a stream of samples: an iterable that can be iterated again, or a function that opens one.

    Options are those of `NumpySource`. Several processes read the same samples and take their part of each batch,
    unless the stream divides itself (`is_divided`).
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
        shard: Shard = ALL,
        kept: int = 0,
    ) -> None:
        check_batching(batch_size, drop_last, pad_last, shard)
        super().__init__(stream, seed=seed, shard=shard, kept=kept)
        self.batch_size = batch_size
        self.collate = collate or stack_samples
        self.drop_last = drop_last
        self.pad_last = pad_last

    @property
    def _share(self) -> int:
        """Samples that are read for a batch: of all processes, or of this one where the stream divides itself."""
        return self.batch_size // self.shard.count if self.is_divided else self.batch_size

    def _read(self) -> list[Any] | None:
        assert self._iterator is not None
        samples = list(islice(self._iterator, self._share))
        return samples if samples and not (self.drop_last and len(samples) < self._share) else None

    def _skip(self, epoch: int, batch: int, position: int) -> None:
        assert self._iterator is not None
        left = position // self.shard.count if self.is_divided else position
        for number in range(-(-left // self._share)):
            with preserved_generators():
                seed_generators(sample_key(self.seed, epoch, number))
                left -= sum(1 for _ in islice(self._iterator, min(left, self._share)))

    def _made(self, content: list[Any], begin: Origin) -> HostBatch:
        size = len(content)
        low, high = (0, size) if self.is_divided else self.shard.bounds(size)
        mine = content[low:high] or content[:1]
        data = self.collate(mine)
        if self.pad_last:
            data = filled_up(data, high - low, self.batch_size // self.shard.count)
        first = begin.samples + low
        origin = Origin(begin.seed, begin.epoch, np.arange(first, first + len(mine)))
        if self.shard.is_all:
            return HostBatch(data, size, 0, origin)
        if self.is_divided:
            return HostBatch(data, size, 0, origin, None, size * self.shard.count)
        return HostBatch(data, high - low, 0, origin, size, size)


class BatchSource(_IteratedSource):
    """Batches of a loader that the user made: any iterable of batches, or a function that opens one, used as it is.

    `batch_size` is that of a full batch, and needed only with `pad_last`. `count` tells the samples of a batch of
    unusual form. Several processes read the same batches and take their part of each, unless the loader divides the
    data itself (`is_divided`).
    """

    def __init__(
        self,
        loader: Any,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        count: Callable[[Any], int] | None = None,
        pad_last: bool = False,
        shard: Shard = ALL,
        kept: int = 0,
    ) -> None:
        if pad_last and batch_size is None:
            raise BadArgument(expected("batch_size with pad_last, to know how many rows a batch has", None))
        check_batching(1 if batch_size is None else batch_size, False, pad_last, shard)
        super().__init__(loader, seed=seed, shard=shard, kept=kept)
        self.batch_size = batch_size
        self.pad_last = pad_last
        self._count = count or batch_length

    @property
    def batches_per_epoch(self) -> int | None:
        """The loader's length, where it has one."""
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
        made = HostBatch(without_tensors(content), size, 0, origin)
        if not self.shard.is_all and self.is_divided:
            made = made._replace(consumed=size * self.shard.count)
        elif not self.shard.is_all:
            check_divisible(made)
            made = self.shard.cut(made)
        if self.pad_last:
            assert self.batch_size is not None
            made = made._replace(data=filled_up(made.data, made.size, self.batch_size // self.shard.count))
        return made


def opener(stream: Any) -> Callable[[], Iterator[Any]]:
    """How to begin an iteration over a stream, or over what a function without arguments returns."""
    if isinstance(stream, Iterator):
        raise BadArgument(
            expected(
                "data that can be iterated again",
                f"a {type(stream).__name__}, which is used up once it was read",
                "Pass the function that makes it, or an object whose __iter__ begins anew.",
            )
        )
    if isinstance(stream, Iterable) or hasattr(stream, "__iter__"):
        return lambda: iter(stream)
    if callable(stream):
        return lambda: iter(stream())
    raise BadArgument(expected("an iterable of samples or batches, or a function that opens one", type(stream)))


def has_state(stream: Any) -> bool:
    """Whether a stream can say where it is, and go there."""
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict") and not has_shuffle_buffer(stream)


def without_tensors(data: Any) -> Any:
    """A nested batch with arrays in place of torch's tensors; everything else as it is."""
    if is_a(data, "torch.Tensor"):
        return np.asarray(data)
    if isinstance(data, Mapping):
        return {key: without_tensors(value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(without_tensors, data))
    return type(data)(map(without_tensors, data)) if isinstance(data, list | tuple) else data


def _plain(place: Any) -> Any:
    """A place as JSON can write it: grain's loaders say theirs in bytes."""
    return {"base64": base64.b64encode(place).decode()} if isinstance(place, bytes) else place


def _unplain(place: Any) -> Any:
    is_bytes = isinstance(place, Mapping) and set(place) == {"base64"}
    return base64.b64decode(place["base64"]) if is_bytes else place
