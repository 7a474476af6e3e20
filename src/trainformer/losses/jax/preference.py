"""Losses on pairs of answers of which one is preferred, on JAX: DPO and its variants, ORPO, SimPO; and the rewards.

Owns the arithmetic on log probabilities, one number per answer and float32; the numbers are those of
`losses.preference`. A loss is given per pair: summing them is left to the caller, as is which model is the reference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument, did_you_mean, expected

VARIANTS = ("sigmoid", "ipo", "hinge")

# Beyond this mean log probability a token is certain, and the odds p / (1 - p) have no use (nor a finite gradient).
_CERTAIN = -1e-6


class PreferenceRewards(NamedTuple):
    """What the policy's probabilities say each answer is worth; per pair, without a gradient."""

    chosen: jax.Array
    rejected: jax.Array

    @property
    def margin(self) -> jax.Array:
        """By how much the chosen answer is worth more."""
        return self.chosen - self.rejected

    @property
    def correct(self) -> jax.Array:
        """Whether it is worth more. A tie is not."""
        return self.chosen > self.rejected


def dpo_loss(
    policy: tuple[jax.Array, jax.Array],
    reference: tuple[jax.Array, jax.Array],
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    variant: str = "sigmoid",
) -> jax.Array:
    """Direct preference optimisation, per pair. Both models give log probabilities (chosen, rejected), each (pairs,).

    `variant` is `"sigmoid"` (`label_smoothing` is the share of pairs believed to be labelled the wrong way round),
    `"hinge"`, or `"ipo"`, which wants means over the tokens of an answer instead of sums.

    >>> lost = jnp.array([-12.0]), jnp.array([-10.0])
    >>> same = jnp.array([-10.0]), jnp.array([-10.0])
    >>> round(float(dpo_loss(lost, same)[0]), 4)
    0.7981
    """
    gap = (_wide(policy[0]) - _wide(reference[0])) - (_wide(policy[1]) - _wide(reference[1]))
    if variant == "sigmoid":
        return _smoothed(beta * gap, label_smoothing)
    if variant == "hinge":
        return jax.nn.relu(1 - beta * gap)
    if variant == "ipo":
        return jnp.square(gap - 1 / (2 * beta))
    do = did_you_mean(str(variant), VARIANTS)
    raise BadArgument(expected(f"variant to be one of {', '.join(map(repr, VARIANTS))}", variant, do))


def orpo_loss(policy: tuple[jax.Array, jax.Array], beta: float = 0.1) -> jax.Array:
    """Odds ratio preference optimisation, per pair, of mean log probabilities per token. There is no reference.

    >>> round(float(orpo_loss((jnp.array([-1.0]), jnp.array([-1.0])))[0]), 4)
    1.0693
    """
    chosen, rejected = _wide(policy[0]), _wide(policy[1])
    log_odds = (chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected))
    return -chosen - beta * jax.nn.log_sigmoid(log_odds)


def simpo_loss(
    policy: tuple[jax.Array, jax.Array], beta: float = 2.0, gamma: float = 1.0, *, label_smoothing: float = 0.0
) -> jax.Array:
    """Simple preference optimisation, per pair: `beta` times the gap of mean log probabilities is to exceed `gamma`.

    >>> round(float(simpo_loss((jnp.array([-1.0]), jnp.array([-1.5])))[0]), 4)
    0.6931
    """
    return _smoothed(beta * (_wide(policy[0]) - _wide(policy[1])) - gamma, label_smoothing)


def preference_rewards(
    policy: tuple[jax.Array, jax.Array], reference: tuple[jax.Array, jax.Array] | None = None, beta: float = 0.1
) -> PreferenceRewards:
    """`beta` times what the policy's log probability of each answer gained on the reference's, or without one: itself.

    >>> zeros = jnp.zeros(2)
    >>> preference_rewards((jnp.array([1.0, -1.0]), zeros), (zeros, zeros)).correct.tolist()
    [True, False]
    """
    gained = policy if reference is None else [own - other for own, other in zip(policy, reference, strict=True)]
    return PreferenceRewards(*(jax.lax.stop_gradient(beta * _wide(value)) for value in gained))


def _wide(value: jax.Array) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """The cross-entropy of "the first is better", with a share of labels that say the opposite."""
    return label_smoothing * logits - jax.nn.log_sigmoid(logits)  # -log_sigmoid(-x) = x - log_sigmoid(x)


def _log_complement(log_probs: jax.Array) -> jax.Array:
    """log(1 - p) of log p. Each of the two ways to compute it loses all digits where the other is exact."""
    log_probs = jnp.minimum(log_probs, _CERTAIN)
    likely = log_probs > -math.log(2)
    # Each formula gets harmless numbers where it is not used: its gradient there would be infinite, and 0 * inf is nan.
    near = jnp.log(-jnp.expm1(jnp.where(likely, log_probs, -1.0)))
    far = jnp.log1p(-jnp.exp(jnp.where(likely, -1.0, log_probs)))
    return jnp.where(likely, near, far)
