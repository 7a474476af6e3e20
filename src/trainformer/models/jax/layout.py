"""Where activations lie on the mesh ("dp", "fsdp", "tp", "sp"), in the words of the models.

Owns the translation of "batch", "sequence", "heads" and "features" into mesh axes. Making a mesh and placing parameters
is left to the backend; without an active mesh nothing here does anything.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, PartitionSpec

MESH_AXES = ("dp", "fsdp", "tp", "sp")
AXES_OF = {"batch": ("dp", "fsdp"), "sequence": ("sp",), "heads": ("tp",), "features": ("tp",)}


def axis_size(name: str) -> int:
    """Over how many devices that axis of the active mesh goes; 1 without it."""
    return _auto_axes().get(name, 1)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """`x`, laid out over the active mesh: one word (or None) for each of its dimensions, from the first on.

    An axis that does not divide the size of its dimension is dropped. Where no mesh with these axes is active, `x`
    comes back as it is, so that a model runs the same code on one device.
    """
    sizes = _auto_axes()
    if not sizes:
        return x
    spec = [_fitting(sizes, name, size) for name, size in zip(names, x.shape, strict=False)]
    if not any(spec):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def _auto_axes() -> dict[str, int]:
    """The axes of the active mesh that the compiler lays out; inside `shard_map` there are none."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Auto and name in MESH_AXES}


def _fitting(sizes: dict[str, int], name: str | None, size: int) -> tuple[str, ...] | None:
    axes = [axis for axis in AXES_OF[name] if sizes.get(axis, 1) > 1] if name else []
    while axes and size % math.prod(sizes[axis] for axis in axes):
        axes.pop()
    return tuple(axes) or None
