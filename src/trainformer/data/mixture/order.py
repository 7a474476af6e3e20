"""Which sample of which source a mixture draws at each position of an epoch: pure functions of (seed, epoch, position).

The positions of an epoch get evenly spaced numbers between 0 and 1 in random order, and the weights divide this
interval between the sources. So an epoch holds the share of each source that its weight asks for, exact to a sample,
in random order; and with constant weights all epochs hold equally many samples of a source.

A source is read in passes, each in a new random order, which continue from one epoch to the next: each sample comes
once before any comes again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainformer.core.errors import BadArgument, expected
from trainformer.data.mixture.weights import Weights
from trainformer.data.order import GOLDEN, mix_bits, sample_key, sample_keys

EPOCHS = ("longest", "shortest", "total")
MIXES = ("sample", "batch")
# Streams of random numbers independent of plain shuffling with the same seed.
_SOURCES, _PASSES = 0x313C, 0x9A55
_MOST_SAMPLES = 1 << 28  # an epoch of so many takes some 15 GB of memory
_CHUNK = 1 << 16  # positions whose weights are in memory at once


def draw_sources(
    weights: Weights, count: int, *, seed: int, epoch: int, block: int = 0, first_step: int, step_size: int, mix: str
) -> np.ndarray:
    """The number of the source of each of `count` positions. `block` numbers the parts of an epoch of unknown length.

    With ``mix="batch"`` the `step_size` samples of an optimizer step come from one source.
    """
    groups = count if mix == "sample" else -(-count // step_size)
    rng = np.random.Generator(np.random.PCG64([seed, _SOURCES, epoch, block]))
    numbers = (rng.permutation(groups) + 0.5) / groups
    if weights.is_constant:
        found = np.searchsorted(_edges(weights.first()), numbers, side="right").astype(np.uint16)
    else:
        found = np.empty(groups, dtype=np.uint16)
        for begin in range(0, groups, _CHUNK):
            places = np.arange(begin, min(begin + _CHUNK, groups))
            steps = first_step + (places // step_size if mix == "sample" else places)
            unique, inverse = np.unique(steps, return_inverse=True)
            edges = _edges(weights.at(unique))[inverse]
            found[places] = (numbers[places, None] >= edges).sum(axis=1)
    return found if mix == "sample" else np.repeat(found, step_size)[:count]


def _edges(rows: np.ndarray) -> np.ndarray:
    """Where the share of each source ends in [0, 1]."""
    edges = np.cumsum(rows, axis=-1)
    return edges / edges[..., -1:]


def pass_samples(size: int, seed: int, source: int, first: int, count: int, shuffle: bool = True) -> np.ndarray:
    """Indices of the draws `first` to ``first + count`` from a source of `size` samples, pass after pass.

    >>> sorted(pass_samples(4, seed=0, source=1, first=4, count=4).tolist())
    [0, 1, 2, 3]
    >>> whole = pass_samples(4, seed=0, source=1, first=0, count=12)
    >>> whole[3:9].tolist() == pass_samples(4, seed=0, source=1, first=3, count=6).tolist()
    True
    """
    if not shuffle:
        return np.arange(first, first + count) % size
    low, high = first // size, -(-(first + count) // size)
    places = np.arange(size, dtype=np.uint64) * np.uint64(GOLDEN)
    at_once = max(1, (1 << 20) // size)
    orders = []
    for begin in range(low, high, at_once):
        passes = np.arange(begin, min(begin + at_once, high))
        keys = sample_keys(sample_key(seed, _PASSES, source), 0, passes)
        orders.append(np.argsort(mix_bits(keys[:, None] + places), axis=1).ravel())
    return np.concatenate(orders)[first - low * size :][:count] if orders else np.empty(0, np.int64)


class MixtureSampler:
    """The order of the epochs of a mixture of datasets with a length, as indices of their concatenation.

    `epoch` says how many samples an epoch has: a number, ``"total"`` (as many as all sources have together),
    ``"longest"`` (so many that each source is seen completely) or ``"shortest"`` (so many that none repeats). It is a
    multiple of `multiple_of`, so that ``drop_last`` drops nothing. `step_size` is the number of samples of an optimizer
    step.

    >>> from trainformer.data.mixture.weights import make_weights
    >>> weights = make_weights({"a": 1.0, "b": 1.0}, ["a", "b"], [2, 6])
    >>> sampler = MixtureSampler([2, 6], weights, epoch="longest", step_size=4)
    >>> len(sampler), np.bincount(sampler.order(0, seed=0)).tolist()
    (12, [3, 3, 1, 1, 1, 1, 1, 1])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Weights,
        *,
        epoch: str | int,
        mix: str = "sample",
        step_size: int = 1,
        multiple_of: int = 1,
        shuffle: bool = True,
    ) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.weights = weights
        self.mix = mix
        self.step_size = step_size
        self.shuffle = shuffle
        wanted = self._length(epoch)
        if wanted > _MOST_SAMPLES:
            do = "Pass a number of samples as epoch, such as epoch=10_000_000."
            raise BadArgument(expected(f"an epoch of at most {_MOST_SAMPLES:,} samples", f"{wanted:,}", do))
        self.num_samples = wanted // multiple_of * multiple_of or wanted
        self._drawn: tuple[int, int, np.ndarray] | None = None  # the sources of the last epoch that was asked for
        self._starts: dict[int, list[np.ndarray]] = {}  # by seed: draws from each source before each epoch
        self._counted: tuple[tuple[int, int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return self.num_samples

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Indices of all samples of an epoch in the concatenation of the sources."""
        sources, starts = self.sources(epoch, seed), self.starts(epoch, seed)
        order = np.empty(len(sources), dtype=np.int64)
        for number, size in enumerate(self.sizes.tolist()):
            places = np.flatnonzero(sources == number)
            found = pass_samples(size, seed, number, int(starts[number]), len(places), self.shuffle)
            order[places] = self.offsets[number] + found
        return order

    def sources(self, epoch: int, seed: int) -> np.ndarray:
        """The number of the source at each position of an epoch."""
        if self._drawn is None or self._drawn[:2] != (epoch, seed):
            first_step = epoch * -(-self.num_samples // self.step_size)
            options = {"first_step": first_step, "step_size": self.step_size, "mix": self.mix}
            drawn = draw_sources(self.weights, self.num_samples, seed=seed, epoch=epoch, **options)  # type: ignore[arg-type]
            self._drawn = epoch, seed, drawn
        return self._drawn[2]

    def starts(self, epoch: int, seed: int) -> np.ndarray:
        """How many samples of each source come before an epoch."""
        if self.weights.is_constant and self.mix == "sample":
            return epoch * self._shares(self.num_samples)
        starts = self._starts.setdefault(seed, [np.zeros(len(self.sizes), dtype=np.int64)])
        while len(starts) <= epoch:
            starts.append(starts[-1] + self._count(self.sources(len(starts) - 1, seed)))
        return starts[epoch]

    def drawn(self, epoch: int, position: int, seed: int) -> np.ndarray:
        """How many samples of each source come before a position."""
        begin, counts = 0, self.starts(epoch, seed)
        if self._counted is not None:
            (seen, at, of_seed), before = self._counted
            if (seen, of_seed) == (epoch, seed) and at <= position:
                begin, counts = at, before
        counts = counts + self._count(self.sources(epoch, seed)[begin:position])
        self._counted = (epoch, position, seed), counts
        return counts

    def _count(self, sources: np.ndarray) -> np.ndarray:
        return np.bincount(sources, minlength=len(self.sizes)).astype(np.int64)

    # -- the length of an epoch ----------------------------------------------------------------------------

    def _length(self, epoch: str | int) -> int:
        if not isinstance(epoch, str):
            return epoch
        if epoch == "total":
            return int(self.sizes.sum())
        if not self.weights.is_constant:
            do = f"Pass epoch='total' ({self.sizes.sum():,} samples), or a number of samples."
            raise BadArgument(expected("epoch to be 'total' or a number, with weights that change", epoch, do))
        unit = 1 if self.mix == "sample" else self.step_size
        weights, used = self.weights.first(), self.weights.first() > 0
        needed = self.sizes[used] / weights[used] / unit
        if epoch == "longest":
            groups = int(np.ceil(needed.max() - 1e-9))
            while np.any(self._shares(groups)[used] * unit < self.sizes[used]):
                groups += 1
            return groups * unit
        groups = max(1, int(np.floor(needed.min() + 1e-9)))
        while groups > 1 and np.any(self._shares(groups)[used] * unit > self.sizes[used]):
            groups -= 1
        return groups * unit

    def _shares(self, groups: int) -> np.ndarray:
        """How many of `groups` evenly spaced numbers in [0, 1] belong to each source, with constant weights."""
        edges = _edges(self.weights.first())
        # (n + 0.5) / groups >= edge is what `draw_sources` computes; the nearest n is found without listing them all.
        lowest = np.ceil(edges * groups - 0.5).astype(np.int64) - 2
        ends = lowest + ((lowest[:, None] + np.arange(4) + 0.5) / groups < edges[:, None]).sum(axis=1)
        return np.diff(np.clip(ends, 0, groups), prepend=0)
