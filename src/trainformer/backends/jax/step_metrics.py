"""What a train step says of itself, as one array beside the scalars.

To read a scalar costs some ten microseconds, whatever it holds, and those of every step are read at a log point. One
array per step is read instead. Which of its numbers is which is known here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TOLD = "told"
"""The array's name in the output of a step."""
_FINITE, _NORM, _FIRST = range(3)


class Part(NamedTuple):
    """One number of an array that is still on the device."""

    array: Any
    place: int

    def __mul__(self, factor: Any) -> Any:  # type: ignore[override]
        """On the device."""
        return self.array[self.place] * factor


def telling(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same train step, whose output has everything once more as one array."""

    def train_step(state: Any, batch: Any) -> Any:
        state, output = step(state, batch)
        pairs = _pairs(output)
        values = [value for name in _names(output["metrics"]) for value in pairs[name]]
        numbers = [jnp.asarray(value, jnp.float32) for value in (output["finite"], output["grad_norm"], *values)]
        return state, {**output, TOLD: jnp.stack(numbers)}

    return train_step


def told_by(output: Mapping[str, Any]) -> tuple[Any, Any, dict[str, tuple[Any, Any]]]:
    """Whether a step was finite, the norm of its gradient, sums and weights: parts of the array, if there is one."""
    array = output.get(TOLD)
    if array is None:
        return output["finite"], output["grad_norm"], _pairs(output)
    metrics = output["metrics"]
    pairs = {"loss": (Part(array, _FIRST), Part(array, _FIRST + 1))}
    if metrics:
        places = enumerate(_names(metrics))
        pairs = {name: (Part(array, _FIRST + 2 * n), Part(array, _FIRST + 2 * n + 1)) for n, name in places}
    return Part(array, _FINITE), Part(array, _NORM), pairs


def read_parts(scalars: Sequence[Any]) -> list[float]:
    """Values of parts, other device scalars and plain numbers, in few transfers; of each array only once."""
    arrays: dict[int, Any] = {}
    for scalar in scalars:
        array = scalar[0] if type(scalar) is Part else scalar
        if isinstance(array, jax.Array):
            arrays[id(array)] = array
    found = _values(arrays)
    return [
        found[id(scalar[0])][scalar[1]] if type(scalar) is Part else float(found.get(id(scalar), scalar))
        for scalar in scalars
    ]


def _values(arrays: dict[int, Any]) -> dict[int, Any]:
    """Arrays as lists, and scalars as numbers. Each transfer costs 50 µs from a GPU: many arrays are read as one."""
    found: dict[int, Any] = {}
    alone = dict(arrays)
    if len(arrays) >= _TOGETHER and jax.process_count() == 1:
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for name, array in arrays.items():
            kinds.setdefault((array.shape, array.dtype, array.sharding), []).append(name)
        for names in kinds.values():
            for first in range(0, len(names) - _TOGETHER + 1, _TOGETHER):
                chosen = names[first : first + _TOGETHER]
                rows = np.asarray(_stacked(*[alone.pop(name) for name in chosen])).tolist()
                found |= dict(zip(chosen, rows, strict=True))
    for name, array in alone.items():
        alone[name] = array = _visible(array)
        array.copy_to_host_async()  # all of them are on their way before the first is waited for
    return found | {name: np.asarray(array).tolist() for name, array in alone.items()}


_TOGETHER = 32  # so many, since a number of its own for every log record would be compiled anew


@jax.jit
def _stacked(*arrays: Any) -> Any:
    return jnp.stack(arrays)


def added_up(scalars: Sequence[Any]) -> Any:
    """Their sum, on the device."""
    parts = [scalar for scalar in scalars if isinstance(scalar, Part)]
    others = [jnp.asarray(scalar, jnp.float32) for scalar in scalars if not isinstance(scalar, Part)]
    if parts:
        # All of them are in the same place of arrays of the same step function, but for steps of another kind.
        by_kind: dict[tuple[int, int], list[Any]] = {}
        for part in parts:
            by_kind.setdefault((part.place, part.array.shape[0]), []).append(part.array)
        others += [jnp.sum(jnp.stack(arrays)[:, place]) for (place, _), arrays in by_kind.items()]
    return jnp.sum(jnp.stack(others))


def _pairs(output: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {"loss": output["loss"], **output["metrics"]}


def _names(metrics: Iterable[str]) -> list[str]:
    """In an order that does not depend on how a dict came out of a jitted function."""
    return ["loss", *sorted(set(metrics) - {"loss"})]


def _visible(array: Any) -> Any:
    """What this process can see of an array that all of them have."""
    return array if array.is_fully_addressable else array.addressable_data(0)
