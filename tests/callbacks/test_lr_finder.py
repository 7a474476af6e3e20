"""The rate that a range test suggests, when single batches say more about themselves than about the rate."""

import itertools
import math
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from trainformer.callbacks import LRFinder


def noisy(seed, noise):
    """A trainer whose loss falls between rates of 1e-4 and 1e-1, and rises above; each batch has a loss of its own."""
    draw = random.Random(seed)

    def step(batch, lr):
        fall = 1.5 / (1 + math.exp(-3 * (math.log10(lr) + 2.5)))
        return 2.4 - fall + max(0.0, lr - 0.5) ** 2 + draw.gauss(0, noise)

    @contextmanager
    def sandbox():
        yield SimpleNamespace(batches=lambda: itertools.repeat(None), step=step)

    return SimpleNamespace(sandbox=sandbox)


@pytest.mark.parametrize("steps", [40, 100])
def test_the_noise_of_the_first_batches_suggests_no_rate(steps):
    found = []
    for seed in range(40):
        finder = LRFinder(num_steps=steps)
        finder._sweep(noisy(seed, 0.15))
        found.append(finder._steepest())
    assert all(1e-4 < lr < 1.0 for lr in found), sorted(found)
