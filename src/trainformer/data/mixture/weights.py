"""The weights of a mixture: constant, by size, or changing with the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected

_BY_SIZE, _EQUAL = "size", "equal"
_FORMS = (
    "weights to be a dict with one number per source, a list of (step, dict) pairs, a function of the step, 'size' or "
    "'equal'"
)


class Weights:
    """The weights of all sources at any optimizer step, normalised to a sum of 1."""

    def __init__(self, names: Sequence[str], at: Callable[[np.ndarray], np.ndarray], is_constant: bool) -> None:
        self.names = tuple(names)
        self.is_constant = is_constant
        self._at = at

    def at(self, steps: np.ndarray) -> np.ndarray:
        """One row per step, one column per source."""
        return self._at(np.asarray(steps, dtype=np.int64))

    def first(self) -> np.ndarray:
        """The weights of the first step."""
        return self.at(np.zeros(1))[0]


def check_weights(weights: Any, names: Sequence[str], temperature: Any) -> Any:
    """The weights in one form, checked as far as possible before the data are loaded.

    None stands for the sizes of the sources, and a list of numbers for those of the sources in order.
    """
    if temperature is not None:
        _check_temperature(temperature)
        if weights not in (None, _BY_SIZE):
            raise BadArgument(
                "Expected weights or temperature, received both: a temperature turns the sizes of the sources into "
                "weights, size ** (1 / temperature). Pass the one you mean."
            )
    if weights is None or (isinstance(weights, str) and weights in (_BY_SIZE, _EQUAL)):
        return weights or _BY_SIZE
    if isinstance(weights, Mapping):
        return _checked(weights, names)
    if callable(weights):
        _checked(weights(0), names, "weights(0)")
        return weights
    if not isinstance(weights, list | tuple | np.ndarray) or not len(weights):
        raise BadArgument(expected(_FORMS, weights, did_you_mean(str(weights), (_BY_SIZE, _EQUAL))))
    if all(isinstance(value, Real) for value in weights):
        if len(weights) != len(names):
            raise BadArgument(expected(f"one weight for each of the {len(names)} sources", list(weights)))
        return _checked(dict(zip(names, map(float, weights), strict=True)), names)
    return _checked_points(list(weights), names)


def _check_temperature(temperature: Any) -> None:
    is_number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not is_number or math.isnan(temperature) or temperature <= 0:
        do = "1 samples by size, larger values favour small sources, float('inf') gives all the same weight."
        raise BadArgument(expected("temperature to be a positive number", temperature, do))


def _checked_points(points: Sequence[Any], names: Sequence[str]) -> list[tuple[int, dict[str, float]]]:
    what = "weights that change to be a list of (step, weights) pairs, such as [(0, {...}), (10_000, {...})]"
    checked: list[tuple[int, dict[str, float]]] = []
    for point in points:
        if not isinstance(point, list | tuple) or len(point) != 2 or not isinstance(point[1], Mapping):
            raise BadArgument(expected(what, point))
        step = point[0]
        if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
            raise BadArgument(expected("the steps of weights to be integers from 0", step))
        if checked and step <= checked[-1][0]:
            raise BadArgument(expected("the steps of weights in ascending order", [p[0] for p in points]))
        checked.append((int(step), _checked(point[1], names, f"the weights of step {step}")))
    return checked


def _checked(weights: Any, names: Sequence[str], what: str = "weights") -> dict[str, float]:
    """The weights in the order of the sources."""
    if not isinstance(weights, Mapping):
        raise BadArgument(expected(f"{what} to be a dict with one number per source", weights))
    for name in weights:
        if name not in names:
            do = did_you_mean(str(name), names) or f"The sources are {', '.join(map(repr, names))}."
            raise BadArgument(expected(f"{what} for the sources of the mixture", name, do))
    missing = [name for name in names if name not in weights]
    if missing:
        do = "Pass 0 for a source that is not to be used."
        raise BadArgument(f"Expected {what} for all sources, received none for {', '.join(map(repr, missing))}. {do}")
    for name, value in weights.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise BadArgument(expected(f"{what} to be finite numbers of at least 0", {name: value}))
    if not any(value > 0 for value in weights.values()):
        raise BadArgument(expected(f"{what} of which at least one is positive", dict(weights)))
    return {name: float(weights[name]) for name in names}


def make_weights(
    weights: Any, names: Sequence[str], sizes: Sequence[int | None], temperature: float | None = None
) -> Weights:
    """The weights that a checked specification describes (`check_weights`), for sources of these sizes.

    >>> make_weights("size", ["a", "b"], [1, 4], temperature=2.0).first().tolist() == [1 / 3, 2 / 3]
    True
    >>> ramp = make_weights([(0, {"a": 1, "b": 0}), (10, {"a": 0, "b": 1})], ["a", "b"], [8, 8])
    >>> ramp.at([0, 5, 99]).tolist()
    [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    """
    if isinstance(weights, str):
        unknown = [name for name, size in zip(names, sizes, strict=True) if size is None]
        if weights == _BY_SIZE and unknown:
            raise DataError(
                f"Expected weights, since the sizes of {', '.join(map(repr, unknown))} are unknown. Pass "
                "weights={...} with one number per source, or weights='equal'."
            )
        power = 0.0 if weights == _EQUAL else 1.0 / (temperature or 1.0)
        weights = {name: float(size or 1) ** power for name, size in zip(names, sizes, strict=True)}
    if isinstance(weights, Mapping):
        row = _normalised([weights[name] for name in names])
        return Weights(names, lambda steps: np.tile(row, (len(steps), 1)), is_constant=True)
    if callable(weights):
        return Weights(names, lambda steps: _called(weights, names, steps), is_constant=False)
    points = np.asarray([step for step, _ in weights], dtype=np.float64)
    rows = np.stack([_normalised(list(row.values())) for _, row in weights])
    columns = rows.T

    def interpolated(steps: np.ndarray) -> np.ndarray:
        return np.stack([np.interp(steps, points, column) for column in columns], axis=1)

    return Weights(names, interpolated, is_constant=len(points) == 1)


def _called(function: Callable[[int], Any], names: Sequence[str], steps: np.ndarray) -> np.ndarray:
    unique, inverse = np.unique(steps, return_inverse=True)
    rows = [_checked(function(step), names, f"weights({step})") for step in unique.tolist()]
    return np.stack([_normalised(list(row.values())) for row in rows])[inverse]


def _normalised(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    array = array / array.max()  # the sum of large weights might overflow
    return array / array.sum()


def describe_weights(weights: Any) -> Any:
    """Checked weights as JSON: a function by its name."""
    if callable(weights):
        return f"{getattr(weights, '__module__', '')}.{getattr(weights, '__qualname__', type(weights).__name__)}"
    return [[step, dict(row)] for step, row in weights] if isinstance(weights, list) else weights
