"""`TrainState`: step, parameters, optimizer state and PRNG key as one pytree, plus the static model graph.

`flax.nnx` modules are split into a static graph and nested dicts of arrays, so that everything else is `jax.jit`,
`jax.grad` and `jax.lax.scan` of pure functions. RNG streams inside a module (`nnx.Dropout`) are not part of the state:
each gets a key derived from the step's key whenever the module is merged. Placement of the arrays is in `sharding`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from flax.traverse_util import flatten_dict, unflatten_dict

from trainformer.core.errors import BadArgument, did_you_mean, expected

Tree = Mapping[Any, Any]
"""A nested dict of arrays."""
Streams = tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...]
"""Paths of a module's RNG streams, with the shape of each one's key."""


@struct.dataclass
class TrainState:
    """Everything a step reads and updates, as one pytree. Static fields are part of the tree structure.

    `params` and `variables` (batch statistics and the like) are nested dicts. `rng` never changes: the key of a step is
    `jax.random.fold_in(key, step)`. It holds raw key data, because a typed key among the arguments or results of a
    jitted function costs about 60 µs (it leaves jax's fast dispatch path). A jitted step that donates its state
    invalidates the old one; keep the returned state.
    """

    step: Any
    params: Any
    opt_state: Any
    variables: Any
    rng: Any
    graphdef: Any = struct.field(pytree_node=False)
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    trainable: tuple[str, ...] | None = struct.field(pytree_node=False, default=None)
    streams: Streams = struct.field(pytree_node=False, default=())
    rng_impl: str | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        rng: Any = 0,
        frozen: str | Sequence[str] | None = None,
    ) -> TrainState:
        """The state at step 0. `rng` is a key or a seed; `frozen` are regexes of parameters that are not trained."""
        return cls.assemble(split_model(model), tx, as_key(rng), frozen)

    @classmethod
    def assemble(
        cls,
        parts: tuple[Any, dict[Any, Any], dict[Any, Any], Streams],
        tx: optax.GradientTransformation,
        key: Any,
        frozen: str | Sequence[str] | None = None,
    ) -> TrainState:
        """The same from the result of `split_model`."""
        graphdef, params, variables, streams = parts
        trainable = trainable_paths(params, frozen)
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=tx.init(partition(params, trainable)[0]),
            variables=variables,
            rng=jax.random.key_data(key),
            rng_impl=str(jax.random.key_impl(key)),
            graphdef=graphdef,
            tx=tx,
            trainable=trainable,
            streams=streams,
        )

    @property
    def model(self) -> nnx.Module:
        """The module with the current parameters. It shares their buffers: donating the state invalidates both."""
        return self.merge(self.params, self.variables, self.key)

    @property
    def key(self) -> Any:
        """The PRNG key of the run."""
        return jax.random.wrap_key_data(self.rng, impl=self.rng_impl)

    def merge(self, params: Tree, variables: Tree, key: Any) -> nnx.Module:
        """The module with other parameters of the same structure, its RNG streams seeded from `key`."""
        return merge_model(self.graphdef, params, variables, self.streams, as_key(key))

    def apply_gradients(self, *, grads: Any, variables: Any = None) -> TrainState:
        """One optimizer update. `grads` are those of all parameters, or of the trainable ones."""
        grads = as_pure_dict(grads)
        params, frozen = partition(self.params, self.trainable)
        if self.trainable is not None:
            grads = partition(grads, self.trainable)[0]
        updates, opt_state = self.tx.update(grads, self.opt_state, params)
        return self.replace(
            step=self.step + 1,
            params=combine(optax.apply_updates(params, updates), frozen),
            opt_state=opt_state,
            variables=self.variables if variables is None else as_pure_dict(variables),
        )

    if TYPE_CHECKING:  # added by `struct.dataclass`

        def replace(self, **changes: Any) -> TrainState: ...


EasyDeLState = TrainState


# -- modules and dicts -------------------------------------------------------------------------------------------


def split_model(model: nnx.Module) -> tuple[Any, dict[Any, Any], dict[Any, Any], Streams]:
    """A module as static graph, parameters, other variables, and the paths of its RNG streams."""
    graphdef, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
    params, streams, variables = (state.to_pure_dict() for state in states)
    keys = [(path, tuple(value.shape)) for path, value in flatten_dict(streams).items() if path[-1] == "key"]
    return graphdef, params, variables, tuple(keys)


def merge_model(graphdef: Any, params: Tree, variables: Tree, streams: Streams, key: Any) -> nnx.Module:
    """The inverse of `split_model`; each RNG stream gets a key folded from `key` and its path."""
    leaves: dict[tuple[Any, ...], Any] = {}
    for path, shape in streams:
        own = jax.random.fold_in(key, zlib.crc32(path_string(path).encode()))
        leaves[path] = jax.random.split(own, shape) if shape else own
        leaves[(*path[:-1], "count")] = jnp.zeros(shape, jnp.uint32)
    return nnx.merge(graphdef, params, unflatten_dict(leaves), variables)


def variables_after(model: nnx.Module, before: dict[Any, Any]) -> dict[Any, Any]:
    """The non-parameter variables of a module after a forward pass, with the paths of `before` only.

    This leaves out what a module stores during the forward pass (`nnx.Intermediate`).
    """
    found = flatten_dict(nnx.state(model).to_pure_dict())
    return unflatten_dict({path: found[path] for path in flatten_dict(before)})


def as_pure_dict(tree: Any) -> Any:
    """A nested dict, also from an `nnx.State`."""
    return tree.to_pure_dict() if isinstance(tree, nnx.State) else tree


def as_key(rng: Any) -> Any:
    """A typed PRNG key from a seed, a raw key or a typed key.

    >>> as_key(3) == jax.random.key(3)
    Array(True, dtype=bool)
    """
    if isinstance(rng, int):
        return jax.random.key(rng)
    return rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)


# -- parameters by path ------------------------------------------------------------------------------------------


def path_string(path: Iterable[Any]) -> str:
    """The path of a parameter as sharding rules and messages write it.

    >>> path_string(("layers", 0, "kernel"))
    'layers/0/kernel'
    """
    return "/".join(str(part) for part in path)


def partition(params: Tree, trainable: Iterable[str] | None) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Split parameters into trainable and frozen ones.

    >>> partition({"a": {"b": 1, "c": 2}}, ("a/b",))
    ({'a': {'b': 1}}, {'a': {'c': 2}})
    """
    if trainable is None:
        return dict(params), {}
    wanted = set(trainable)
    split: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    for path, value in flatten_dict(dict(params)).items():
        split[path_string(path) not in wanted][path] = value
    return unflatten_dict(split[0]), unflatten_dict(split[1])


def combine(first: dict[Any, Any], second: dict[Any, Any]) -> dict[Any, Any]:
    """The inverse of `partition`.

    >>> combine({"a": {"b": 1}}, {"a": {"c": 2}})
    {'a': {'b': 1, 'c': 2}}
    """
    return unflatten_dict({**flatten_dict(first), **flatten_dict(second)}) if second else dict(first)


def trainable_paths(params: dict[Any, Any], frozen: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Paths of the parameters that match no regex of `frozen`; None if all are trainable."""
    if not frozen:
        return None
    patterns = [frozen] if isinstance(frozen, str) else list(frozen)
    paths = sorted(path_string(path) for path in flatten_dict(params))
    for pattern in patterns:
        try:
            is_found = any(re.search(pattern, path) for path in paths)
        except re.error as error:
            raise BadArgument(expected("frozen parameters as regular expressions", pattern, str(error))) from error
        if not is_found:
            advice = did_you_mean(pattern, paths) or f"Parameters have paths like {paths[0]!r}."
            raise BadArgument(expected("a frozen pattern that matches the path of a parameter", pattern, advice))
    left = tuple(path for path in paths if not any(re.search(pattern, path) for pattern in patterns))
    if not left:
        raise BadArgument(expected("at least one trainable parameter", f"frozen={patterns}", "Freeze fewer of them."))
    return left
