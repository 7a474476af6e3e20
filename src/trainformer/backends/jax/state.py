"""The state of a training run: step, parameters, optimizer state and random key, and what does not change with them.

Modules are built with `flax.nnx`; here they are taken apart into a static graph and nested dictionaries of arrays, so
that everything else is `jax.jit`, `jax.grad` and `jax.lax.scan` of pure functions. Random streams inside a module
(`nnx.Dropout`) are not carried along: whenever the module is put together again, each gets a key of its own, derived
from the one given. Where the arrays are is the business of `sharding`, what a step does with them that of `step`.
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

from trainformer.core.errors import BadArgument, did_you_mean, expected

Tree = Mapping[Any, Any]
"""A nested dictionary of arrays."""
Streams = tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...]
"""Where a module keeps random streams, and the shape of each one's key."""


@struct.dataclass
class TrainState:
    """Everything a step reads and changes, as one tree of arrays; what is static is part of the tree's type.

    `params` and `variables` (batch statistics and the like) are nested dictionaries. `rng` never changes: the key of a
    step is `jax.random.fold_in(key, step)`. It is kept as the numbers that `key` is made of: a typed key among the
    arguments or results of a jitted function takes it off jax's fast path, which costs some 60 µs. After a jitted step
    that donates its state the old one is gone; keep the one that was returned.
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
        """The state at step 0. `rng` is a key or a seed, `frozen` are regexes of parameters that are not trained."""
        return cls.assemble(take_apart(model), tx, as_key(rng), frozen)

    @classmethod
    def assemble(
        cls,
        parts: tuple[Any, dict[Any, Any], dict[Any, Any], Streams],
        tx: optax.GradientTransformation,
        key: Any,
        frozen: str | Sequence[str] | None = None,
    ) -> TrainState:
        """The same from what `take_apart` gives."""
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
        """The module with the present parameters. It shares their memory: a step that donates the state ends both."""
        return self.merge(self.params, self.variables, self.key)

    @property
    def key(self) -> Any:
        """The random key of the run."""
        return jax.random.wrap_key_data(self.rng, impl=self.rng_impl)

    def merge(self, params: Tree, variables: Tree, key: Any) -> nnx.Module:
        """The module with any parameters of the same kind, its random streams started from `key`."""
        return put_together(self.graphdef, params, variables, self.streams, as_key(key))

    def apply_gradients(self, *, grads: Any, variables: Any = None) -> TrainState:
        """One step of the optimizer. `grads` are those of all parameters, or of the trainable ones."""
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

        def replace(self, **changes: Any) -> TrainState:
            """The same with other values for some fields."""


EasyDeLState = TrainState


# -- modules and dictionaries ------------------------------------------------------------------------------------


def take_apart(model: nnx.Module) -> tuple[Any, dict[Any, Any], dict[Any, Any], Streams]:
    """A module as static graph, parameters, other variables, and where its random streams are."""
    graphdef, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
    params, streams, variables = states
    keys = [(path, tuple(value.shape)) for path, value in flat(streams.to_pure_dict()) if path[-1] == "key"]
    return graphdef, params.to_pure_dict(), variables.to_pure_dict(), tuple(keys)


def put_together(graphdef: Any, params: Tree, variables: Tree, streams: Streams, key: Any) -> nnx.Module:
    """The reverse; every random stream begins anew from `key`, each by its own path."""
    leaves: dict[tuple[Any, ...], Any] = {}
    for path, shape in streams:
        own = jax.random.fold_in(key, zlib.crc32(joined(path).encode()))
        leaves[path] = jax.random.split(own, shape) if shape else own
        leaves[(*path[:-1], "count")] = jnp.zeros(shape, jnp.uint32)
    return nnx.merge(graphdef, params, nested(leaves.items()), variables)


def variables_of(model: nnx.Module, like: Tree) -> dict[Any, Any]:
    """Variables of a module other than parameters, after a forward pass; only those that `like` has too.

    What a module notes down on the way (`nnx.Intermediate`) is thereby left out.
    """
    found = dict(flat(nnx.state(model).to_pure_dict()))
    return nested((path, found[path]) for path, _ in flat(like))


def as_pure_dict(tree: Any) -> Any:
    """A nested dictionary, also of what `nnx` calls a state."""
    return tree.to_pure_dict() if isinstance(tree, nnx.State) else tree


def as_key(rng: Any) -> Any:
    """A typed key from a seed, a key of the old kind, or a typed key.

    >>> as_key(3) == jax.random.key(3)
    Array(True, dtype=bool)
    """
    if isinstance(rng, int):
        return jax.random.key(rng)
    return rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)


# -- trees by path -----------------------------------------------------------------------------------------------


def joined(path: Iterable[Any]) -> str:
    """The path of a parameter as rules and messages have it.

    >>> joined(("layers", 0, "kernel"))
    'layers/0/kernel'
    """
    return "/".join(str(part) for part in path)


def flat(tree: Tree, prefix: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Leaves of a nested dictionary with their paths, in its order.

    >>> flat({"a": {"b": 1}, "c": 2})
    [(('a', 'b'), 1), (('c',), 2)]
    """
    found: list[tuple[tuple[Any, ...], Any]] = []
    for name, value in tree.items():
        path = (*prefix, name)
        found += flat(value, path) if isinstance(value, Mapping) else [(path, value)]
    return found


def nested(leaves: Iterable[tuple[tuple[Any, ...], Any]]) -> dict[Any, Any]:
    """The reverse of `flat`."""
    tree: dict[Any, Any] = {}
    for path, value in leaves:
        place = tree
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return tree


def partition(params: Tree, trainable: Iterable[str] | None) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Those parameters that are trained, and the others.

    >>> partition({"a": {"b": 1, "c": 2}}, ("a/b",))
    ({'a': {'b': 1}}, {'a': {'c': 2}})
    """
    if trainable is None:
        return dict(params), {}
    wanted = set(trainable)
    leaves = [(path, value, joined(path) in wanted) for path, value in flat(params)]
    return nested((p, v) for p, v, is_in in leaves if is_in), nested((p, v) for p, v, is_in in leaves if not is_in)


def combine(first: Tree, second: Tree) -> dict[Any, Any]:
    """The reverse of `partition`.

    >>> combine({"a": {"b": 1}}, {"a": {"c": 2}})
    {'a': {'b': 1, 'c': 2}}
    """
    return nested([*flat(first), *flat(second)]) if second else dict(first)


def trainable_paths(params: Tree, frozen: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Paths of the parameters that no regex of `frozen` is found in; None if that is all of them."""
    if not frozen:
        return None
    patterns = [frozen] if isinstance(frozen, str) else list(frozen)
    paths = sorted(joined(path) for path, _ in flat(params))
    for pattern in patterns:
        try:
            is_found = any(re.search(pattern, path) for path in paths)
        except re.error as error:
            raise BadArgument(expected("frozen parameters as regular expressions", pattern, str(error))) from error
        if not is_found:
            advice = did_you_mean(pattern, paths) or f"Parameters have names like {paths[0]!r}."
            raise BadArgument(expected("a frozen pattern that a parameter's path matches", pattern, advice))
    left = tuple(path for path in paths if not any(re.search(pattern, path) for pattern in patterns))
    if not left:
        raise BadArgument(expected("at least one parameter to train", f"frozen={patterns}", "Freeze fewer of them."))
    return left
