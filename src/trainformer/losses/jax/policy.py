"""Policy-gradient losses of language models on JAX: those of `losses.policy`, in float32. Never imports torch.

A loss is (sum, weight), over tokens, sequences, or tokens that sequences could have. So padding, gradient accumulation
and the number of devices do not change it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.core.types import Loss
from trainformer.losses.jax.tokens import IGNORE_INDEX, Head, strided_chunks

POLICY_VARIANTS = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "rloo")
_BY_TOKEN = ("dapo", "bnpo", "cispo")  # divided by the number of tokens
_UNCLIPPED = ("cispo", "sapo")
_SAPO_TEMPERATURES = 1.0, 1.05  # of tokens with positive and with negative advantage, as in the paper
_CISPO_MAXIMUM = 5.0


class TokenScores(NamedTuple):
    """Log probability (with gradient) and entropy (without) of the token after each one; 0 if it is not supervised."""

    log_probs: jax.Array
    entropy: jax.Array


def token_scores(
    states: jax.Array, labels: jax.Array, head: Head | None = None, *, temperature: float = 1.0, chunks: int = 1
) -> TokenScores:
    """Log probabilities of sampled tokens (B, T), and entropies of the distributions they were sampled from.

    `states` are logits, or hidden states if there is a `head`; a position predicts the label of the next one, and
    labels of -100 are ignored. Logits are divided by `temperature`. With `chunks`, those of a part of the sequence
    exist at a time.

    >>> found = token_scores(jnp.zeros((1, 3, 4)), jnp.array([[-100, -100, 3]]))
    >>> [round(float(values[0, 1]), 4) for values in found]
    [-1.3863, 1.3863]
    """
    if states.ndim != 3 or labels.shape != states.shape[:2]:
        received = f"{tuple(states.shape)} and {tuple(labels.shape)}"
        raise BadArgument(expected("states or logits (B, T, ...) and labels (B, T)", received))
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)

    def scores(states: jax.Array, targets: jax.Array) -> TokenScores:
        logits = (states if head is None else head(states)).astype(jnp.float32) / temperature
        logs = jax.nn.log_softmax(logits, axis=-1)
        # Not a gather, whose gradient is a scatter.
        is_target = targets[..., None] == jnp.arange(logs.shape[-1], dtype=targets.dtype)
        fixed = jax.lax.stop_gradient(logs)
        entropy = -jnp.sum(jnp.exp(fixed) * jnp.where(jnp.isfinite(fixed), fixed, 0.0), axis=-1)
        entropy = jnp.where(targets == IGNORE_INDEX, 0.0, entropy)
        return TokenScores(jnp.sum(jnp.where(is_target, logs, 0.0), axis=-1), entropy)

    if chunks == 1:
        return scores(states, targets)
    chunked = strided_chunks(states, chunks), strided_chunks(targets, chunks, IGNORE_INDEX)
    _, found = jax.lax.scan(lambda carry, chunk: (carry, jax.checkpoint(scores)(*chunk)), None, chunked)
    rows, length = labels.shape
    return TokenScores(*(jnp.moveaxis(values, 0, 2).reshape(rows, -1)[:, :length] for values in found))


def policy_loss(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    variant: str = "dapo",
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    unbiased_kl: bool = True,
    reference_log_probs: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    row_mask: jax.Array | None = None,
    max_length: int | None = None,
) -> Loss:
    """The loss of sampled completions, with its metrics; the arguments are those of `losses.policy.policy_loss`.

    >>> new, old = jnp.array([[-0.5, -1.0]]), jnp.array([[-1.0, -1.0]])
    >>> found = policy_loss(new, old, jnp.array([1.0]), jnp.ones((1, 2)))
    >>> round(float(found.sum), 4), float(found.weight)
    (-2.2, 2.0)
    """
    check_choice("variant", variant, POLICY_VARIANTS)
    check_choice("level", level, ("token", "sequence"))
    mask = mask.astype(jnp.float32)
    rows = jnp.ones(len(mask)) if row_mask is None else row_mask.astype(jnp.float32)
    mask = mask * rows[:, None]
    tokens, lengths = jnp.sum(mask), jnp.sum(mask, axis=-1)
    some = jnp.maximum(lengths, 1)[:, None]
    advantages = advantages.astype(jnp.float32)[:, None]
    log_ratio = (log_probs - old_log_probs) * mask
    if variant == "rloo":
        log_ratio = jnp.sum(log_ratio, axis=-1, keepdims=True)
    elif level == "sequence":
        log_ratio = jnp.sum(log_ratio, axis=-1, keepdims=True) / some
    ratio = jnp.exp(log_ratio)
    losses, low, high = _surrogate(ratio, log_probs, advantages, variant, epsilon, epsilon_high, delta)
    if variant == "rloo":  # one value per sequence: spread evenly over its tokens, which are summed below
        losses = losses / some
    if token_mask is not None:
        losses = losses * token_mask
    metrics = {}
    if beta and variant != "rloo":  # in RLOO it is a part of the reward
        assert reference_log_probs is not None
        difference = (reference_log_probs - log_probs) * mask
        kl = (jnp.exp(difference) - difference - 1) * (ratio if unbiased_kl else 1)
        losses = losses + beta * kl
        metrics["kl"] = (jnp.sum(kl * mask), tokens)
    metrics |= _ratio_metrics(ratio, mask, None if variant in _UNCLIPPED else (low, high))
    by_row = jnp.sum(losses * mask, axis=-1)
    if variant in ("grpo", "sapo"):
        by_row = by_row / some[:, 0]
    weights = _weights(variant, lengths, rows, max_length)
    return Loss(jnp.sum(by_row), jnp.sum(weights), metrics, (by_row, weights))


def _surrogate(
    ratio: jax.Array,
    log_probs: jax.Array,
    advantages: jax.Array,
    variant: str,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses of the tokens (or sequences), and where the ratio was clipped from below and from above."""
    upper = epsilon if epsilon_high is None else epsilon_high
    low, high = (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + upper) & (advantages > 0)
    if variant == "cispo":
        largest = _CISPO_MAXIMUM if epsilon_high is None else epsilon_high
        return -jax.lax.stop_gradient(jnp.minimum(ratio, largest)) * advantages * log_probs, low, high
    if variant == "sapo":
        temperature = jnp.where(advantages > 0, *_SAPO_TEMPERATURES)
        return -jax.nn.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages, low, high
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + upper)
    bounded = ratio if delta is None else jnp.minimum(ratio, delta)
    return -jnp.minimum(bounded * advantages, clipped * advantages), low, high


def _weights(variant: str, lengths: jax.Array, rows: jax.Array, max_length: int | None) -> jax.Array:
    """What each sequence adds to the weight."""
    if variant in _BY_TOKEN:
        return lengths
    if variant != "dr_grpo":
        return rows
    if max_length is None:
        raise BadArgument(expected("max_length with variant='dr_grpo'", None, "Pass the most tokens of a completion."))
    return rows * max_length


def _ratio_metrics(
    ratio: jax.Array, mask: jax.Array, clipped: tuple[jax.Array, jax.Array] | None
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Mean, smallest and largest importance ratio, and the shares of clipped ones."""
    counted = mask
    if ratio.shape[1] != mask.shape[1]:
        counted = (jnp.sum(mask, axis=-1, keepdims=True) > 0).astype(jnp.float32)
    total = jnp.sum(counted)
    is_any = (total > 0).astype(jnp.float32)
    least = jnp.min(jnp.where(counted > 0, ratio, jnp.inf))
    most = jnp.max(jnp.where(counted > 0, ratio, -jnp.inf))
    found = {
        "importance_ratio/mean": (jnp.sum(ratio * counted), total),
        "importance_ratio/min": (jnp.where(total > 0, least, 0.0), is_any),
        "importance_ratio/max": (jnp.where(total > 0, most, 0.0), is_any),
    }
    for name, values in zip(("low", "high"), clipped or (), strict=False):
        found[f"clip_ratio/{name}"] = (jnp.sum(values * counted), total)
    return found
