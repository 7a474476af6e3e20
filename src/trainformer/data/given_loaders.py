"""Sources of batches over loaders that users bring: any iterable of batches, used as it is.

Owns resuming them: through their own state where they have one, else by reading again up to the place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import HostBatch, Origin
from trainformer.data.dataset import is_array
from trainformer.data.order import preserved_generators, sample_key, seed_generators
from trainformer.data.sharding import ALL, Shard, check_divisible, is_divided

logger = logging.getLogger("trainformer")

#: Samples in a batch.
Count = Callable[[Any], int]


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

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
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

    def _sized(self, epoch: int, batches: Iterable[Any], position: int) -> Iterator[HostBatch]:
        """Nobody knows which samples these are; their places in the epoch stand for them."""
        for data in batches:
            size = self._count(data)
            batch = HostBatch(data, size, 0, Origin(self.seed, epoch, np.arange(position, position + size)))
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

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
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


def loader_source(loader: Iterable[Any], seed: int, count: Count | None = None, shard: Shard = ALL) -> LoaderSource:
    """A source for a loader that the user brings; `count` tells the samples of a batch of unusual form."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulLoaderSource if stateful else LoaderSource)(loader, seed, count, shard)


def batch_length(data: Any) -> int:
    """Number of samples in a batch of any usual shape.

    >>> batch_length({"input_ids": np.zeros((4, 7)), "labels": np.zeros(4)})
    4
    """
    if is_array(data):
        return len(data)
    if isinstance(data, Mapping):
        return batch_length(next(iter(data.values()), None))
    if isinstance(data, (list, tuple)) and data:
        first = data[0]
        return batch_length(first) if is_array(first) or isinstance(first, (Mapping, list, tuple)) else len(data)
    raise BadArgument(
        expected(
            "a batch made of tensors whose first dimension is the sample",
            type(data).__name__,
            "Return Loss(sum, weight) from train_step and tensors from the loader.",
        )
    )
