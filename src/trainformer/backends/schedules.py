"""Formulas of the learning-rate schedules, for torch and JAX.

A factor maps the number of completed steps to a fraction of the peak learning rate. It is computed with `xp`: Python's
`math` here, NumPy for arrays of steps, `jax.numpy` inside a jitted function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Factor = Callable[..., Any]  # (step, xp=PYTHON) -> fraction of the peak learning rate

PYTHON = SimpleNamespace(
    where=lambda test, yes, no: yes if test else no, minimum=min, maximum=max, cos=math.cos, sqrt=math.sqrt
)


def constant(total: float, warmup: float) -> Factor:
    """Linear warmup, then the full learning rate."""
    return _after_warmup(warmup, lambda step, xp: 1.0)


def linear(total: float, warmup: float, end: float = 0.0) -> Factor:
    """Linear warmup, then linear decay to zero (or `end`)."""
    return _after_warmup(warmup, lambda step, xp: 1.0 - (1.0 - end) * _progress(step, total, warmup, xp))


def cosine(total: float, warmup: float, end: float = 0.0) -> Factor:
    """Linear warmup, then cosine decay to zero (or `end`)."""
    return _after_warmup(warmup, lambda step, xp: _half_cosine(1.0, end, _progress(step, total, warmup, xp), xp))


def onecycle(total: float, warmup: float, end: float = 1 / 25e4, start: float = 1 / 25) -> Factor:
    """Cosine up from 1/25 of the learning rate, then cosine down to 1/250,000 of it (Smith's one-cycle policy).

    Equal to torch's `OneCycleLR(pct_start=warmup / total)` for the learning rate; momentum does not change.
    """
    peak = warmup - 1.0
    last = max(total - 1.0, 1.0)

    def factor(step: Any, xp: Any = PYTHON) -> Any:
        up = step / peak if peak > 0 else 1.0
        down = xp.minimum((step - peak) / (last - peak), 1.0) if last > peak else 1.0
        return xp.where(step <= peak, _half_cosine(start, 1.0, up, xp), _half_cosine(1.0, end, down, xp))

    return factor


def inverse_sqrt(total: float, warmup: float, timescale: float | None = None) -> Factor:
    """Linear warmup, then decay with the inverse square root of the step, without end."""
    scale = timescale or warmup or 10_000.0
    return _after_warmup(warmup, lambda step, xp: xp.sqrt(scale / xp.maximum(step - warmup + scale, scale)))


def wsd(total: float, warmup: float, end: float = 0.0, decay_ratio: float = 0.2) -> Factor:
    """Warmup, stable, decay: linear warmup, the full learning rate, linear decay to `end` in the last fifth."""
    begin = max(total - math.ceil(decay_ratio * total), warmup)
    return _after_warmup(
        warmup, lambda step, xp: 1.0 - (1.0 - end) * xp.maximum(_progress(step, total, begin, xp), 0.0)
    )


def _after_warmup(warmup: float, factor: Callable[[Any, Any], Any]) -> Factor:
    # A learning rate of zero would waste the first step.
    return lambda step, xp=PYTHON: xp.where(step < warmup, (step + 1) / max(warmup, 1), factor(step, xp))


def _progress(step: Any, total: float, begin: float, xp: Any) -> Any:
    return xp.minimum((step - begin) / max(total - begin, 1), 1.0)


def _half_cosine(low: float, high: float, progress: Any, xp: Any) -> Any:
    return high + (low - high) / 2.0 * (1.0 + xp.cos(math.pi * progress))
