"""The order of an epoch, and the random numbers of a sample: pure functions of (seed, epoch, sample)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: the step of splitmix64

# Stands in for NumPy's generator where that must stay as it is: to swap two costs nothing, to save a state 250 us.
_spare = np.random.MT19937(0)


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Indices of all samples in the order in which an epoch visits them.

    >>> sorted(epoch_order(5, seed=1, epoch=0, shuffle=True).tolist())
    [0, 1, 2, 3, 4]
    >>> epoch_order(3, seed=1, epoch=7, shuffle=False).tolist()
    [0, 1, 2]
    """
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


def sample_key(seed: int, epoch: int, index: int) -> int:
    """A 64-bit number that belongs to one sample of one epoch (splitmix64 over the three).

    >>> len({sample_key(0, 0, 1), sample_key(0, 1, 0), sample_key(1, 0, 0)})
    3
    """
    key = 0
    for part in (seed, epoch, index):
        key = _mix((key + _GOLDEN + part) & _MASK)
    return key


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample_keys(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """`sample_key` for many samples at once.

    >>> sample_keys(3, 1, np.array([5, 9])).tolist() == [sample_key(3, 1, 5), sample_key(3, 1, 9)]
    True
    """
    of_epoch = _mix((_mix((_GOLDEN + seed) & _MASK) + _GOLDEN + epoch) & _MASK)
    z: np.ndarray = samples.astype(np.uint64) + np.array([(of_epoch + _GOLDEN) & _MASK], dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def distinct_draws(order: np.ndarray, size: int) -> np.ndarray:
    """Mark repetitions: the n-th occurrence (from 0) of a sample among `size` becomes ``sample + n * size``.

    A sample that is drawn twice in an epoch is to be augmented in two ways, so each draw needs a number of its own.

    >>> distinct_draws(np.array([2, 0, 2, 2]), size=10).tolist()
    [2, 0, 12, 22]
    """
    by_sample = np.argsort(order, kind="stable")
    ordered, places = order[by_sample], np.arange(len(order))
    first = np.ones(len(order), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    occurrence = places - np.maximum.accumulate(np.where(first, places, 0))
    draws = np.empty(len(order), dtype=np.int64)
    draws[by_sample] = ordered + occurrence * size
    return draws


def seed_generators(key: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator: some 15 us, which decoding an image dwarfs."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # torch.manual_seed would also seed every accelerator, which a sample has no business with.
    torch.default_generator.manual_seed(key)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the process's CPU generators as they were, whatever happens inside."""
    python, numpy, cpu = random.getstate(), np.random.get_bit_generator(), torch.get_rng_state()  # type: ignore[attr-defined]
    nested = numpy is _spare
    np.random.set_bit_generator(np.random.MT19937(0) if nested else _spare)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]
        torch.set_rng_state(cpu)
