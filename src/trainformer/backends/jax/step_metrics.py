"""Metrics of train steps packed into one device array per step, so that a log point reads few arrays.

Reading a device scalar costs about 10 µs whatever it holds, and the scalars of every step are read at log points.
This module alone knows the layout of the packed array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PACKED = "packed"
"""Name of the packed array in the output of a step."""
_FINITE, _GRAD_NORM, _FIRST_PAIR = range(3)
_STACK_SIZE = 32  # fixed: a stack as long as the log interval would be compiled for every interval


class PackedScalar(NamedTuple):
    """One element of a packed array, still on the device."""

    array: jax.Array
    position: int

    def __mul__(self, factor: Any) -> Any:  # type: ignore[override]
        return self.array[self.position] * factor


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
        for name, position in zip(_ordered_names(output["metrics"]), range(_FIRST_PAIR, array.shape[0], 2), strict=True)
    }
    return PackedScalar(array, _FINITE), PackedScalar(array, _GRAD_NORM), pairs


def read_scalars(scalars: Sequence[Any]) -> list[float]:
    """Values of packed scalars, device scalars and Python numbers. Each array is transferred once."""
    arrays: dict[int, Any] = {}
    for scalar in scalars:
        array = scalar[0] if type(scalar) is PackedScalar else scalar
        if isinstance(array, jax.Array):
            arrays[id(array)] = array
    values = _transfer(arrays)
    return [
        values[id(scalar[0])][scalar[1]] if type(scalar) is PackedScalar else float(values.get(id(scalar), scalar))
        for scalar in scalars
    ]


def start_reading(scalars: Sequence[Any]) -> Callable[[], list[float] | None]:
    """Start to copy scalars to the host. The result returns their values once all are there, None until then."""
    arrays: list[Any] = [scalar[0] if type(scalar) is PackedScalar else scalar for scalar in scalars]
    pending: list[Any] = [array for array in arrays if isinstance(array, jax.Array)]
    for array in pending:
        array.copy_to_host_async()
    return lambda: read_scalars(scalars) if all(array.is_ready() for array in pending) else None


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
    by_layout: dict[tuple[int, int], list[Any]] = {}
    terms = [jnp.float32(sum(scalar for scalar in scalars if isinstance(scalar, (int, float))))]
    for scalar in scalars:
        if isinstance(scalar, PackedScalar):
            by_layout.setdefault((scalar.position, scalar.array.shape[0]), []).append(scalar.array)
        elif not isinstance(scalar, (int, float)):
            terms.append(jnp.asarray(scalar, jnp.float32))
    for (position, _), arrays in by_layout.items():
        # In groups of one size: jnp.stack alone dispatches an operation for each array.
        whole = len(arrays) - len(arrays) % _STACK_SIZE
        terms += [_sum_column(position, *arrays[i : i + _STACK_SIZE]) for i in range(0, whole, _STACK_SIZE)]
        terms += [array[position] for array in arrays[whole:]]
    return jnp.sum(jnp.stack(terms))


@jax.jit
def _sum_column(position: Any, *arrays: Any) -> Any:
    return jnp.sum(jnp.stack(arrays)[:, position])


def _pairs(output: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {"loss": output["loss"], **output["metrics"]}


def _ordered_names(metrics: Iterable[str]) -> list[str]:
    """Sorted: a dict that comes out of a jitted function may have another order."""
    return ["loss", *sorted(set(metrics) - {"loss"})]
