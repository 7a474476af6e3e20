"""The mesh of devices a run computes on: always four axes, of which the first two divide the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from trainformer.core.errors import BadArgument, expected

AXES = ("dp", "fsdp", "tp", "sp")
"""Copies of the model, pieces of its weights, pieces of its matrix products, pieces of the sequence."""
DATA_AXES = ("dp", "fsdp")
"""The axes over which the rows of a batch are divided."""


def resolve_dims(sharding_array: Sequence[int], n_devices: int) -> tuple[int, int, int, int]:
    """The size of each axis; one of them may be -1, which is what the others leave.

    >>> resolve_dims((1, -1, 2, 1), 8)
    (1, 4, 2, 1)
    """
    dims = _checked(sharding_array)
    known = math.prod(d for d in dims if d != -1)
    if -1 in dims:
        if n_devices % known:
            raise BadArgument(
                f"Expected the axes {dims} to divide {n_devices} devices, received {known} for those that are given. "
                f"Use sizes whose product divides {n_devices}."
            )
        dims = [n_devices // known if d == -1 else d for d in dims]
    elif known != n_devices:
        raise BadArgument(
            f"Expected the axes {dims} to multiply to the {n_devices} devices there are, received {known}. "
            "Write -1 for the axis that is to take what the others leave."
        )
    dp, fsdp, tp, sp = dims
    return dp, fsdp, tp, sp


def _checked(sharding_array: Sequence[int]) -> list[int]:
    advice = f"Give one size for each of {', '.join(AXES)}; one of them may be -1, as in (1, -1, 1, 1)."
    what = "sharding_array to hold four positive whole numbers"
    try:
        dims = [int(d) for d in sharding_array if int(d) == d and not isinstance(d, (str, bool))]
    except (TypeError, ValueError) as error:
        raise BadArgument(expected(what, sharding_array, advice)) from error
    if len(dims) != len(AXES) or len(sharding_array) != len(AXES) or any(d < 1 and d != -1 for d in dims):
        raise BadArgument(expected(what, sharding_array, advice))
    if dims.count(-1) > 1:
        raise BadArgument(expected("at most one -1 in sharding_array", sharding_array, advice))
    return dims


def make_mesh(sharding_array: Sequence[int] = (1, -1, 1, 1), devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices, or over those given. Use it by ``with jax.set_mesh(mesh):``."""
    devices = list(jax.devices() if devices is None else devices)
    dims = resolve_dims(sharding_array, len(devices))
    # Auto: the compiler spreads what it is not told. Explicit axes, jax's default, would put them into every type.
    return jax.make_mesh(dims, AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES))


def data_shards(mesh: Mesh) -> int:
    """Into how many pieces the rows of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in DATA_AXES)
