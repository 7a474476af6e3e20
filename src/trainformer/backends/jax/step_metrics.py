"""Metrics of train steps packed into one device array per step, so that a log point reads few arrays.

Reading a device scalar costs about 10 µs whatever it holds, and the scalars of every step are read at log points.
This module alone knows the layout of the packed array.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PACKED = "packed"
"""Name of the packed array in the output of a step."""
_FINITE, _GRAD_NORM, _FIRST_PAIR = range(3)
_STACK_SIZE = 32  # fixed: a stack as long as the log interval would be compiled for every interval


class QueuedSteps:
    """Steps that are executed together. `arrays` are their stacked outputs by name, and None until then."""

    def __init__(self, execute: Callable[[], None]) -> None:
        self.arrays: Mapping[str, jax.Array] | None = None
        self._execute = execute

    def __getitem__(self, name: str) -> jax.Array:
        if self.arrays is None:
            self._execute()
        if self.arrays is None:
            raise RuntimeError("These steps were not executed: an earlier one has failed.")
        return self.arrays[name]


class QueuedArray(NamedTuple):
    """An output of one of these steps."""

    steps: QueuedSteps
    name: str
    row: int

    def array(self) -> jax.Array:
        """The array itself. Executes the steps, unless they were."""
        return self.steps[self.name][self.row]


class PackedScalar(NamedTuple):
    """One element of a packed array, still on the device."""

    packed: jax.Array | QueuedArray
    position: int

    def place(self) -> tuple[jax.Array, tuple[int, ...]]:
        """An array on the device, and the index of the scalar in it. Executes the step if it was not."""
        packed, position = self
        if type(packed) is QueuedArray:
            return packed.steps[packed.name], (packed.row, position)
        return packed, (position,)  # type: ignore[return-value]

    def scalar(self) -> jax.Array:
        """The scalar as an array of its own."""
        array, index = self.place()
        return array[index]

    def __mul__(self, factor: Any) -> Any:  # type: ignore[override]
        return self.scalar() * factor


def pack_metrics(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a train step: its output also contains all of its scalars as one array."""

    def train_step(state: Any, batch: Any, **options: Any) -> Any:
        state, output = step(state, batch, **options)
        pairs = _pairs(output)
        values = [value for name in _ordered_names(output["metrics"]) for value in pairs[name]]
        scalars = [jnp.asarray(value, jnp.float32) for value in (output["finite"], output["grad_norm"], *values)]
        return state, {**output, PACKED: jnp.stack(scalars)}

    return train_step


def unpack_metrics(output: Mapping[str, Any]) -> tuple[Any, Any, dict[str, tuple[Any, Any]]]:
    """The finite flag, the gradient norm and the (sum, weight) pairs of a step, from its packed array if it has one."""
    array = output.get(PACKED)
    if array is None:
        return output["finite"], output["grad_norm"], _pairs(output)
    pairs = {
        name: (PackedScalar(array, position), PackedScalar(array, position + 1))
        for name, position in zip(_ordered_names(output["metrics"]), itertools.count(_FIRST_PAIR, 2), strict=False)
    }
    return PackedScalar(array, _FINITE), PackedScalar(array, _GRAD_NORM), pairs


def read_scalars(scalars: Sequence[Any]) -> list[float]:
    """Values of packed scalars, device scalars and Python numbers. Each array is transferred once."""
    arrays: dict[int, Any] = {}
    places: list[tuple[Any, tuple[int, ...]]] = []
    for scalar in scalars:
        array, index = scalar.place() if type(scalar) is PackedScalar else (scalar, ())
        places.append((array, index))
        if isinstance(array, jax.Array):
            arrays[id(array)] = array
    values = _transfer(arrays)
    return [float(functools.reduce(operator.getitem, index, values.get(id(array), array))) for array, index in places]


def start_reading(scalars: Sequence[Any]) -> Callable[[], list[float] | None]:
    """Start to copy scalars to the host. The result returns their values once all are there, None until then."""
    pending = _start_copies(scalars)

    def poll() -> list[float] | None:
        nonlocal pending
        if pending is None:
            pending = _start_copies(scalars)
        return None if pending is None or not all(a.is_ready() for a in pending) else read_scalars(scalars)

    return poll


def _start_copies(scalars: Sequence[Any]) -> list[Any] | None:
    """The arrays that hold the scalars, on their way to the host; None if some of the steps were not executed yet."""
    packed = [scalar.packed for scalar in scalars if type(scalar) is PackedScalar]
    if any(type(array) is QueuedArray and array.steps.arrays is None for array in packed):
        return None
    arrays: list[Any] = [scalar.place()[0] if type(scalar) is PackedScalar else scalar for scalar in scalars]
    pending = [array for array in arrays if isinstance(array, jax.Array)]
    for array in pending:
        array.copy_to_host_async()
    return pending


def _transfer(arrays: dict[int, Any]) -> dict[int, Any]:
    """Arrays as lists, scalars as numbers. A transfer from a GPU costs 50 µs, so equal arrays are stacked first."""
    values: dict[int, Any] = {}
    rest = dict(arrays)
    if len(arrays) >= _STACK_SIZE and jax.process_count() == 1:
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for key, array in arrays.items():
            kinds.setdefault((array.shape, array.dtype, array.sharding), []).append(key)
        for keys in kinds.values():
            for first in range(0, len(keys) - _STACK_SIZE + 1, _STACK_SIZE):
                chosen = keys[first : first + _STACK_SIZE]
                rows = np.asarray(_stack(*[rest.pop(key) for key in chosen])).tolist()
                values |= dict(zip(chosen, rows, strict=True))
    for key, array in rest.items():
        rest[key] = array = array if array.is_fully_addressable else array.addressable_data(0)
        array.copy_to_host_async()  # start all copies before waiting for the first
    return values | {key: np.asarray(array).tolist() for key, array in rest.items()}


@jax.jit
def _stack(*arrays: Any) -> Any:
    return jnp.stack(arrays)


def sum_scalars(scalars: Sequence[Any]) -> Any:
    """The sum of scalars, computed on the device."""
    by_layout: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Any]] = {}
    terms = [jnp.float32(sum(scalar for scalar in scalars if isinstance(scalar, (int, float))))]
    for scalar in scalars:
        if isinstance(scalar, PackedScalar):
            array, index = scalar.place()
            by_layout.setdefault((index, array.shape), []).append(array)
        elif not isinstance(scalar, (int, float)):
            terms.append(jnp.asarray(scalar, jnp.float32))
    for (index, _), arrays in by_layout.items():
        # In groups of one size: jnp.stack alone dispatches an operation for each array.
        whole = len(arrays) - len(arrays) % _STACK_SIZE
        terms += [_sum_at(index, *arrays[i : i + _STACK_SIZE]) for i in range(0, whole, _STACK_SIZE)]
        terms += [array[index] for array in arrays[whole:]]
    return jnp.sum(jnp.stack(terms))


@jax.jit
def _sum_at(index: tuple[Any, ...], *arrays: Any) -> Any:
    return jnp.sum(jnp.stack(arrays)[(slice(None), *index)])


def _pairs(output: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {"loss": output["loss"], **output["metrics"]}


def _ordered_names(metrics: Iterable[str]) -> list[str]:
    """Sorted: a dict that comes out of a jitted function may have another order."""
    return ["loss", *sorted(set(metrics) - {"loss"})]
