"""The device mesh, and where each array of a run lies on it.

The mesh has five axes; the rows of a batch are sharded over the first three. A sharding rule is a regex, searched
for in the path of a parameter, and a PartitionSpec; the first match wins. Rules describe the weight of a single layer:
if layers are stacked, leading dimensions are not sharded. Optimizer state is sharded like the parameters. States are
created directly in their shards, so that no device ever holds the whole model.
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
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.state import TrainState, as_key, partition, path_string, split_model
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected

logger = logging.getLogger("trainformer")

AXES = ("dp", "fsdp", "ep", "tp", "sp")
"""Data parallel, fully sharded data parallel, expert parallel, tensor parallel, sequence parallel."""
DATA_AXES = ("dp", "fsdp", "ep")
"""The axes over which the rows of a batch are sharded. Only the weights of experts are sharded over ``ep``."""
Rules = Sequence[tuple[str, Sequence[Any]]]
"""Regex, and for each dimension an axis, several axes, or None."""
MIN_SHARDED_SIZE = 1024
"""Smaller parameters are replicated unless a rule matches."""


# -- the mesh ----------------------------------------------------------------------------------------------------


def resolve_dims(sharding_array: Sequence[int], n_devices: int) -> tuple[int, ...]:
    """The size of each mesh axis; one of them may be -1 and gets the remaining devices. Without ``ep`` there are four.

    >>> resolve_dims((1, -1, 2, 1), 8)
    (1, 4, 1, 2, 1)
    >>> resolve_dims((1, -1, 4, 1, 1), 8)
    (1, 2, 4, 1, 1)
    """
    advice = (
        "Give one size for each of dp, fsdp, tp, sp, or with experts of dp, fsdp, ep, tp, sp; one of them may be -1, "
        "as in (1, -1, 1, 1)."
    )
    what = "sharding_array to hold four or five positive integers"
    try:
        dims = [int(d) for d in sharding_array if int(d) == d and not isinstance(d, (str, bool))]
    except (TypeError, ValueError) as error:
        raise BadArgument(expected(what, sharding_array, advice)) from error
    if len(dims) not in (4, 5) or len(sharding_array) != len(dims) or any(d < 1 and d != -1 for d in dims):
        raise BadArgument(expected(what, sharding_array, advice))
    if dims.count(-1) > 1:
        raise BadArgument(expected("at most one -1 in sharding_array", sharding_array, advice))
    known = math.prod(d for d in dims if d != -1)
    if -1 in dims:
        if n_devices % known:
            raise BadArgument(
                f"Expected the axes {dims} to divide {n_devices} devices, received a product of {known}. "
                f"Use sizes whose product divides {n_devices}."
            )
        dims = [n_devices // known if d == -1 else d for d in dims]
    elif known != n_devices:
        raise BadArgument(
            f"Expected the axes {dims} to multiply to the {n_devices} available devices, received {known}. "
            "Write -1 for the axis that takes the remaining devices."
        )
    return tuple(dims) if len(dims) == len(AXES) else (*dims[:2], 1, *dims[2:])


def make_mesh(sharding_array: Sequence[int] = (1, -1, 1, 1), devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices, or over the given ones. Use it with ``with jax.set_mesh(mesh):``."""
    devices = list(jax.devices() if devices is None else devices)
    dims = resolve_dims(sharding_array, len(devices))
    # Auto axes: the compiler chooses the shardings it is not given. jax's default (Explicit) would put them into types.
    return jax.make_mesh(dims, AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES))


def data_shards(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are sharded."""
    return math.prod(mesh.shape[axis] for axis in data_axes(mesh))


def data_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh over which rows are sharded. A mesh that the user made may lack ``ep``."""
    return tuple(axis for axis in DATA_AXES if axis in mesh.axis_names)


# -- parameters --------------------------------------------------------------------------------------------------


def param_shardings(params: dict[Any, Any], mesh: Mesh, rules: Rules | None = None) -> dict[Any, Any]:
    """A sharding for every parameter (or shape) of a nested dict.

    Axes that do not divide a dimension are dropped, and one log record lists them. A parameter that no rule matches is
    sharded over ``fsdp`` along its largest divisible dimension, unless it is small.
    """
    checked = [(_compile(pattern), _axes(spec, mesh)) for pattern, spec in rules or ()]
    dropped: dict[str, list[str]] = {}
    shardings = {}
    for path, leaf in flatten_dict(params).items():
        name, shape = path_string(path), tuple(leaf.shape)
        wanted = next((spec for pattern, spec in checked if pattern.search(name)), None)
        if wanted is None:
            spec = _default_spec(shape, mesh)
        else:
            spec, left_out = _fit(name, wanted, shape, mesh)
            for axis in left_out:
                dropped.setdefault(axis, []).append(name)
        shardings[path] = NamedSharding(mesh, PartitionSpec(*spec))
    if dropped:
        notes = []
        for axis, names in dropped.items():
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            notes.append(f"{axis} ({mesh.shape[axis]}): {', '.join(names[:4])}{more}")
        logger.info("Not sharded over axes that do not divide their size: %s", "; ".join(notes))
    return unflatten_dict(shardings)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadArgument(expected("sharding rules with regular expressions", pattern, str(error))) from error


def _axes(spec: Sequence[Any], mesh: Mesh) -> list[tuple[str, ...]]:
    """The axes of each dimension as tuples; raises for axes that the mesh does not have."""
    if isinstance(spec, str):
        raise BadArgument(expected("a sharding rule with a tuple of axes", spec, f"Write ({spec!r},)."))
    dims = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    for axis in (axis for axes in dims for axis in axes):
        if axis not in (*mesh.axis_names, "ep"):
            advice = did_you_mean(str(axis), mesh.axis_names) or f"Axes are {', '.join(mesh.axis_names)}."
            raise BadArgument(expected("an axis of the mesh in a sharding rule", axis, advice))
    return dims


def _fit(name: str, wanted: list[tuple[str, ...]], shape: tuple[int, ...], mesh: Mesh) -> tuple[list[Any], list[str]]:
    """The part of a rule that fits a shape, and the axes that do not divide it. Axes of size 1 are left out."""
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
            if mesh.shape.get(axis, 1) == 1:
                continue
            if size % math.prod(mesh.shape[a] for a in (*kept, axis)):
                left_out.append(axis)
            else:
                kept.append(axis)
        spec.append(None if not kept else kept[0] if len(kept) == 1 else tuple(kept))
    return spec, left_out


def _default_spec(shape: tuple[int, ...], mesh: Mesh) -> list[Any]:
    fsdp = mesh.shape["fsdp"]
    spec: list[Any] = [None] * len(shape)
    divisible = [dim for dim, size in enumerate(shape) if size % fsdp == 0]
    if fsdp > 1 and math.prod(shape) >= MIN_SHARDED_SIZE and divisible:
        spec[max(divisible, key=lambda dim: shape[dim])] = "fsdp"
    return spec


# -- the train state ---------------------------------------------------------------------------------------------


def state_shardings(state: TrainState, mesh: Mesh, rules: Rules | None = None) -> TrainState:
    """A sharding for every array of a state, or of its shapes (`jax.eval_shape`).

    Optimizer state with the path and shape of a parameter is sharded like it. Everything else (counters, factored
    moments, batch statistics) is replicated.
    """
    params = param_shardings(state.params, mesh, rules)
    replicated = NamedSharding(mesh, PartitionSpec())
    return state.replace(
        step=replicated,
        rng=replicated,
        params=params,
        opt_state=shardings_following(state.opt_state, state.params, params, mesh),
        variables=jax.tree.map(lambda _: replicated, state.variables),
    )


def shardings_following(tree: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Shardings for a tree such as an optimizer's state: those of the parameters that its arrays belong to."""
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes, flat = flatten_dict(params), flatten_dict(shardings)
    known = {tuple(map(str, path)): (tuple(leaf.shape), flat[path]) for path, leaf in shapes.items()}

    def follow(path: Any, leaf: Any) -> NamedSharding:
        parts = tuple(jax.tree_util.keystr((part,), simple=True) for part in path)
        for start in range(len(parts)):
            shape, sharding = known.get(parts[start:], (None, replicated))
            if shape is not None:
                return sharding if shape == tuple(leaf.shape) else replicated
        return replicated

    return jax.tree_util.tree_map_with_path(follow, tree)


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

    The weights are initialised under `jax.jit`, each device its own shard; they are the same on every mesh. `rules`
    default to the model's `partition_rules`.
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
        # Leaves only: building the model a second time need not give an equal static graph.
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
    """The same from a model that has its weights. They are copied: the model stays usable."""
    graphdef, params, variables, streams = split_model(model)

    def assemble(params: Any, variables: Any, key: Any) -> TrainState:
        return TrainState.assemble((graphdef, params, variables, streams), tx, key, frozen)

    key = as_key(rng)
    shapes = jax.eval_shape(assemble, params, variables, key)
    shardings = state_shardings(shapes, mesh, rules or getattr(model, "partition_rules", None))
    params = copy_to_mesh(params, shardings.params)
    trained, _ = partition(params, shapes.trainable)
    with jax.set_mesh(mesh):
        opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(trained)
    state = shapes.replace(
        step=copy_to_mesh(np.zeros((), np.int32), shardings.step),
        params=params,
        opt_state=opt_state,
        variables=copy_to_mesh(variables, shardings.variables),
        rng=copy_to_mesh(jax.random.key_data(key), shardings.rng),
    )
    return state, shardings


def make_sharded(
    model: Any,
    prepare: Callable[[Any], nnx.Module],
    tx: optax.GradientTransformation,
    rng: Any,
    mesh: Mesh,
    **options: Any,
) -> TrainState:
    """A new state on the mesh, from a module or a function that builds one. `prepare` gets the module first."""
    if isinstance(model, nnx.Module):
        return create_sharded(prepare(model), tx, rng, mesh, **options)[0]
    return init_sharded(lambda rngs: prepare(model(rngs)), tx, rng, mesh, **options)[0]


def copy_to_mesh(tree: Any, shardings: Any) -> Any:
    """Arrays of the host or of a device, copied to their shardings. Each device receives its own shard only."""

    def copy(array: Any, sharding: NamedSharding) -> Any:
        if isinstance(array, jax.Array):
            # `device_put` alone may share a buffer, and donating the state would delete it for both.
            return jnp.copy(jax.device_put(array, sharding))
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(copy, tree, shardings)


# -- batches -----------------------------------------------------------------------------------------------------


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows sharded over the data axes."""
    return NamedSharding(mesh, PartitionSpec(data_axes(mesh)))


def check_rows(rows: int, mesh: Mesh, accumulation: int = 1) -> None:
    """Raise if a batch does not divide evenly over the devices and micro-batches."""
    shards = data_shards(mesh)
    if rows % (shards * accumulation):
        parts = f"{shards} devices ({' * '.join(data_axes(mesh))})" + (
            f" times {accumulation} micro-batches" if accumulation > 1 else ""
        )
        raise DataError(
            f"Expected a batch whose rows divide over {parts}, received {rows} rows. Use a batch size that is a "
            f"multiple of {shards * accumulation}, and drop or pad the last batch of an epoch."
        )


def constrain_rows(tree: Any, axis: int = 0) -> Any:
    """Keep the rows of arrays sharded over the data axes of the current mesh, if there is one.

    Rows that do not divide evenly are sharded too: XLA pads them, and masks the padding in every operation.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not {"dp", "fsdp"} <= set(mesh.axis_names):
        return tree
    spec = PartitionSpec(*[None] * axis, data_axes(mesh))

    def constrain(leaf: Any) -> Any:
        return leaf if jnp.ndim(leaf) <= axis else jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree.map(constrain, tree)
