"""Token cross-entropy on JAX, with or without all logits in memory. Never imports torch.

Token losses are (sum, weight) over supervised tokens in float32. With `chunks` only the logits of a part of the
sequence exist at a time, and are recomputed for the gradient: those of 8k tokens and a vocabulary of 128k would take
4 GiB. Preference losses are in `jax_preference`, those of distillation in `jax_divergence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    if states.ndim != 3 or labels.shape != states.shape[:2]:
        received = f"{tuple(states.shape)} and {tuple(labels.shape)}"
        raise BadArgument(expected("states or logits (rows, T, ...) and labels (rows, T)", received))
    check_count("chunks", chunks)
    if shift:
        # Shift left and ignore the last position: the length, and thereby its divisibility, stays the same.
        labels = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)

    def sums(states: jax.Array, labels: jax.Array) -> RowSums:
        return _sums(states if head is None else head(states), labels, z_loss, label_smoothing)

    if chunks == 1:
        return sums(states, labels)
    chunked = strided_chunks(states, chunks), strided_chunks(labels, chunks, IGNORE_INDEX)

    def body(carry: RowSums, chunk: tuple[jax.Array, jax.Array]) -> tuple[RowSums, None]:
        return jax.tree.map(jnp.add, carry, jax.checkpoint(sums)(*chunk)), None

    zeros = jnp.zeros(labels.shape[0], jnp.float32)
    total, _ = jax.lax.scan(body, RowSums(zeros, zeros, zeros), chunked)
    return total


def strided_chunks(x: jax.Array, count: int, padding: int = 0) -> jax.Array:
    """(rows, T, ...) as (count, rows, T / count, ...), each chunk with every n-th position.

    So each device of a sequence-sharded mesh has a part of every chunk.
    """
    missing = -x.shape[1] % count
    x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=padding)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, count, *x.shape[2:]), 2, 0)


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
