"""The order of an epoch and the random numbers of a sample: pure functions of (seed, epoch, sample).

Nothing here imports torch. If the program has imported it, its CPU generator is seeded and preserved with the others.
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
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: the step of splitmix64
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Swapped in for NumPy's global generator to preserve it: swapping costs nothing, saving a state takes 250 us.
_spare = np.random.MT19937(0)

# The key of the sample a thread is reading, and its generator once `sample_rng` was called.
_reading = threading.local()


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Indices of all samples in the order of an epoch.

    >>> sorted(epoch_order(5, seed=1, epoch=0, shuffle=True).tolist())
    [0, 1, 2, 3, 4]
    >>> epoch_order(3, seed=1, epoch=7, shuffle=False).tolist()
    [0, 1, 2]
    """
    if not shuffle:
        return np.arange(size)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


def sample_key(seed: int, epoch: int, index: int) -> int:
    """A 64-bit key for one sample of one epoch (splitmix64 over the three numbers).

    >>> len({sample_key(0, 0, 1), sample_key(0, 1, 0), sample_key(1, 0, 0)})
    3
    """
    key = 0
    for part in (seed, epoch, index):
        key = _mix((key + GOLDEN + part) & _MASK)
    return key


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _FACTORS[1]) & _MASK
    return z ^ (z >> 31)


def mix_bits(bits: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (uint64): every input bit changes half of the output bits on average."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FACTORS[0])
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return bits ^ (bits >> np.uint64(31))


def sample_keys(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """`sample_key` for many samples at once.

    >>> sample_keys(3, 1, np.array([5, 9])).tolist() == [sample_key(3, 1, 5), sample_key(3, 1, 9)]
    True
    """
    of_epoch = _mix((_mix((GOLDEN + seed) & _MASK) + GOLDEN + epoch) & _MASK)
    return mix_bits(samples.astype(np.uint64) + np.array([(of_epoch + GOLDEN) & _MASK], dtype=np.uint64))


def distinct_draws(order: np.ndarray, size: int) -> np.ndarray:
    """Number repeated samples: the n-th occurrence (from 0) of a sample becomes ``sample + n * size``.

    A sample drawn twice in an epoch is augmented in two ways, so each draw needs its own number.

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
    """Seed Python's, NumPy's and torch's CPU generators: about 15 us, far less than decoding an image."""
    set_sample_key(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    if (torch := _torch()) is not None:
        # torch.manual_seed would also seed every accelerator.
        torch.default_generator.manual_seed(key)


def set_sample_key(key: int | None) -> None:
    """Set the key of the sample this thread reads next, which seeds `sample_rng`."""
    _reading.key, _reading.generator = key, None


def sample_rng() -> np.random.Generator:
    """The generator of the sample being read, for random augmentation in your own dataset.

    It is seeded by (seed, epoch, sample). `random` and `np.random` are seeded for each sample too, but they are shared
    by threads; this generator is not. Outside of a loader it is not seeded.

    >>> set_sample_key(sample_key(0, 0, 7))
    >>> first = sample_rng().random(2).tolist()
    >>> set_sample_key(sample_key(0, 0, 7))
    >>> [float(sample_rng().random()), float(sample_rng().random())] == first
    True
    """
    if getattr(_reading, "generator", None) is None:
        _reading.generator = np.random.Generator(np.random.PCG64(getattr(_reading, "key", None)))
    return _reading.generator


def global_rng_state() -> tuple[Any, ...]:
    """The state of the process's generators, to find out whether something drew from them."""
    name, numbers, place, *rest = np.random.get_state(legacy=True)
    torch = _torch()
    cpu = None if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), name, np.asarray(numbers).tobytes(), place, rest, cpu


def _torch() -> Any:
    return sys.modules.get("torch")


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the process's CPU generators on exit."""
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
