"""Which samples an epoch holds, and in which order: classes balanced, batches of P classes with K samples, repetitions.

Owns the samplers; their names are in `sampler_names`. Every order is a pure function of (seed, epoch), made from labels
alone: no image is read. Batches, workers and the random numbers of a sample are the loader's business.

A sampler serves two masters. The engine asks for `order(epoch, seed)`, the whole epoch, and divides it itself. In a
`DataLoader` of the user's own it is an ordinary torch sampler that yields the share of this rank; torch asks no more
of one than to be iterated, so nothing here imports it.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.labels import is_stream, labels_of, length
from trainformer.data.order import preserved_generators, sample_key, seed_generators

REPEATS = 3  # as in the paper on repeated augmentation for image classifiers, and in DeiT
# Each sampler has a stream of random numbers of its own, apart from those of plain shuffling with the same seed.
_BALANCED, _PK, _REPEATED = 0xBA1A, 0x9C, 0x4E9


class EpochSampler(ABC):
    """What the samplers share: epochs, ranks, and a position that can be saved.

    `order(epoch)` holds the whole epoch, over all ranks. Iterating gives the share of this rank in the epoch that
    `set_epoch` named, in blocks of `block` neighbours, which stay together; the shares of all ranks are disjoint and
    make up the whole. So that ranks have equally much to do, let the number of blocks be divisible by their number.

    `state_dict` says how far the latest iteration came, and after `load_state_dict` the next one goes on from there. A
    `DataLoader` with workers asks for indices ahead of time: then it is the loader's position that counts.
    """

    block = 1

    def __init__(self, seed: int = 0, num_replicas: int | None = None, rank: int | None = None) -> None:
        self.seed = seed
        this_rank, world_size = _place()
        self.num_replicas = world_size if num_replicas is None else num_replicas
        self.rank = this_rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise BadArgument(expected(f"rank to be from 0 to {self.num_replicas - 1}", self.rank))
        self.epoch = 0
        self._position = 0
        self._start = 0

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Length of an epoch over all ranks."""

    @abstractmethod
    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        """Indices of the whole epoch, over all ranks. `seed=None` is the seed of the sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. A position that was restored belongs to its own epoch and is then dropped."""
        if epoch != self.epoch:
            self.epoch, self._position, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[int]:
        # Not at the first `next`: from now on, state_dict() speaks of this iteration.
        self._position, self._start = self._start, 0
        order = self.order(self.epoch)
        return self._counted(order[self._is_mine(len(order))][self._position :].tolist())

    def _counted(self, indices: list[int]) -> Iterator[int]:
        for index in indices:
            self._position += 1
            yield index

    def __len__(self) -> int:
        """Indices that this rank gets."""
        whole, rest = divmod(self.num_samples, self.block)
        mine = len(range(self.rank, whole, self.num_replicas)) * self.block
        return mine + (rest if whole % self.num_replicas == self.rank else 0)

    def whole(self) -> Self:
        """The same sampler for somebody who divides the epoch over ranks himself, as the engine does."""
        other = copy.copy(self)
        other.num_replicas, other.rank = 1, 0
        return other

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many indices of it were given out."""
        return {"epoch": self.epoch, "position": self._start or self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there: the next iteration gives the rest of that epoch."""
        self.epoch = state["epoch"]
        self._position = self._start = state["position"]

    def _is_mine(self, size: int) -> np.ndarray:
        return np.arange(size) // self.block % self.num_replicas == self.rank

    def _random(self, stream: int, epoch: int, seed: int | None) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed if seed is None else seed, stream, epoch]))


def _place() -> tuple[int, int]:
    """The number of this process, and of all that train together, as torch knows them."""
    if "torch" not in sys.modules:
        return 0, 1
    from trainformer.utils.distributed import rank, world_size

    return rank(), world_size()


class ClassBalancedSampler(EpochSampler):
    """Equally many samples of every class, in random order; `num_samples` in all, as many as the data has by default.

    Where that is no multiple of the number of classes, the lot decides in every epoch which classes get one more.
    Of a class with too few samples all are used before one is used again. A class without samples is no class.

    >>> sampler = ClassBalancedSampler([("a", 0), ("b", 0), ("c", 0), ("d", 2)])
    >>> sorted(sampler.order(epoch=0).tolist()).count(3)
    2
    """

    def __init__(
        self,
        dataset: Any,
        num_samples: int | None = None,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed, num_replicas, rank)
        labels = known_labels(dataset, type(self).__name__)
        self._num_samples = len(labels) if num_samples is None else _positive("num_samples", num_samples)
        _, self._classes, self._counts = np.unique(labels, return_inverse=True, return_counts=True)

    @property
    def num_samples(self) -> int:
        """Length of an epoch over all ranks."""
        return self._num_samples

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        """Indices of the whole epoch, over all ranks."""
        rng = self._random(_BALANCED, epoch, seed)
        classes = len(self._counts)
        due = np.full(classes, self._num_samples // classes)
        due[rng.permutation(classes)[: self._num_samples % classes]] += 1
        # Every sample once per pass, the passes of a class one after the other, each in an order of its own.
        passes = -(-due // self._counts)
        samples = np.repeat(np.arange(len(self._classes)), passes[self._classes])
        pass_number = np.arange(len(samples)) - np.repeat(_starts(passes[self._classes]), passes[self._classes])
        by_class = np.lexsort((rng.random(len(samples)), pass_number, self._classes[samples]))
        drawn = passes * self._counts
        rank_in_class = np.arange(len(samples)) - np.repeat(_starts(drawn), drawn)
        chosen = samples[by_class][rank_in_class < np.repeat(due, drawn)]
        # Shuffle whose turn it is, and let each class keep its own sequence.
        turns = rng.permutation(np.repeat(np.arange(classes), due))
        order = np.empty(self._num_samples, dtype=np.int64)
        order[np.argsort(turns, kind="stable")] = chosen
        return order


class PKSampler(EpochSampler):
    """Batches of `p` classes with `k` samples each, as metric learning wants them: consecutive `p * k` are a batch.

    The classes of a batch differ, and so do the samples of a class where it has `k`. Over an epoch of `num_batches`
    (as many as the data fill, by default) every class has its turn before one comes again, and so has every sample of
    a class. A rank gets whole batches. In a `DataLoader`, pass `batch_size=sampler.batch_size` along.

    >>> sampler = PKSampler([(x, x % 3) for x in range(12)], p=2, k=2)
    >>> (sampler.order(epoch=0)[:4] % 3).tolist()  # the classes of the first batch
    [0, 0, 1, 1]
    """

    def __init__(
        self,
        dataset: Any,
        p: int = 8,
        k: int = 4,
        num_batches: int | None = None,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed, num_replicas, rank)
        self.p, self.k = _positive("p", p), _positive("k", k)
        labels = known_labels(dataset, type(self).__name__)
        by_class = np.argsort(labels, kind="stable")
        self._members = np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1)
        if p > len(self._members):
            raise BadArgument(
                expected(
                    f"p to be at most {len(self._members)}, the number of classes in the data",
                    p,
                    f"Pass p={len(self._members)} or less, and a larger k for a batch of the same size.",
                )
            )
        fits = max(1, len(labels) // self.batch_size)
        self.num_batches = fits if num_batches is None else _positive("num_batches", num_batches)

    @property
    def batch_size(self) -> int:
        """Samples of a batch: p * k."""
        return self.p * self.k

    @property
    def block(self) -> int:  # type: ignore[override]
        """What one rank gets at a time: a batch."""
        return self.batch_size

    @property
    def num_samples(self) -> int:
        """Length of an epoch over all ranks."""
        return self.num_batches * self.batch_size

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        """Indices of the whole epoch, over all ranks; every `batch_size` of them are a batch."""
        rng = self._random(_PK, epoch, seed)
        classes = _Cycle(np.arange(len(self._members)), rng)
        samples: dict[int, _Cycle] = {}
        order: list[int] = []
        for _ in range(self.num_batches):
            for number in classes.draw(self.p):
                if number not in samples:
                    samples[number] = _Cycle(self._members[number], rng)
                order += samples[number].draw(self.k)
        return np.asarray(order, dtype=np.int64)


class _Cycle:
    """Draws from a set over and over: in random order, and all of it before anything comes again.

    Where a draw begins with the end of one round and goes on into the next, what it has already is put last in that
    round. So a draw repeats nothing unless the set is smaller than the draw, and then as little as can be.
    """

    def __init__(self, items: np.ndarray, rng: np.random.Generator) -> None:
        self._items = items
        self._rng = rng
        self._left: list[int] = []

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < count:
            if not self._left:
                self._left = self._rng.permutation(self._items).tolist()
                if drawn:
                    self._left.sort(key=drawn.count)  # stable: else as random as before
            missing = count - len(drawn)
            drawn += self._left[:missing]
            self._left = self._left[missing:]
        return drawn


class RepeatedAugmentSampler(EpochSampler):
    """Every sample `repeats` times in a row, so that a batch holds it several times, augmented differently each time.

    An epoch stays as long as the data, and so holds a share of 1/`repeats` of the samples. They are dealt out in rounds
    of `repeats` epochs, and over a round (epochs 0 to `repeats - 1`, and so on) every sample is seen. Where the length
    is no multiple of `repeats`, the last sample of an epoch occurs less often; where the batch size is none, a sample
    at the border of two batches is divided between them.

    >>> RepeatedAugmentSampler(4, repeats=2).order(epoch=0).tolist()
    [0, 0, 2, 2]
    """

    def __init__(
        self,
        dataset_or_length: Any,
        repeats: int = REPEATS,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed, num_replicas, rank)
        self.repeats = _positive("repeats", repeats)
        size = dataset_or_length if isinstance(dataset_or_length, int) else length(dataset_or_length)
        if size is None or size < 1:
            raise DataError(expected("data with a length of at least 1", "none" if size is None else size))
        self._size = size

    @property
    def block(self) -> int:  # type: ignore[override]
        """What stays together on one rank: the repetitions of a sample."""
        return self.repeats

    @property
    def num_samples(self) -> int:
        """Length of an epoch over all ranks."""
        return self._size

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        """Indices of the whole epoch, over all ranks."""
        round_number, part = divmod(epoch, self.repeats)
        dealt = self._random(_REPEATED, round_number, seed).permutation(self._size)
        share = -(-self._size // self.repeats)
        chosen = dealt[(part * share + np.arange(share)) % self._size]
        return np.repeat(chosen, self.repeats)[: self._size]


class ListedSampler(EpochSampler):
    """Any sampler of single indices as a function of (seed, epoch).

    A copy of it is told the epoch (`set_epoch`) and listed with all generators seeded, its own torch generator too. The
    process's generators are left as they were, and so is the sampler: some shuffle their own lists in place, and their
    second epoch would depend on the first.

    >>> from torch.utils.data import RandomSampler
    >>> sampler = ListedSampler(RandomSampler(range(5)), size=5)
    >>> sorted(sampler.order(epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        sampler: Iterable[int],
        size: int,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed, num_replicas, rank)
        self.sampler = sampler
        self._size = size

    @property
    def num_samples(self) -> int:
        """Length of an epoch over all ranks, as the sampler says it."""
        return len(self.sampler)  # type: ignore[arg-type]

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        """Indices of the whole epoch, over all ranks."""
        key = sample_key(self.seed if seed is None else seed, epoch, 0)
        sampler = self._copy()
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        own: Any = getattr(sampler, "generator", None)
        with preserved_generators():
            seed_generators(key)
            if not hasattr(own, "manual_seed"):  # as torch's have, and NumPy's have not
                return self._checked(list(sampler))
            before = own.get_state()
            own.manual_seed(key)
            try:
                return self._checked(list(sampler))
            finally:
                own.set_state(before)

    def _copy(self) -> Any:
        """The sampler with state of its own, except for the data, which may be large, and its generator."""
        shared = [getattr(self.sampler, name, None) for name in ("data_source", "dataset", "generator")]
        try:
            return copy.deepcopy(self.sampler, {id(part): part for part in shared if part is not None})
        except Exception:  # something in it cannot be copied: then it is listed itself
            return self.sampler

    def _checked(self, listed: list[Any]) -> np.ndarray:
        name = type(self.sampler).__name__
        try:
            order = np.asarray([int(index) for index in listed], dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise BadArgument(
                expected(
                    f"{name} to give one index at a time",
                    listed[0] if listed else listed,
                    "A sampler of whole batches belongs into a DataLoader of your own: "
                    "DataLoader(dataset, batch_sampler=...), which can be passed as data.",
                )
            ) from error
        outside = order[(order < 0) | (order >= self._size)]
        if len(outside):
            raise BadArgument(expected(f"{name} to give indices from 0 to {self._size - 1}", int(outside[0])))
        if len(order) != self.num_samples:
            raise BadArgument(expected(f"{name} to give {self.num_samples} indices, as its len() says", len(order)))
        return order


# -- arguments ---------------------------------------------------------------------------------------------


def known_labels(dataset: Any, who: str) -> np.ndarray:
    """The labels, without reading a sample, or what to do about it."""
    labels = None if is_stream(dataset) else labels_of(dataset)
    if labels is None:
        raise DataError(
            f"Expected data whose labels are known without reading every sample for {who}, received "
            f"{type(dataset).__name__}, which does not say them. Give it an attribute `targets` with one whole number "
            "from 0 for every sample."
        )
    if not len(labels):
        raise DataError(expected("a data set with at least one sample", "an empty one"))
    return labels


def known_size(dataset: Any) -> int:
    size = None if is_stream(dataset) else length(dataset)
    if size is None:
        raise DataError(expected("a data set with a length to sample from", type(dataset).__name__))
    return size


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise BadArgument(expected(f"{name} to be a whole number from 1", value))
    return int(value)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts
