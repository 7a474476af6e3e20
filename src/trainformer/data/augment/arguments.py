"""Arguments of `Augment`: what is allowed, and what is said of anything else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from trainformer.core.errors import BadArgument, expected


def size_pair(size: Any) -> tuple[int, int]:
    """(height, width) from one side or two."""
    sides = _numbers((size, size) if isinstance(size, Integral) else size)
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        raise BadArgument(expected("size to be a positive integer or (height, width)", size))
    return int(sides[0]), int(sides[1])


def share(name: str, value: Any) -> float:
    """A probability, or another share of a whole."""
    if not _is_number(value) or not 0 <= value <= 1:
        # True is 1 to Python: an image that is flipped always, which nobody means by it.
        hint = "Pass a number, such as 0.5." if not _is_number(value) else ""
        raise BadArgument(expected(f"{name} to be from 0 to 1", value, hint))
    return float(value)


def interval(name: str, value: Any, most: float = math.inf) -> tuple[float, float]:
    """Two numbers between which something is drawn."""
    ends = _numbers(value)
    if len(ends) != 2 or not 0 < ends[0] <= ends[1] <= most or math.isinf(ends[1]):
        limit = f", at most {most:g}" if most < math.inf else ""
        raise BadArgument(expected(f"{name} to be two numbers above 0, the lower one first{limit}", value))
    return float(ends[0]), float(ends[1])


def strengths(jitter: Any) -> tuple[float, float, float, float]:
    """Those of brightness, contrast, saturation and hue."""
    values = _numbers(jitter)
    if len(values) != 4 or not all(0 <= value < math.inf for value in values) or values[3] > 0.5:
        names = "(brightness, contrast, saturation, hue)"
        raise BadArgument(
            expected(f"jitter to be four strengths {names}, none negative, hue at most 0.5", jitter, "Or pass None.")
        )
    return float(values[0]), float(values[1]), float(values[2]), float(values[3])


def statistics(mean: Any, std: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel."""
    means, stds = (tuple(float(value) for value in _numbers(values)) for values in (mean, std))
    if not means or len(means) != len(stds) or not all(math.isfinite(m) for m in means):
        raise BadArgument(expected("mean and std to have one number per channel each", (mean, std)))
    if not all(0 < s < math.inf for s in stds):
        raise BadArgument(expected("std to be above 0", std))
    return means, stds


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _numbers(values: Any) -> tuple[Any, ...]:
    """What was given as a tuple; empty if it is not made of numbers."""
    found = tuple(values) if isinstance(values, Iterable) else ()
    return found if all(_is_number(value) for value in found) else ()
