"""The train step and the eval step as pure functions of (state, batch); `compilation` jits them.

A step sums losses, gradients and weights over its micro-batches and divides once, so that the result does not depend on
gradient accumulation or the number of devices. Gradient clipping happens here, where the gradient of the whole step is
known; the optimizer is the state's `tx`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict

from trainformer.backends.jax.gradient_norms import NORMS, parameter_norms
from trainformer.backends.jax.precision import cast_floating, set_compute_dtype
from trainformer.backends.jax.sharding import constrain_rows
from trainformer.backends.jax.state import TrainState, combine, partition, path_string, variables_after
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.types import Loss, Mean
from trainformer.data.mixture.dataset import SOURCE

logger = logging.getLogger("trainformer")

LossFunction = Callable[[nnx.Module, Mapping[str, Any], Any], Any]
"""``loss(model, batch, key)``: a mean over the batch's rows, that and a dict of metrics, a `Loss` or a `Mean`."""
VALID = "_valid"
"""Key of a batch that marks its valid rows; the others are padding."""
TOTALS = "_totals"
"""Key of a batch with the totals of the whole step, if its loss depends on any."""


class EvalOutput(NamedTuple):
    """What an evaluation function may return instead of a loss: the loss, and arrays with a value for each row.

    The rows of a whole evaluation are collected on the host, for metrics that are no means.
    """

    loss: Any
    rows: Mapping[str, Any]


class Sources(NamedTuple):
    """The names of the sources of a mixture, and whether each batch comes from one of them."""

    names: tuple[str, ...]
    is_single: bool = False

    def losses(self, output: Any, sums: Mapping[str, Any], numbers: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        """The loss of each source, as a metric. Without losses per sample only single sources have one."""
        rows = getattr(output, "per_sample", None)
        if rows is None and not self.is_single:
            logger.warning(
                "the losses of %s are not logged: a batch has samples of several sources. Return Loss(sum, weight, "
                "per_sample=losses) with the loss of each sample, or pass mix='batch' to the Mixture.",
                ", ".join(self.names),
            )
            return {}
        if self.is_single:
            rows, numbers = (sums["loss"][None], sums["weight"][None]), numbers[:1]
        else:
            valid = batch.get(VALID, jnp.ones(numbers.shape, bool))
            pair = rows if isinstance(rows, tuple) else (rows, jnp.ones(numbers.shape))
            rows = tuple(jnp.where(valid, jnp.asarray(values, jnp.float32), 0.0) for values in pair)
        found = {}
        for number, name in enumerate(self.names):
            total, weight = (jnp.sum(jnp.where(numbers == number, values, 0.0)) for values in rows)
            found[f"loss/{name}"] = (jax.lax.stop_gradient(total), jax.lax.stop_gradient(weight))
        return found


class StepOutput(TypedDict):
    """The output of a train step: scalars on the device. Pairs are (sum, weight)."""

    loss: tuple[Any, Any]
    metrics: dict[str, tuple[Any, Any]]
    grad_norm: Any
    finite: Any


def make_train_step(
    loss: LossFunction,
    *,
    accumulation: int = 1,
    compute_dtype: Any = None,
    clip: float | None = None,
    remat: Any = None,
    sources: Sources | None = None,
    totals: Callable[[nnx.Module, Mapping[str, Any]], Any] | None = None,
) -> Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, StepOutput]]:
    """A pure function ``(state, batch) -> (state, output)`` for a batch that holds a whole optimizer step.

    A step with a non-finite loss or gradient leaves parameters, optimizer state and variables unchanged, but still
    increments the step counter. So does a step whose weight is 0. `clip` is the maximum global gradient norm.
    `sources` adds the loss of each source of a mixture to the metrics. `totals(model, batch)` returns arrays that are
    summed over the micro-batches before the first of them; the loss finds the sums in ``batch[TOTALS]``. A step with
    ``gradient_norms=True`` also returns the gradient norm of each parameter.
    """
    if not isinstance(accumulation, int) or accumulation < 1:
        raise BadArgument(expected("accumulation to be a positive integer", accumulation))
    if clip is not None and not clip > 0:
        raise BadArgument(expected("clip to be positive, or None for no clipping", clip))
    forward = _forward(loss, compute_dtype, remat, sources=sources)
    of_step = None if totals is None else _step_totals(totals, accumulation, compute_dtype)

    def train_step(
        state: TrainState, batch: Mapping[str, Any], gradient_norms: bool = False
    ) -> tuple[TrainState, StepOutput]:
        totals_of_step = {} if of_step is None else {TOTALS: of_step(state, batch)}
        trained, frozen = partition(state.params, state.trainable)
        step_key = jax.random.fold_in(state.key, state.step)
        gradient = jax.value_and_grad(forward, has_aux=True)

        def micro_step(variables: Any, index: Any, micro_batch: Any) -> tuple[Any, Any, Any]:
            key = jax.random.fold_in(step_key, index)
            (_, (sums, variables)), grads = gradient(
                trained, frozen, variables, state, {**micro_batch, **totals_of_step}, key
            )
            return variables, sums, cast_floating(grads, jnp.float32)

        if accumulation == 1:
            variables, sums, grads = micro_step(state.variables, 0, batch)
        else:
            variables, sums, grads = _accumulate(micro_step, state.variables, batch, accumulation)
        weight = sums["weight"]
        # From summed gradients to the clipped mean.
        factor = jnp.where(weight == 0, 0.0, 1.0 / jnp.where(weight == 0, 1.0, weight))
        norm = optax.global_norm(grads) * factor
        by_parameter = {NORMS: parameter_norms(grads) * factor} if gradient_norms else {}
        if clip is not None:
            factor = factor * (clip / jnp.maximum(norm, clip))
        grads = jax.tree.map(lambda g, p: (g * factor).astype(p.dtype), grads, trained)
        new = state.apply_gradients(grads=grads, variables=variables)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        new = _select_state(finite & (weight != 0), new, state)
        output = {"loss": (sums["loss"], weight), "metrics": sums["metrics"], "grad_norm": norm, "finite": finite}
        return new, {**output, **by_parameter}  # type: ignore[typeddict-item]

    return train_step


def make_eval_step(
    loss: LossFunction, *, compute_dtype: Any = None
) -> Callable[[TrainState, Mapping[str, Any]], dict[str, Any]]:
    """A pure function ``(state, batch) -> {"loss": (sum, weight), "metrics": {...}}``, with the model in eval mode.

    If the loss function returns an `EvalOutput`, there are "rows" too, with `VALID` among them.
    """
    forward = _forward(loss, compute_dtype, remat=None, train=False)

    def eval_step(state: TrainState, batch: Mapping[str, Any]) -> dict[str, Any]:
        key = jax.random.fold_in(state.key, state.step)
        _, (sums, _) = forward(state.params, {}, state.variables, state, batch, key)
        found = {"loss": (sums["loss"], sums["weight"]), "metrics": sums["metrics"]}
        if "rows" in sums:
            found["rows"] = {VALID: batch.get(VALID, jnp.ones(_num_rows(batch), bool)), **sums["rows"]}
        return found

    return eval_step


def make_predict_step(
    predict: Callable[[nnx.Module, Mapping[str, Any]], Mapping[str, Any]], *, compute_dtype: Any = None
) -> Callable[[TrainState, Mapping[str, Any]], dict[str, Any]]:
    """A pure function ``(state, batch) -> {name: rows}`` of `predict`, with the model in eval mode."""

    def predict_step(state: TrainState, batch: Mapping[str, Any]) -> dict[str, Any]:
        rows = predict(eval_model(state, compute_dtype), batch)
        if not isinstance(rows, Mapping) or not all(jnp.ndim(value) for value in rows.values()):
            received = (
                rows if not isinstance(rows, Mapping) else {name: jnp.shape(value) for name, value in rows.items()}
            )
            raise BadArgument(expected("predict_step to return a dict of arrays with one row per sample", received))
        return {name: jnp.asarray(value) for name, value in rows.items()}

    return predict_step


def eval_model(state: TrainState, compute_dtype: Any = None) -> nnx.Module:
    """The module of a state in eval mode, with its parameters in the compute dtype."""
    return _model(state, state.params, state.variables, state.key, compute_dtype)


def make_gradient_check(loss: LossFunction, *, compute_dtype: Any = None) -> Callable[[TrainState, Any], Any]:
    """A pure function ``(state, batch) -> (sums, found)`` without an update, for checks.

    `found` says of each trainable parameter, by path, whether its gradient is nonzero anywhere and finite everywhere.
    """
    forward = _forward(loss, compute_dtype, remat=None)

    def gradients(state: TrainState, batch: Any) -> Any:
        trained, frozen = partition(state.params, state.trainable)
        key = jax.random.fold_in(state.key, state.step)
        gradient = jax.grad(forward, has_aux=True)
        grads, (sums, _) = gradient(trained, frozen, state.variables, state, constrain_rows(batch), key)
        found = {
            path_string(path): (jnp.any(grad != 0), jnp.all(jnp.isfinite(grad)))
            for path, grad in flatten_dict(grads).items()
        }
        return {"loss": sums["loss"], "weight": sums["weight"]}, found

    return gradients


# -- one micro-batch ---------------------------------------------------------------------------------------------


def _forward(
    loss: LossFunction, compute_dtype: Any, remat: Any, train: bool = True, sources: Sources | None = None
) -> Callable[..., Any]:
    policy = resolve_remat(remat)

    def forward(trained: Any, frozen: Any, variables: Any, state: TrainState, batch: Any, key: Any) -> Any:
        model = _model(state, combine(trained, frozen), variables, key, compute_dtype, train)
        if sources is None:
            sums = _sums(_call(loss, model, batch, key), batch)
        else:
            numbers, batch = batch[SOURCE], {name: value for name, value in batch.items() if name != SOURCE}
            output = _call(loss, model, batch, key)
            sums = _sums(output, batch)
            sums["metrics"] |= sources.losses(output, sums, numbers, batch)
        return sums["loss"], (sums, variables_after(model, variables))

    if policy is None:
        return forward

    # Only static fields of the state are used. Closing over it keeps its arrays out of the checkpoint's residuals.
    return lambda trained, frozen, variables, state, batch, key: jax.checkpoint(
        lambda t, f, v, b, k: forward(t, f, v, state, b, k), policy=policy
    )(trained, frozen, variables, batch, key)


def _model(
    state: TrainState, params: Any, variables: Any, key: Any, compute_dtype: Any, train: bool = False
) -> nnx.Module:
    """The module with its parameters in the compute dtype."""
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    if dtype is not None:
        params = cast_floating(params, dtype)
    model = state.merge(params, variables, key)
    if dtype is not None and dtype != jnp.float32:
        set_compute_dtype(model, dtype)
    model.train() if train else model.eval()
    return model


def _call(loss: LossFunction, model: nnx.Module, batch: Any, key: Any) -> Any:
    try:
        return loss(model, batch, key)
    except KeyError as error:
        name = error.args[0] if error.args else None
        if not isinstance(name, str) or not isinstance(batch, Mapping) or name in batch:
            raise
        known = [str(key) for key in batch]
        do = did_you_mean(name, known) or "Read one of those in the loss, or let the collate function add it."
        raise DataError(expected(f"a batch with the key {name!r}, which the loss reads", known, do)) from error


def _sums(output: Any, batch: Any) -> dict[str, Any]:
    """Sum, weight and metrics from the return value of a loss function."""
    if isinstance(output, EvalOutput):
        return {**_sums(output.loss, batch), "rows": dict(output.rows)}
    rows = valid_rows(batch)
    metrics = getattr(output, "metrics", None) or {}
    if isinstance(output, tuple) and not isinstance(output, (Loss, Mean)):
        output, metrics = _mean_and_metrics(output)
    if isinstance(output, Loss):
        total, weight = output.sum, output.weight
    elif isinstance(output, Mean):
        value = 0.0 if output.value is None else output.value
        total, weight = value * output.weight, output.weight
    else:
        total, weight = output * rows if _is_scalar(output) else output, rows
    if not _is_scalar(total) or not _is_scalar(weight):
        parts = (total, weight) if isinstance(output, (Loss, Mean)) else (output,)
        shapes = " and ".join("None" if part is None else _kind(part) for part in parts)
        what = "the loss to be a scalar, or a Loss(sum, weight) of scalars"
        raise BadArgument(expected(what, shapes, "Take its mean or sum."))
    pairs = {name: _pair(name, value, rows) for name, value in metrics.items()}
    return {"loss": _float32(total), "weight": jax.lax.stop_gradient(_float32(weight)), "metrics": pairs}


def _mean_and_metrics(output: tuple[Any, ...]) -> tuple[Any, Mapping[str, Any]]:
    """The mean and the metrics of a loss function that returns ``(loss, aux)``, as `jax.value_and_grad` expects it."""
    if len(output) == 2 and _is_scalar(output[0]) and isinstance(output[1], Mapping):
        return output[0], output[1]
    kinds = tuple(map(_kind, output))
    do = "Return Loss(sum, weight, metrics) from trainformer.core for a loss with another weight than the rows."
    raise BadArgument(expected("the loss to be a scalar, or a scalar and a dict of scalars to log", kinds, do))


def _pair(name: str, value: Any, rows: Any) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        total, weight = value
    else:
        total, weight = value * rows if _is_scalar(value) else value, rows
    if not _is_scalar(total) or not _is_scalar(weight):
        shape = getattr(total, "shape", type(total).__name__)
        raise BadArgument(expected(f"metric {name!r} to be a scalar or a (sum, weight) pair", shape))
    return jax.lax.stop_gradient(_float32(total)), jax.lax.stop_gradient(_float32(weight))


def _kind(value: Any) -> str:
    return f"array of shape {value.shape}" if hasattr(value, "shape") else type(value).__name__


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def _float32(value: Any) -> Any:
    return jnp.asarray(value, jnp.float32)


def valid_rows(batch: Any) -> Any:
    """The number of rows of a batch, or of those that `VALID` marks."""
    if isinstance(batch, Mapping) and VALID in batch:
        return jnp.sum(batch[VALID], dtype=jnp.float32)
    return _num_rows(batch)


def _num_rows(batch: Any) -> int:
    if isinstance(batch, Mapping) and TOTALS in batch:
        batch = {name: column for name, column in batch.items() if name != TOTALS}
    for leaf in jax.tree.leaves(batch):
        if jnp.ndim(leaf):
            return leaf.shape[0]
    raise BadArgument(expected("a batch with at least one array that has rows", type(batch).__name__))


# -- the whole step ----------------------------------------------------------------------------------------------


def _step_totals(totals: Callable[..., Any], accumulation: int, compute_dtype: Any) -> Callable[..., Any]:
    """A function of (state, batch): the totals summed over micro-batches, with the model in eval mode."""

    def of_step(state: TrainState, batch: Any) -> Any:
        def micro_step(variables: Any, index: Any, micro_batch: Any) -> tuple[Any, Any]:
            model = _model(state, state.params, variables, state.key, compute_dtype)
            return variables, jax.tree.map(_float32, totals(model, micro_batch))

        if accumulation == 1:
            return micro_step(state.variables, 0, batch)[1]
        return _accumulate(micro_step, state.variables, batch, accumulation)[1]

    return of_step


def _accumulate(micro_step: Callable[..., Any], variables: Any, batch: Any, accumulation: int) -> tuple[Any, ...]:
    """Sum over micro-batches in a scan; variables (batch statistics) are carried from one to the next.

    The micro-batches of rows that do not divide differ by one row: those with one more are scanned first.
    """
    first = jax.tree.map(lambda leaf: leaf[::accumulation] if jnp.ndim(leaf) else leaf, batch)
    _, *shapes = jax.eval_shape(micro_step, variables, 0, first)
    carry = variables, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(carry: Any, indexed: Any) -> tuple[Any, None]:
        before, totals = carry
        index, piece = indexed
        after, *new = micro_step(before, index, constrain_rows(piece))
        return (after, jax.tree.map(jnp.add, totals, new)), None

    larger = _num_rows(batch) % accumulation
    for start, stop in ((0, larger), (larger, accumulation)):
        if start < stop:
            pieces = jax.tree.map(partial(_micro_batches, accumulation=accumulation, start=start, stop=stop), batch)
            carry, _ = jax.lax.scan(body, carry, (jnp.arange(start, stop), pieces))
    variables, totals = carry
    return variables, *totals


def _micro_batches(leaf: Any, accumulation: int, start: int, stop: int) -> Any:
    """The micro-batches from `start` to `stop`, which have equally many rows, each sharded over all data shards.

    The rows of a device are contiguous. Strided micro-batches (every n-th row) need no communication.
    """
    if not jnp.ndim(leaf):
        return jnp.broadcast_to(leaf, (stop - start,))
    size, rest = divmod(leaf.shape[0], accumulation)
    if not size:
        do = "Choose a batch size of at least the accumulation."
        raise BadArgument(expected(f"a batch with rows for {accumulation} micro-batches", leaf.shape[0], do))
    pieces = leaf[: size * accumulation].reshape(size, accumulation, *leaf.shape[1:]).swapaxes(0, 1)[start:stop]
    if rest and start == 0:
        pieces = jnp.concatenate([pieces, leaf[size * accumulation :, None]], axis=1)
    return constrain_rows(pieces, axis=1)


def _select_state(good: Any, new: TrainState, old: TrainState) -> TrainState:
    """The new state, or if the step was not good the old one with an incremented step counter."""

    def choose(a: Any, b: Any) -> Any:
        # The learning-rate schedule counts skipped steps too.
        return a if _counts_steps(a) else jnp.where(good, a, b)

    return new.replace(
        params=jax.tree.map(choose, new.params, old.params),
        opt_state=jax.tree.map(choose, new.opt_state, old.opt_state, is_leaf=_counts_steps),
        variables=jax.tree.map(choose, new.variables, old.variables),
    )


def _counts_steps(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


# -- rematerialisation -------------------------------------------------------------------------------------------

_POLICIES = (
    *("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"),
    *("checkpoint_dots", "checkpoint_dots_with_no_batch_dims"),
)
_POLICY_ALIASES = {
    **dict.fromkeys(("nothing", "full"), "nothing_saveable"),
    "everything": "everything_saveable",
    "dots": "dots_saveable",
    "dots_no_batch": "dots_with_no_batch_dims_saveable",
}


def resolve_remat(policy: Any) -> Callable[..., Any] | None:
    """A remat policy of `jax.checkpoint` by name; None for no rematerialisation. Functions pass through.

    ``nothing_saveable`` (also: True) saves the most memory, ``dots_saveable`` keeps the results of matmuls.

    >>> resolve_remat("dots") is jax.checkpoint_policies.dots_saveable, resolve_remat("none")
    (True, None)
    """
    if policy is None or policy is False:
        return None
    if callable(policy):
        return policy
    lowered = "nothing_saveable" if policy is True else str(policy).lower()
    if lowered in ("", "none", "no", "off", "false"):
        return None
    name = _POLICY_ALIASES.get(lowered, lowered)
    if name not in _POLICIES:
        known = ("none", *_POLICIES, *_POLICY_ALIASES)
        advice = did_you_mean(lowered, known) or f"Use one of {', '.join(known)}."
        raise BadArgument(expected("the name of a checkpoint policy", policy, advice))
    return getattr(jax.checkpoint_policies, name)
