"""Where each array of a run lies on the mesh: rules for parameters, the same for what the optimizer keeps of them.

A rule is a regular expression, searched for in the path of a parameter, and what its dimensions are divided over. The
first that matches counts. Rules speak of a single layer's weight; where layers are stacked, the leading dimensions are
not divided. Building the state where it belongs, without any device ever holding the whole, happens here too.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.mesh import DATA_AXES, data_shards
from trainformer.backends.jax.state import TrainState, Tree, as_key, flat, joined, nested, partition, take_apart
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected

logger = logging.getLogger("trainformer")

Rules = Sequence[tuple[str, Sequence[Any]]]
"""Regular expression and, for each dimension, an axis, several of them, or None."""
SMALL = 1024
"""Parameters with fewer elements are not worth dividing where no rule says so."""


# -- parameters --------------------------------------------------------------------------------------------------


def param_shardings(params: Tree, mesh: Mesh, rules: Rules | None = None) -> dict[Any, Any]:
    """A sharding for every parameter (or shape) of a nested dictionary.

    Axes that do not divide a dimension are left out, which one log record says of all parameters together. What no rule
    matches is divided over ``fsdp`` along its largest dimension that can be, if it is large enough to bother.
    """
    checked = [(_pattern(pattern), _axes(spec, mesh)) for pattern, spec in rules or ()]
    dropped: dict[str, list[str]] = {}
    shardings = []
    for path, leaf in flat(params):
        name, shape = joined(path), tuple(leaf.shape)
        wanted = next((spec for pattern, spec in checked if pattern.search(name)), None)
        if wanted is None:
            spec = _largest(shape, mesh)
        else:
            spec, left_out = _fit(name, wanted, shape, mesh)
            for axis in left_out:
                dropped.setdefault(axis, []).append(name)
        shardings.append((path, NamedSharding(mesh, PartitionSpec(*spec))))
    for axis, names in dropped.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        dropped[axis] = [f"{axis} ({mesh.shape[axis]}): {', '.join(names[:4])}{more}"]
    if dropped:
        notes = "; ".join(text for texts in dropped.values() for text in texts)
        logger.info("These parameters are not divided over these axes, which do not divide their size: %s", notes)
    return nested(shardings)


def _pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadArgument(expected("sharding rules with regular expressions", pattern, str(error))) from error


def _axes(spec: Sequence[Any], mesh: Mesh) -> list[tuple[str, ...]]:
    """The axes of each dimension, as tuples; those that are not of the mesh are an error."""
    if isinstance(spec, str):
        raise BadArgument(expected("a sharding rule with a tuple of axes", spec, f"Write ({spec!r},)."))
    dims = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    for axis in (axis for axes in dims for axis in axes):
        if axis not in mesh.axis_names:
            advice = did_you_mean(str(axis), mesh.axis_names) or f"Axes are {', '.join(mesh.axis_names)}."
            raise BadArgument(expected("an axis of the mesh in a sharding rule", axis, advice))
    return dims


def _fit(name: str, wanted: list[tuple[str, ...]], shape: tuple[int, ...], mesh: Mesh) -> tuple[list[Any], list[str]]:
    """What of a rule a shape can have, and the axes that do not divide it. Axes of size 1 divide nothing: left out."""
    if len(wanted) > len(shape):
        raise BadArgument(
            f"Expected a sharding rule for {name!r} with at most {len(shape)} dimensions, as its shape {shape} has, "
            f"received one with {len(wanted)}."
        )
    spec: list[Any] = [None] * (len(shape) - len(wanted))
    left_out: list[str] = []
    for size, axes in zip(shape[len(spec) :], wanted, strict=True):
        kept: list[str] = []
        for axis in axes:
            if mesh.shape[axis] == 1:
                continue
            if size % math.prod(mesh.shape[a] for a in (*kept, axis)):
                left_out.append(axis)
            else:
                kept.append(axis)
        spec.append(_entry(kept))
    return spec, left_out


def _entry(axes: Sequence[str]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _largest(shape: tuple[int, ...], mesh: Mesh) -> list[Any]:
    """Divided over ``fsdp`` along the largest dimension that can be; small ones and those that cannot be are not."""
    pieces = mesh.shape["fsdp"]
    spec: list[Any] = [None] * len(shape)
    fitting = [dim for dim, size in enumerate(shape) if size % pieces == 0]
    if pieces > 1 and math.prod(shape) >= SMALL and fitting:
        spec[max(fitting, key=lambda dim: shape[dim])] = "fsdp"
    return spec


# -- the whole state ---------------------------------------------------------------------------------------------


def state_shardings(state: TrainState, mesh: Mesh, rules: Rules | None = None) -> TrainState:
    """A sharding for every array of a state, or of its shapes (`jax.eval_shape`).

    What an optimizer keeps for a parameter, in its shape, lies where the parameter lies. Everything else (counters,
    factored moments, batch statistics) is on every device.
    """
    params = param_shardings(state.params, mesh, rules)
    everywhere = NamedSharding(mesh, PartitionSpec())
    known = {
        tuple(str(part) for part in path): (tuple(leaf.shape), sharding)
        for (path, leaf), (_, sharding) in zip(flat(state.params), flat(params), strict=True)
    }

    def follow(path: Any, leaf: Any) -> NamedSharding:
        parts = tuple(name_of(part) for part in path)
        for start in range(len(parts)):
            shape, sharding = known.get(parts[start:], (None, everywhere))
            if shape is not None:
                return sharding if shape == tuple(leaf.shape) else everywhere
        return everywhere

    return state.replace(
        step=everywhere,
        rng=everywhere,
        params=params,
        opt_state=jax.tree_util.tree_map_with_path(follow, state.opt_state),
        variables=jax.tree.map(lambda _: everywhere, state.variables),
    )


def name_of(key: Any) -> str:
    """One part of a path in any tree: a key, a field or a position."""
    return jax.tree_util.keystr((key,), simple=True)


def init_sharded(
    build: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    rng: Any,
    mesh: Mesh,
    *,
    rules: Rules | None = None,
    frozen: str | Sequence[str] | None = None,
) -> tuple[TrainState, TrainState]:
    """A new state and its shardings, from a function that builds the model.

    The weights are drawn under `jax.jit`, each device its own part. They are the same on every mesh. Rules are those of
    the model if none are given.
    """
    key = as_key(rng)
    found: list[Rules | None] = []

    def create(key: Any) -> TrainState:
        init_key, run_key = jax.random.split(key)
        model = build(nnx.Rngs(init_key))
        found.append(getattr(model, "partition_rules", None))
        return TrainState.create(model, tx, run_key, frozen)

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(create, key)
        shardings = state_shardings(shapes, mesh, rules or found[0])
        # Leaves only: the static graph of a second building need not be equal to that of the first.
        leaves = jax.jit(lambda key: jax.tree.leaves(create(key)), out_shardings=jax.tree.leaves(shardings))(key)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), shardings


def create_sharded(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    rng: Any,
    mesh: Mesh,
    *,
    rules: Rules | None = None,
    frozen: str | Sequence[str] | None = None,
) -> tuple[TrainState, TrainState]:
    """The same from a model that has its weights already. They are copied: the model can be used on."""
    graphdef, params, variables, streams = take_apart(model)

    def assemble(params: Any, variables: Any, key: Any) -> TrainState:
        return TrainState.assemble((graphdef, params, variables, streams), tx, key, frozen)

    key = as_key(rng)
    shapes = jax.eval_shape(assemble, params, variables, key)
    shardings = state_shardings(shapes, mesh, rules or getattr(model, "partition_rules", None))
    params = place(params, shardings.params)
    trained, _ = partition(params, shapes.trainable)
    with jax.set_mesh(mesh):
        opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(trained)
    state = shapes.replace(
        step=place(np.zeros((), np.int32), shardings.step),
        params=params,
        opt_state=opt_state,
        variables=place(variables, shardings.variables),
        rng=place(jax.random.key_data(key), shardings.rng),
    )
    return state, shardings


def place(tree: Any, shardings: Any) -> Any:
    """Arrays of the host or of a device, copied to where they belong. Each device is sent its own part only."""
    return jax.tree.map(_place, tree, shardings)


place_params = place


def _place(array: Any, sharding: NamedSharding) -> Any:
    if isinstance(array, jax.Array):
        # A copy, since what a device has already would be shared, and donating the state would delete it there too.
        return jnp.copy(jax.device_put(array, sharding))
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])


# -- batches -----------------------------------------------------------------------------------------------------


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows divided over the data axes; `leading` dimensions before them are not."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, DATA_AXES))


def check_rows(rows: int, mesh: Mesh, accumulation: int = 1) -> None:
    """Raise if a batch of so many rows cannot be divided over the devices and micro-batches."""
    shards = data_shards(mesh)
    if rows % (shards * accumulation):
        parts = f"{shards} devices (dp * fsdp)" + (f" times {accumulation} micro-batches" if accumulation > 1 else "")
        raise DataError(
            f"Expected a batch whose rows divide over {parts}, received {rows} rows. Use a batch size that is a "
            f"multiple of {shards * accumulation}, and drop or fill up the last batch of an epoch."
        )


def constrain_rows(tree: Any, axis: int = 0) -> Any:
    """Keep the rows of arrays divided over the data axes of the mesh in use; without one, nothing is asked."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(DATA_AXES) <= set(mesh.axis_names):
        return tree
    shards = math.prod(mesh.shape[name] for name in DATA_AXES)
    spec = PartitionSpec(*[None] * axis, DATA_AXES)

    def constrain(leaf: Any) -> Any:
        if jnp.ndim(leaf) <= axis or leaf.shape[axis] % shards:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree.map(constrain, tree)
