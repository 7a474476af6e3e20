"""The training step and the evaluation step: pure functions of (state, batch), and their jitted versions.

A step sums losses, gradients and weights over its micro-batches and divides once, so that its result does not depend
on how the batch was sliced or on how many devices share it. What the optimizer does with the gradients is the business
of the state's `tx`; clipping happens here, where the gradient of the whole step is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.compiling import Compilations
from trainformer.backends.jax.precision import cast_floating, compute_in
from trainformer.backends.jax.remat import resolve_remat
from trainformer.backends.jax.sharding import batch_sharding, constrain_rows
from trainformer.backends.jax.state import TrainState, combine, partition, variables_of
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Loss, Mean

LossFunction = Callable[[nnx.Module, Mapping[str, Any], Any], Any]
"""``loss(model, batch, key)``: a mean over the batch's rows, a `Loss` or a `Mean`."""
VALID = "_valid"
"""Key of a batch that says which rows count; the others are there to make up its size."""


class StepOutput(TypedDict):
    """What a step says of itself; all values are scalars on the device. Pairs are (sum, weight)."""

    loss: tuple[Any, Any]
    metrics: dict[str, tuple[Any, Any]]
    grad_norm: Any
    finite: Any


class _Sums(TypedDict):
    """What micro-batches add up."""

    loss: Any
    weight: Any
    metrics: dict[str, tuple[Any, Any]]


def make_train_step(
    loss: LossFunction,
    *,
    accumulation: int = 1,
    compute_dtype: Any = None,
    clip: float | None = None,
    skip_nonfinite: bool = True,
    remat: Any = None,
) -> Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, StepOutput]]:
    """A pure function ``(state, batch) -> (state, output)`` for a batch that holds a whole optimizer step.

    With `skip_nonfinite`, a step whose loss or gradient is not finite leaves parameters, optimizer state and variables
    as they were; its number is counted all the same. So does a step whose weight is 0. `clip` bounds the norm of all
    trained parameters' gradients together.
    """
    if not isinstance(accumulation, int) or accumulation < 1:
        raise BadArgument(expected("accumulation to be a positive whole number", accumulation))
    if clip is not None and not clip > 0:
        raise BadArgument(expected("clip to be positive, or None for no clipping", clip))
    forward = _forward(loss, compute_dtype, remat)

    def train_step(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, StepOutput]:
        trained, frozen = partition(state.params, state.trainable)
        step_key = jax.random.fold_in(state.key, state.step)
        gradient = jax.value_and_grad(forward, has_aux=True)

        def micro_step(variables: Any, index: Any, micro_batch: Any) -> tuple[Any, _Sums, Any]:
            key = jax.random.fold_in(step_key, index)
            (_, (sums, variables)), grads = gradient(trained, frozen, variables, state, micro_batch, key)
            return variables, sums, cast_floating(grads, jnp.float32)

        if accumulation == 1:
            variables, sums, grads = micro_step(state.variables, 0, batch)
        else:
            variables, sums, grads = _accumulate(micro_step, state.variables, batch, accumulation)
        norm, factor = _norm_and_factor(grads, sums["weight"], clip)
        grads = jax.tree.map(lambda g, p: (g * factor).astype(p.dtype), grads, trained)
        new = state.apply_gradients(grads=grads, variables=variables)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        if skip_nonfinite:
            new = _keep_unless(finite & (sums["weight"] != 0), new, state)
        return new, {
            "loss": (sums["loss"], sums["weight"]),
            "metrics": sums["metrics"],
            "grad_norm": norm,
            "finite": finite,
        }

    return train_step


def make_eval_step(
    loss: LossFunction, *, compute_dtype: Any = None
) -> Callable[[TrainState, Mapping[str, Any]], dict[str, Any]]:
    """A pure function ``(state, batch) -> {"loss": (sum, weight), "metrics": {...}}``, the model in evaluation mode."""
    forward = _forward(loss, compute_dtype, remat=None, train=False)

    def eval_step(state: TrainState, batch: Mapping[str, Any]) -> dict[str, Any]:
        key = jax.random.fold_in(state.key, state.step)
        _, (sums, _) = forward(state.params, {}, state.variables, state, batch, key)
        return {"loss": (sums["loss"], sums["weight"]), "metrics": sums["metrics"]}

    return eval_step


# -- one micro-batch ---------------------------------------------------------------------------------------------


def _forward(loss: LossFunction, compute_dtype: Any, remat: Any, train: bool = True) -> Callable[..., Any]:
    policy = resolve_remat(remat)
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)

    def forward(trained: Any, frozen: Any, variables: Any, state: TrainState, batch: Any, key: Any) -> Any:
        params = combine(trained, frozen)
        if dtype is not None:
            params = cast_floating(params, dtype)
        model = state.merge(params, variables, key)
        if dtype is not None and dtype != jnp.float32:
            compute_in(model, dtype)
        model.train() if train else model.eval()
        sums = _sums(loss(model, batch, key), batch)
        return sums["loss"], (sums, variables_of(model, variables))

    if policy is None:
        return forward

    def forward_again(trained: Any, frozen: Any, variables: Any, state: TrainState, batch: Any, key: Any) -> Any:
        # The state only lends its static parts; closed over, it is no argument that `jax.checkpoint` would keep.
        again = jax.checkpoint(lambda t, f, v, b, k: forward(t, f, v, state, b, k), policy=policy)
        return again(trained, frozen, variables, batch, key)

    return forward_again


def _sums(output: Any, batch: Any) -> _Sums:
    """Sum, weight and metrics of what a loss function returned."""
    rows = rows_of(batch)
    if isinstance(output, Loss):
        total, weight = output.sum, output.weight
    elif isinstance(output, Mean):
        value = 0.0 if output.value is None else output.value
        total, weight = value * output.weight, output.weight
    else:
        total, weight = output * rows if _is_scalar(output) else output, rows
    if not _is_scalar(total) or not _is_scalar(weight):
        shapes = [getattr(value, "shape", type(value).__name__) for value in (total, weight)]
        raise BadArgument(
            expected("the loss to be a scalar, or a Loss(sum, weight) of scalars", shapes, "Take its mean or sum.")
        )
    metrics = {name: _pair(name, value, rows) for name, value in (getattr(output, "metrics", None) or {}).items()}
    return {"loss": _wide(total), "weight": jax.lax.stop_gradient(_wide(weight)), "metrics": metrics}


def _pair(name: str, value: Any, rows: Any) -> tuple[Any, Any]:
    total, weight = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value * rows, rows)
    if not _is_scalar(total) or not _is_scalar(weight):
        shape = getattr(total, "shape", type(total).__name__)
        raise BadArgument(expected(f"metric {name!r} to be a scalar or a (sum, weight) pair", shape))
    return jax.lax.stop_gradient(_wide(total)), jax.lax.stop_gradient(_wide(weight))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def _wide(value: Any) -> Any:
    return jnp.asarray(value, jnp.float32)


def rows_of(batch: Any) -> Any:
    """How many rows of a batch count: all of them, or those that `VALID` marks."""
    if isinstance(batch, Mapping) and VALID in batch:
        return jnp.sum(batch[VALID], dtype=jnp.float32)
    for leaf in jax.tree.leaves(batch):
        if jnp.ndim(leaf):
            return leaf.shape[0]
    raise BadArgument(expected("a batch with at least one array that has rows", type(batch).__name__))


# -- the whole step ----------------------------------------------------------------------------------------------


def _accumulate(micro_step: Callable[..., Any], variables: Any, batch: Any, accumulation: int) -> tuple[Any, Any, Any]:
    """Add up what micro-batches give; variables (batch statistics) go from one to the next."""
    pieces = jax.tree.map(lambda leaf: _split_rows(leaf, accumulation), batch)
    first = jax.tree.map(lambda leaf: leaf[0], pieces)
    _, *shapes = jax.eval_shape(micro_step, variables, 0, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(carry: Any, indexed: Any) -> tuple[Any, None]:
        before, totals = carry
        index, piece = indexed
        after, *new = micro_step(before, index, constrain_rows(piece))
        return (after, jax.tree.map(jnp.add, totals, new)), None

    (variables, (sums, grads)), _ = jax.lax.scan(body, (variables, zeros), (jnp.arange(accumulation), pieces))
    return variables, sums, grads


def _split_rows(leaf: Any, accumulation: int) -> Any:
    """(rows, ...) as (accumulation, rows / accumulation, ...), each piece spread over all devices that share the rows.

    The rows of a device are neighbours. Taking every n-th row into a piece leaves each device its own rows.
    """
    if not jnp.ndim(leaf):
        return jnp.broadcast_to(leaf, (accumulation,))
    if leaf.shape[0] % accumulation:
        raise BadArgument(
            f"Expected the {leaf.shape[0]} rows of a batch to divide into {accumulation} micro-batches. "
            "Choose a batch size that is a multiple of the accumulation."
        )
    pieces = leaf.reshape(leaf.shape[0] // accumulation, accumulation, *leaf.shape[1:]).swapaxes(0, 1)
    return constrain_rows(pieces, axis=1)


def _norm_and_factor(grads: Any, weight: Any, clip: float | None) -> tuple[Any, Any]:
    """The norm of the mean gradient, and what turns summed gradients into those of the clipped mean."""
    factor = jnp.where(weight == 0, 0.0, 1.0 / jnp.where(weight == 0, 1.0, weight))
    norm = optax.global_norm(grads) * factor
    if clip is not None:
        factor = factor * (clip / jnp.maximum(norm, clip))
    return norm, factor


def _keep_unless(good: Any, new: TrainState, old: TrainState) -> TrainState:
    """The new state if the step was good, else the old one with the step counted."""

    def choose(a: Any, b: Any) -> Any:
        # The learning rate goes by the steps of the run, also by those that changed nothing.
        return a if _counts_steps(a) else jnp.where(good, a, b)

    return new.replace(
        params=jax.tree.map(choose, new.params, old.params),
        opt_state=jax.tree.map(choose, new.opt_state, old.opt_state, is_leaf=_counts_steps),
        variables=jax.tree.map(choose, new.variables, old.variables),
    )


def _counts_steps(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


# -- jitted ------------------------------------------------------------------------------------------------------


class JittedStep:
    """A jitted step on a mesh. It knows how often it was compiled (`compilations.count`), and warns when it is again.

    A step that returns a state gives up the memory of the one it was given; do not use that one again.
    """

    def __init__(
        self, step: Callable[..., Any], mesh: Mesh, shardings: TrainState, *, train: bool, name: str | None = None
    ) -> None:
        self.mesh = mesh
        self.compilations = Compilations(name or ("train step" if train else "eval step"))
        self._train = train
        self._watched = self.compilations.watch(step)
        self._shardings = shardings
        self._jitted = self._with_shardings()

    def _with_shardings(self) -> Any:
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(
            self._watched,
            in_shardings=(self._shardings, batch_sharding(self.mesh)),
            out_shardings=(self._shardings, everywhere) if self._train else everywhere,
            donate_argnums=0 if self._train else (),
        )

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """Take the step. It returns before the device is done."""
        known = self._shardings
        if state.tx is not known.tx or state.graphdef is not known.graphdef or state.trainable is not known.trainable:
            self._adapt(state)
        with jax.set_mesh(self.mesh):
            return self._for(batch)(state, batch)

    def _for(self, batch: Any) -> Any:
        """The compiled function for a batch: one for all."""
        return self._jitted

    def _adapt(self, state: TrainState) -> None:
        """Take shardings over to a state with other static parts; what that costs is logged when it is compiled."""
        structure: Any = jax.tree.structure(state)
        places = jax.tree.leaves(self._shardings)
        is_equal = structure == jax.tree.structure(self._shardings)
        if structure.num_leaves != len(places):
            raise BadArgument(
                expected(
                    f"a state with {len(places)} arrays, as at the beginning", structure.num_leaves, "Make a new step."
                )
            )
        self._shardings = jax.tree.unflatten(structure, places)
        if not is_equal:
            self._jitted = self._with_shardings()

    def lower(self, state: TrainState, batch: Any) -> Any:
        """What `jax.jit` lowers: for its memory and cost analysis. Counted as a compilation, and not kept by jit."""
        self._adapt(state)
        with jax.set_mesh(self.mesh):
            return self._for(batch).lower(state, batch)


def jit_train_step(step: Callable[..., Any], mesh: Mesh, shardings: TrainState) -> JittedStep:
    """A train step with its shardings, that reuses the memory of the state it is given."""
    return JittedStep(step, mesh, shardings, train=True)


def jit_eval_step(step: Callable[..., Any], mesh: Mesh, shardings: TrainState) -> JittedStep:
    """An eval step with its shardings."""
    return JittedStep(step, mesh, shardings, train=False)
