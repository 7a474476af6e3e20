"""Token cross-entropy on JAX, with or without all logits in memory. Never imports torch.

Token losses are (sum, weight) over supervised tokens in float32. With `chunks` only the logits of a part of the
sequence exist at a time, and are recomputed for the gradient: those of 8k tokens and a vocabulary of 128k would take
4 GiB. Preference losses are in `preference`, those of distillation in `divergence`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.core.types import Loss

IGNORE_INDEX = -100
Head = Callable[[jax.Array], jax.Array]
"""Maps hidden states to logits (..., vocabulary)."""


class RowSums(NamedTuple):
    """Loss, number of supervised tokens and number of correct predictions per sequence: three arrays (rows,).

    Without smoothing, `-loss` is the log probability of a sequence.
    """

    loss: jax.Array
    tokens: jax.Array
    correct: jax.Array

    def total(self) -> Loss:
        """The loss over all sequences, with the token accuracy as a metric."""
        weight = jnp.sum(self.tokens)
        return Loss(jnp.sum(self.loss), weight, {"accuracy": (jnp.sum(self.correct), weight)}, (self.loss, self.tokens))


def row_sums(
    states: jax.Array,
    labels: jax.Array,
    head: Head | None = None,
    *,
    chunks: int = 1,
    shift: bool = True,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> RowSums:
    """Sums over the supervised tokens of each sequence. `states` are logits, or hidden states if there is a `head`.

    With `shift`, a position predicts the label of the next one, as in causal models. Labels of -100 are ignored.
    `z_loss` is the weight of the squared log-sum-exp of the logits.

    >>> logits = jnp.array([[[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]])
    >>> [round(float(value[0]), 4) for value in row_sums(logits, jnp.array([[-100, 0, 1]]))]
    [4.0363, 2.0, 1.0]
    """
    labels, sums = _prepared(states, labels, head, chunks, shift, z_loss, label_smoothing)
    if chunks == 1:
        return sums(states, labels)
    return _sum_chunks(jax.checkpoint(sums), states, labels, chunks)


def token_loss(
    states: jax.Array,
    labels: jax.Array,
    head: Head | None = None,
    *,
    chunks: int = 1,
    shift: bool = True,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Loss:
    """The loss over all sequences, with the token accuracy as a metric. Arguments as for `row_sums`.

    Equal to ``row_sums(...).total()``. With `chunks` the gradient of a chunk is computed together with its loss, so
    that its logits need not be recomputed: a matrix product less of four.

    >>> logits = jnp.array([[[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]])
    >>> loss = token_loss(logits, jnp.array([[-100, 0, 1]]), chunks=3)
    >>> round(float(loss.sum), 4), float(loss.weight)
    (4.0363, 2.0)
    """
    labels, sums = _prepared(states, labels, head, chunks, shift, z_loss, label_smoothing)
    if chunks == 1:
        return sums(states, labels).total()
    size = -(-states.shape[1] // chunks)
    # The weights of the head become arguments, to return their gradients.
    function, weights = jax.closure_convert(sums, states[:, :size], labels[:, :size])
    total, rows = _loss_of_chunks(function, chunks, states, labels, weights)
    found = jax.lax.stop_gradient(rows).total()
    return Loss(total, found.weight, found.metrics, found.per_sample)


def _prepared(
    states: jax.Array,
    labels: jax.Array,
    head: Head | None,
    chunks: int,
    shift: bool,
    z_loss: float,
    label_smoothing: float,
) -> tuple[jax.Array, Callable[[jax.Array, jax.Array], RowSums]]:
    """The labels by the position that predicts them, and the function that sums the losses of some positions."""
    if states.ndim != 3 or labels.shape != states.shape[:2]:
        received = f"{tuple(states.shape)} and {tuple(labels.shape)}"
        raise BadArgument(expected("states or logits (rows, T, ...) and labels (rows, T)", received))
    check_count("chunks", chunks)
    if shift:
        # Shift left and ignore the last position: the length, and thereby its divisibility, stays the same.
        labels = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)

    def sums(states: jax.Array, labels: jax.Array) -> RowSums:
        return _sums(states if head is None else head(states), labels, z_loss, label_smoothing)

    return labels, sums


def _sum_chunks(sums: Callable[..., RowSums], states: jax.Array, labels: jax.Array, chunks: int) -> RowSums:
    """The sums of all chunks, one after the other."""

    def body(carry: RowSums, chunk: tuple[jax.Array, jax.Array]) -> tuple[RowSums, None]:
        return jax.tree.map(jnp.add, carry, sums(*chunk)), None

    chunked = strided_chunks(states, chunks), strided_chunks(labels, chunks, IGNORE_INDEX)
    return jax.lax.scan(body, _no_sums(labels), chunked)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_of_chunks(
    function: Callable[..., RowSums], chunks: int, states: jax.Array, labels: jax.Array, weights: list[jax.Array]
) -> tuple[jax.Array, RowSums]:
    """The total loss and the sums of each row. Only the former has a gradient."""
    rows = _sum_chunks(lambda *chunk: function(*chunk, *weights), states, labels, chunks)
    return jnp.sum(rows.loss), rows


def _loss_and_gradients(
    function: Callable[..., RowSums], chunks: int, states: jax.Array, labels: jax.Array, weights: list[jax.Array]
) -> tuple[tuple[jax.Array, RowSums], Any]:
    def loss(states: jax.Array, weights: list[jax.Array], labels: jax.Array) -> tuple[jax.Array, RowSums]:
        rows = function(states, labels, *weights)
        return jnp.sum(rows.loss), rows

    def body(carry: Any, chunk: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (_, rows), (of_states, of_weights) = jax.value_and_grad(loss, (0, 1), has_aux=True)(chunk[0], weights, chunk[1])
        return jax.tree.map(jnp.add, carry, (rows, _as_float32(of_weights))), of_states

    chunked = strided_chunks(states, chunks), strided_chunks(labels, chunks, IGNORE_INDEX)
    zeros = [jnp.zeros(weight.shape, jnp.float32) for weight in weights]
    (rows, of_weights), of_states = jax.lax.scan(body, (_no_sums(labels), zeros), chunked)
    gradients = _joined_chunks(of_states, states.shape[1]), _cast_like(of_weights, weights)
    return (jnp.sum(rows.loss), rows), gradients


def _scaled_gradients(function: Any, chunks: int, gradients: Any, cotangent: tuple[jax.Array, RowSums]) -> Any:
    of_states, of_weights = jax.tree.map(lambda gradient: (gradient * cotangent[0]).astype(gradient.dtype), gradients)
    return of_states, None, of_weights


_loss_of_chunks.defvjp(_loss_and_gradients, _scaled_gradients)


def _no_sums(labels: jax.Array) -> RowSums:
    zeros = jnp.zeros(labels.shape[0], jnp.float32)
    return RowSums(zeros, zeros, zeros)


def _as_float32(arrays: list[jax.Array]) -> list[jax.Array]:
    return [array.astype(jnp.float32) for array in arrays]


def _cast_like(arrays: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    return [array.astype(other.dtype) for array, other in zip(arrays, others, strict=True)]


def strided_chunks(x: jax.Array, count: int, padding: int = 0) -> jax.Array:
    """(rows, T, ...) as (count, rows, T / count, ...), each chunk with every n-th position.

    So each device of a sequence-sharded mesh has a part of every chunk.
    """
    missing = -x.shape[1] % count
    x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=padding)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, count, *x.shape[2:]), 2, 0)


def _joined_chunks(x: jax.Array, length: int) -> jax.Array:
    """The inverse of `strided_chunks`."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _sums(logits: jax.Array, labels: jax.Array, z_loss: float, smoothing: float) -> RowSums:
    scores = logits.astype(jnp.float32)
    valid = labels != IGNORE_INDEX
    # Not a gather, whose gradient is a scatter: this is one pass, also with the vocabulary sharded over devices.
    is_label = labels[..., None] == jnp.arange(scores.shape[-1], dtype=labels.dtype)
    largest, prediction = _largest(jax.lax.stop_gradient(logits))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0).astype(jnp.float32)
    norms = largest + jnp.log(jnp.sum(jnp.exp(scores - largest[..., None]), axis=-1))
    losses = norms - jnp.sum(jnp.where(is_label, scores, 0.0), axis=-1)
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (norms - jnp.mean(scores, axis=-1))
    if z_loss:
        losses = losses + z_loss * jnp.square(norms)
    right = valid & (prediction == labels)
    return RowSums(
        jnp.sum(jnp.where(valid, losses, 0.0), axis=-1),
        jnp.sum(valid, axis=-1, dtype=jnp.float32),
        jnp.sum(right, axis=-1, dtype=jnp.float32),
    )


def _largest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each position and its index, the first of equal ones: `max` and `argmax` in one pass."""

    def larger(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        is_left = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] < right[1]))
        return jax.tree.map(lambda a, b: jnp.where(is_left, a, b), left, right)

    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    start = jnp.array(-jnp.inf, logits.dtype), jnp.array(jnp.iinfo(jnp.int32).max)
    return jax.lax.reduce((logits, index), start, larger, (logits.ndim - 1,))
