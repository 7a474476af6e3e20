"""Metrics that users compute: numbers by name, whatever they were made with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from trainformer.core.errors import BadArgument, expected


def as_metrics(values: Any, who: str) -> dict[str, float]:
    """Plain numbers by name, from numbers and arrays or tensors of one element; None means no metrics.

    >>> import numpy as np
    >>> as_metrics({"perplexity": np.exp(np.float32(0)), "hits": np.array([3])}, "derive_metrics")
    {'perplexity': 1.0, 'hits': 3.0}
    >>> as_metrics({"curve": [1, 2]}, "derive_metrics")
    Traceback (most recent call last):
    trainformer.core.errors.BadArgument: Expected derive_metrics to return a number as 'curve', received 'list'. ...
    """
    check_names(values, who)
    return {name: _as_number(name, value, who) for name, value in (values or {}).items()}


def check_names(values: Any, who: str) -> None:
    """Reject what is not a mapping from names; None is left to the caller."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        do = "Write return {'loss': loss}, for instance."
        raise BadArgument(expected(f"{who} to return a dict of metrics by name", type(values).__name__, do))
    other = next((name for name in values if not isinstance(name, str)), None)
    if other is not None:
        raise BadArgument(expected(f"{who} to return metrics by name", f"the key {other!r}"))


def check_unique(names: Mapping[str, Any], prefix: str = "val/") -> None:
    """Reject two names of the same metric, with and without the prefix: one would replace the other."""
    twice = next((name for name in names if prefix + name in names), None)
    if twice is not None:
        what = f"{twice!r} and {prefix + twice!r}"
        raise BadArgument(
            f"Expected one name per metric, received {what}, which are the same metric. Rename one of them."
        )


def _as_number(name: str, value: Any, who: str) -> float:
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1:  # of NumPy, torch or JAX
        value = value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    received = f"an array of shape {tuple(shape)}" if shape is not None else type(value).__name__
    raise BadArgument(expected(f"{who} to return a number as {name!r}", received, "Reduce it, e.g. with .mean()."))
