"""The order of an epoch, and the random numbers of a sample: pure functions of (seed, epoch, sample).

Nothing here imports torch. Its generator is seeded and preserved with the others where a program has loaded it: as long
as it has not, nothing draws from it.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: the step of splitmix64

# Stands in for NumPy's generator where that must stay as it is: to swap two costs nothing, to save a state 250 us.
_spare = np.random.MT19937(0)

# Of the sample that a thread reads: its key, and its generator once somebody has asked for it.
_reading = threading.local()


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
    begin_sample(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    if (torch := _torch()) is not None:
        # torch.manual_seed would also seed every accelerator, which a sample has no business with.
        torch.default_generator.manual_seed(key)


def begin_sample(key: int | None) -> None:
    """Say which sample this thread reads from now on: where `sample_rng` gets its numbers from."""
    _reading.key, _reading.generator = key, None


def sample_rng() -> np.random.Generator:
    """The generator of the sample that is being read, for random augmentation in a data set of your own.

    Its numbers belong to (seed, epoch, sample). Unlike those of `random` and `np.random`, which are seeded for each
    sample as well, they are right also where several threads read at once. Outside of a loader nobody has seeded it.

    >>> begin_sample(sample_key(0, 0, 7))
    >>> first = sample_rng().random(2).tolist()
    >>> begin_sample(sample_key(0, 0, 7))
    >>> [float(sample_rng().random()), float(sample_rng().random())] == first
    True
    """
    if getattr(_reading, "generator", None) is None:
        _reading.generator = np.random.Generator(np.random.PCG64(getattr(_reading, "key", None)))
    return _reading.generator


def global_draws() -> tuple[Any, ...]:
    """Something that changes when anybody draws from the process's generators."""
    name, numbers, place, *rest = np.random.get_state(legacy=True)
    torch = _torch()
    cpu = None if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), name, np.asarray(numbers).tobytes(), place, rest, cpu


def _torch() -> Any:
    return sys.modules.get("torch")


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the process's CPU generators as they were, whatever happens inside."""
    torch = _torch()
    python, numpy = random.getstate(), np.random.get_bit_generator()  # type: ignore[attr-defined]
    cpu = None if torch is None else torch.get_rng_state()
    nested = numpy is _spare
    np.random.set_bit_generator(np.random.MT19937(0) if nested else _spare)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]
        if torch is not None:
            torch.set_rng_state(cpu)
