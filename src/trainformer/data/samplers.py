"""Samplers: class-balanced, P classes with K samples each, repeated augmentation; and samplers by name.

Every order is a pure function of (seed, epoch) and of the labels: no sample is read.

A sampler works in two places. The engine calls `order(epoch, seed)` for the whole epoch and shards it itself. In a
user's own `DataLoader` it is an ordinary torch sampler that yields the indices of its rank. torch only iterates over
samplers, so nothing here imports it.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.labels import is_stream, labels_of, length
from trainformer.data.order import preserved_generators, sample_key, seed_generators

REPEATS = 3  # as in the paper on repeated augmentation for image classifiers, and in DeiT
# Each sampler has its own stream of random numbers, independent of plain shuffling with the same seed.
_BALANCED, _PK, _REPEATED = 0xBA1A, 0x9C, 0x4E9


class EpochSampler(ABC):
    """Base of the samplers: epochs, ranks, and a position that can be saved.

    `order(epoch)` is the whole epoch, over all ranks. Iterating yields this rank's indices of the epoch given to
    `set_epoch`, in blocks of `block` neighbours that stay together; the ranks' indices are disjoint and complete. Ranks
    get the same number of samples if the number of blocks is divisible by the world size.

    `state_dict` holds how far the current iteration came, and after `load_state_dict` the next iteration resumes there.
    A `DataLoader` with workers draws indices ahead of time, so save the loader's position instead.
    """

    num_samples: int  # length of an epoch over all ranks
    block = 1

    def __init__(self, seed: int = 0, num_replicas: int | None = None, rank: int | None = None) -> None:
        self.seed = seed
        this_rank, world_size = 0, 1
        if "torch" in sys.modules:
            from trainformer.utils import distributed

            this_rank, world_size = distributed.rank(), distributed.world_size()
        self.num_replicas = world_size if num_replicas is None else num_replicas
        self.rank = this_rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise BadArgument(expected(f"rank to be from 0 to {self.num_replicas - 1}", self.rank))
        self.epoch = 0
        self._position = 0
        self._start = 0

    @abstractmethod
    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        """Indices of the whole epoch, over all ranks. `seed=None` is the seed of the sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A restored position is dropped if it belongs to another epoch."""
        if epoch != self.epoch:
            self.epoch, self._position, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[int]:
        # Not at the first `next`: state_dict() refers to this iteration from now on.
        self._position, self._start = self._start, 0
        order = self.order(self.epoch)
        is_mine = np.arange(len(order)) // self.block % self.num_replicas == self.rank
        return self._counted(order[is_mine][self._position :].tolist())

    def _counted(self, indices: list[int]) -> Iterator[int]:
        for index in indices:
            self._position += 1
            yield index

    def __len__(self) -> int:
        """Number of indices of this rank."""
        whole, rest = divmod(self.num_samples, self.block)
        mine = len(range(self.rank, whole, self.num_replicas)) * self.block
        return mine + (rest if whole % self.num_replicas == self.rank else 0)

    def whole(self) -> Self:
        """A copy that yields the whole epoch, for callers that shard it themselves, as the engine does."""
        other = copy.copy(self)
        other.num_replicas, other.rank = 1, 0
        return other

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self._start or self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]
        self._position = self._start = state["position"]

    def _random(self, stream: int, epoch: int, seed: int | None) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed if seed is None else seed, stream, epoch]))


class ClassBalancedSampler(EpochSampler):
    """The same number of samples of every class, in random order; `num_samples` in total (default: as the dataset).

    If that is not a multiple of the number of classes, each epoch draws at random which classes get one more. All
    samples of a small class are used before one repeats. Classes without samples are ignored.

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
        self.num_samples = len(labels) if num_samples is None else positive("num_samples", num_samples)
        _, self._classes, self._counts = np.unique(labels, return_inverse=True, return_counts=True)

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        rng = self._random(_BALANCED, epoch, seed)
        classes = len(self._counts)
        due = np.full(classes, self.num_samples // classes)
        due[rng.permutation(classes)[: self.num_samples % classes]] += 1
        # Every sample once per pass; the passes of a class follow each other, each in a new order.
        passes = -(-due // self._counts)
        samples = np.repeat(np.arange(len(self._classes)), passes[self._classes])
        pass_number = np.arange(len(samples)) - np.repeat(_starts(passes[self._classes]), passes[self._classes])
        by_class = np.lexsort((rng.random(len(samples)), pass_number, self._classes[samples]))
        drawn = passes * self._counts
        rank_in_class = np.arange(len(samples)) - np.repeat(_starts(drawn), drawn)
        chosen = samples[by_class][rank_in_class < np.repeat(due, drawn)]
        # Shuffle the order of the classes; each class keeps its own sequence.
        turns = rng.permutation(np.repeat(np.arange(classes), due))
        order = np.empty(self.num_samples, dtype=np.int64)
        order[np.argsort(turns, kind="stable")] = chosen
        return order


class PKSampler(EpochSampler):
    """Batches of `p` classes with `k` samples each, for metric learning: `p * k` consecutive indices are a batch.

    The classes of a batch are distinct, and so are the samples of a class if it has `k`. Over an epoch of `num_batches`
    (default: as many as the data fill) every class is used before one repeats, and so is every sample of a class. A
    rank gets whole batches. In a `DataLoader`, also pass `batch_size=sampler.batch_size`.

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
        self.p, self.k = positive("p", p), positive("k", k)
        self.batch_size = self.block = self.p * self.k
        labels = known_labels(dataset, type(self).__name__)
        by_class = np.argsort(labels, kind="stable")
        self._members = np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1)
        if p > len(self._members):
            what = f"p to be at most {len(self._members)}, the number of classes in the data"
            do = f"Pass p={len(self._members)} or less, and a larger k for a batch of the same size."
            raise BadArgument(expected(what, p, do))
        fits = max(1, len(labels) // self.batch_size)
        self.num_batches = fits if num_batches is None else positive("num_batches", num_batches)
        self.num_samples = self.num_batches * self.batch_size

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
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
    """Draws from a set in random rounds: all items before any repeats.

    If a draw spans two rounds, the items it already has come last in the second one. So a draw only repeats items if
    the set is smaller than the draw, and then as few as possible.
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
                    self._left.sort(key=drawn.count)  # stable: otherwise still random
            missing = count - len(drawn)
            drawn += self._left[:missing]
            self._left = self._left[missing:]
        return drawn


class RepeatedAugmentSampler(EpochSampler):
    """Every sample `repeats` times in a row, so that a batch holds several augmentations of it (repeated augmentation).

    An epoch stays as long as the dataset, so it holds 1/`repeats` of the samples; every `repeats` epochs each sample is
    seen. If the length is not a multiple of `repeats`, the last sample of an epoch is repeated less often; if the batch
    size is not, the repetitions of a sample may fall into two batches.

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
        self.repeats = self.block = positive("repeats", repeats)
        size = dataset_or_length if isinstance(dataset_or_length, int) else length(dataset_or_length)
        if size is None or size < 1:
            raise DataError(expected("data with a length of at least 1", "none" if size is None else size))
        self.num_samples = size

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        round_number, part = divmod(epoch, self.repeats)
        dealt = self._random(_REPEATED, round_number, seed).permutation(self.num_samples)
        share = -(-self.num_samples // self.repeats)
        chosen = dealt[(part * share + np.arange(share)) % self.num_samples]
        return np.repeat(chosen, self.repeats)[: self.num_samples]


class ListedSampler(EpochSampler):
    """Wraps any sampler of single indices as a pure function of (seed, epoch).

    A copy of the sampler gets `set_epoch` and is listed with all generators seeded, its own torch generator included.
    The process's generators stay untouched, and so does the sampler: some shuffle their own lists in place, which would
    make the second epoch depend on the first.

    >>> from torch.utils.data import RandomSampler
    >>> sampler = ListedSampler(RandomSampler(range(5)), size=5)
    >>> sorted(sampler.order(epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        sampler: Any,
        size: int,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed, num_replicas, rank)
        self.sampler = sampler
        self.num_samples = len(sampler)
        self._size = size

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        key = sample_key(self.seed if seed is None else seed, epoch, 0)
        sampler = self._copy()
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        own: Any = getattr(sampler, "generator", None)
        with preserved_generators():
            seed_generators(key)
            if not hasattr(own, "manual_seed"):  # torch generators have it, NumPy's do not
                return self._checked(list(sampler))
            before = own.get_state()
            own.manual_seed(key)
            try:
                return self._checked(list(sampler))
            finally:
                own.set_state(before)

    def _copy(self) -> Any:
        """A deep copy that shares the data, which may be large, and the generator."""
        shared = [getattr(self.sampler, name, None) for name in ("data_source", "dataset", "generator")]
        try:
            return copy.deepcopy(self.sampler, {id(part): part for part in shared if part is not None})
        except Exception:  # something in it cannot be copied: list the original
            return self.sampler

    def _checked(self, listed: list[Any]) -> np.ndarray:
        name = type(self.sampler).__name__
        try:
            order = np.asarray([int(index) for index in listed], dtype=np.int64)
        except (TypeError, ValueError) as error:
            own = "your own DataLoader: DataLoader(dataset, batch_sampler=...), which can be passed as data"
            received, do = listed[0] if listed else listed, f"Put a batch sampler into {own}."
            raise BadArgument(expected(f"{name} to give one index at a time", received, do)) from error
        outside = order[(order < 0) | (order >= self._size)]
        if len(outside):
            raise BadArgument(expected(f"{name} to give indices from 0 to {self._size - 1}", int(outside[0])))
        if len(order) != self.num_samples:
            raise BadArgument(expected(f"{name} to give {self.num_samples} indices, as its len() says", len(order)))
        return order


def known_labels(dataset: Any, who: str) -> np.ndarray:
    """The labels, without reading samples, else an error."""
    labels = None if is_stream(dataset) else labels_of(dataset)
    if labels is None:
        raise DataError(
            f"Expected data whose labels are known without reading every sample for {who}, received "
            f"{type(dataset).__name__}. Give it an attribute `targets` with one integer from 0 for every sample."
        )
    if not len(labels):
        raise DataError(expected("a dataset with at least one sample", "an empty one"))
    return labels


def known_size(dataset: Any) -> int:
    size = None if is_stream(dataset) else length(dataset)
    if size is None:
        raise DataError(expected("a dataset with a length to sample from", type(dataset).__name__))
    return size


def positive(name: str, value: int) -> int:
    """A positive integer, else an error."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise BadArgument(expected(f"{name} to be a positive integer", value))
    return int(value)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


_K = 4  # samples per class for "pk" without a number
_FORMS = {
    "balanced": "'balanced'",
    "length": "'length'",
    "pk": "'pk', 'pk:K' (K samples per class)",
    "repeated": "'repeated', 'repeated:N' (N times each)",
}


def make_sampler(spec: Any, dataset: Any, *, batch_size: int, seed: int, accumulation: int = 1) -> Any:
    """The sampler that `spec` describes, with `order(epoch, seed)` and a length; None for None.

    `spec` is `"balanced"`, `"pk"` or `"pk:K"` (batches of `batch_size // K` classes with K samples each; by default K
    is at least 4 and leaves enough classes), `"repeated"` or `"repeated:N"`, `"length"` (batches of tokenised sequences
    of similar lengths), a sampler of this package or of torch, or a function of the dataset that returns one.

    >>> sampler = make_sampler("pk:2", [(x, x % 3) for x in range(12)], batch_size=4, seed=0)
    >>> sampler.p, sampler.k
    (2, 2)
    """
    if spec is None:
        return None
    if isinstance(spec, str):
        if spec == "length":
            from trainformer.data.text.collate import LengthGroupedSampler

            # Grouped by optimizer step: its content does not depend on the micro-batch size.
            return LengthGroupedSampler(dataset, batch_size * accumulation, seed=seed, num_replicas=1, rank=0)
        return _named(spec, dataset, batch_size, seed)
    if hasattr(spec, "order") and not isinstance(spec, type):
        if isinstance(spec, PKSampler) and spec.batch_size != batch_size:
            what = f"batch_size={spec.batch_size}, for a PKSampler of p={spec.p} classes with k={spec.k} samples each"
            do = f"Pass batch_size={spec.batch_size}, or sampler='pk:{spec.k}', which chooses p by the batch size."
            raise BadArgument(expected(what, batch_size, do))
        return spec.whole() if isinstance(spec, EpochSampler) else spec
    if isinstance(spec, Iterable) and not isinstance(spec, type) and hasattr(spec, "__len__"):
        return ListedSampler(spec, known_size(dataset), seed=seed, num_replicas=1, rank=0)
    if callable(spec):
        made = spec(dataset)
        if made is None or isinstance(made, str) or (callable(made) and not hasattr(made, "__iter__")):
            name = getattr(spec, "__name__", type(spec).__name__)
            raise BadArgument(expected(f"{name}(dataset) to return a sampler", made))
        return make_sampler(made, dataset, batch_size=batch_size, seed=seed)
    what = f"sampler to be one of {', '.join(map(repr, _FORMS))}, a sampler with a length, or a function of the data"
    raise BadArgument(expected(what, type(spec).__name__))


def _named(spec: str, dataset: Any, batch_size: int, seed: int) -> EpochSampler:
    word, _, number = spec.partition(":")
    if word not in _FORMS or (number and word in ("balanced", "length")):
        forms = f"{did_you_mean(word, _FORMS)} Known: {', '.join(_FORMS.values())}."
        raise BadArgument(expected("the name of a sampler", spec, forms.strip()))
    if number and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise BadArgument(expected(f"a positive integer in '{word}:N'", spec, f"Pass '{word}:4', for instance."))
    if word == "balanced":
        return ClassBalancedSampler(dataset, seed=seed, num_replicas=1, rank=0)
    if word == "repeated":
        repeats = int(number) if number else REPEATS
        return RepeatedAugmentSampler(known_size(dataset), repeats, seed=seed, num_replicas=1, rank=0)
    classes = len(np.unique(known_labels(dataset, "PKSampler")))
    k = int(number) if number else _default_k(batch_size, classes)
    if batch_size % k:
        what = f"batch_size to be a multiple of {k}, the number of samples per class of sampler={spec!r}"
        raise BadArgument(expected(what, batch_size, f"Pass batch_size={max(1, batch_size // k) * k}, for instance."))
    if batch_size // k > classes:
        what = f"at least {batch_size // k} classes for sampler={spec!r} with batch_size={batch_size}"
        do = f"Pass sampler='pk:{_default_k(batch_size, classes)}', or batch_size={classes * k}."
        raise BadArgument(expected(what, classes, do))
    return PKSampler(dataset, batch_size // k, k, seed=seed, num_replicas=1, rank=0)


def _default_k(batch_size: int, classes: int) -> int:
    """The smallest K from 4 on that divides the batch, else the largest below; a batch needs at least two classes."""
    fitting = [k for k in range(2, batch_size) if batch_size % k == 0 and 2 <= batch_size // k <= classes]
    return min((k for k in fitting if k >= _K), default=max(fitting, default=_K))
