"""Losses of language models on JAX: cross-entropy over supervised tokens, from logits or without making all of them.

Owns the sums over the tokens of each sequence, their number, and how many were predicted right; all in float32. With
`chunks` the logits of a part of the sequence exist at a time, and are made again for the gradient: those of 8k tokens
and 128k words would take 4 GiB. Which tokens are supervised is the business of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument, expected

IGNORE_INDEX = -100
Head = Callable[[jax.Array], jax.Array]
"""Makes logits (..., vocabulary) of hidden states."""


class TokenLoss(NamedTuple):
    """Sum of the losses of all supervised tokens, how many these are, and how many of them were predicted right."""

    sum: jax.Array
    weight: jax.Array
    correct: jax.Array


class RowSums(NamedTuple):
    """The same for each sequence: three arrays (rows,). Without smoothing, `-loss` is a sequence's log probability."""

    loss: jax.Array
    tokens: jax.Array
    correct: jax.Array

    def total(self) -> TokenLoss:
        """Over all sequences."""
        return TokenLoss(jnp.sum(self.loss), jnp.sum(self.tokens), jnp.sum(self.correct))


def token_cross_entropy(logits: jax.Array, labels: jax.Array, **options: Any) -> TokenLoss:
    """Cross-entropy of logits (rows, T, V) and labels (rows, T), summed. The options are those of `row_sums`.

    >>> logits = jnp.array([[[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]])
    >>> [round(float(value), 4) for value in token_cross_entropy(logits, jnp.array([[-100, 0, 1]]))]
    [4.0363, 2.0, 1.0]
    """
    return row_sums(logits, labels, **options).total()


def head_cross_entropy(states: jax.Array, labels: jax.Array, head: Head, **options: Any) -> TokenLoss:
    """`token_cross_entropy` of ``head(states)``, with the hidden states (rows, T, D) taken in `chunks`."""
    return row_sums(states, labels, head, **options).total()


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
    """Sums over the supervised tokens of each sequence. `states` are logits, or what `head` makes logits of.

    With `shift` the states at a position predict the label at the next one, as in causal models. Labels of -100 are not
    supervised. `z_loss` adds that much of the squared log of the softmax's denominator.
    """
    if states.ndim != 3 or labels.shape != states.shape[:2]:
        received = f"{tuple(states.shape)} and {tuple(labels.shape)}"
        raise BadArgument(expected("states or logits (rows, T, ...) and labels (rows, T)", received))
    if not isinstance(chunks, int) or chunks < 1:
        raise BadArgument(expected("chunks to be a positive whole number", chunks))
    if shift:
        # One place to the left, and nothing to predict at the end: the length stays, and so do its divisors.
        labels = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)

    def sums(states: jax.Array, labels: jax.Array) -> RowSums:
        return _sums(states if head is None else head(states), labels, z_loss, label_smoothing)

    if chunks == 1:
        return sums(states, labels)
    pieces = _every_nth(states, chunks), _every_nth(labels, chunks, IGNORE_INDEX)

    def body(carry: RowSums, piece: tuple[jax.Array, jax.Array]) -> tuple[RowSums, None]:
        return jax.tree.map(jnp.add, carry, jax.checkpoint(sums)(*piece)), None

    zeros = jnp.zeros(labels.shape[0], jnp.float32)
    found, _ = jax.lax.scan(body, RowSums(zeros, zeros, zeros), pieces)
    return found


def _every_nth(x: jax.Array, count: int, filler: int = 0) -> jax.Array:
    """(rows, T, ...) as (count, rows, T / count, ...): each piece has every n-th place.

    A sequence that is divided over devices thereby leaves each device a share of every piece.
    """
    missing = -x.shape[1] % count
    x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=filler)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, count, *x.shape[2:]), 2, 0)


def _sums(logits: jax.Array, labels: jax.Array, z_loss: float, smoothing: float) -> RowSums:
    scores = logits.astype(jnp.float32)
    valid = labels != IGNORE_INDEX
    # Not a gather, whose gradient would be a scatter: this is one pass, also where words are divided over devices.
    is_label = labels[..., None] == jnp.arange(scores.shape[-1], dtype=labels.dtype)
    norms = jax.nn.logsumexp(scores, axis=-1)
    losses = norms - jnp.sum(jnp.where(is_label, scores, 0.0), axis=-1)
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (norms - jnp.mean(scores, axis=-1))
    if z_loss:
        losses = losses + z_loss * jnp.square(norms)
    right = valid & (jnp.argmax(jax.lax.stop_gradient(logits), axis=-1) == labels)
    return RowSums(
        jnp.sum(jnp.where(valid, losses, 0.0), axis=-1),
        jnp.sum(valid, axis=-1, dtype=jnp.float32),
        jnp.sum(right, axis=-1, dtype=jnp.float32),
    )
