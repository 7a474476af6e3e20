"""The learning rate that LRFinder suggests if batch losses are noisy."""

import itertools
import math
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from trainformer.callbacks import LRFinder


def noisy(seed, noise):
    """A trainer whose loss falls between learning rates of 1e-4 and 1e-1 and rises above, with noise per batch."""
    draw = random.Random(seed)

    def step(batch, lr):
        fall = 1.5 / (1 + math.exp(-3 * (math.log10(lr) + 2.5)))
        return 2.4 - fall + max(0.0, lr - 0.5) ** 2 + draw.gauss(0, noise)

    @contextmanager
    def sandbox():
        yield SimpleNamespace(batches=lambda: itertools.repeat(None), step=step)

    config = SimpleNamespace(set_derived=lambda *args: None)
    return SimpleNamespace(
        sandbox=sandbox,
        state=SimpleNamespace(step=0),
        record=lambda kind, **content: None,
        context=SimpleNamespace(config=config),
        was_set=lambda name: True,
        lr=1e-3,
    )


@pytest.mark.parametrize("steps", [40, 100])
def test_noise_of_the_first_batches_does_not_determine_the_suggestion(steps):
    found = []
    for seed in range(40):
        finder = LRFinder(num_steps=steps)
        finder.on_train_begin(noisy(seed, 0.15))
        found.append(finder.suggested_lr)
    assert all(1e-4 < lr < 1.0 for lr in found), sorted(found)
