"""Preference losses on JAX: DPO and its variants, ORPO, SimPO, KTO and reward models. Never imports torch.

They match `losses.preference`: one loss per pair or answer, in float32, from one log probability (or reward) per
answer. Arguments are checked where the user passes them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, relu, sigmoid

from trainformer.core.errors import check_choice

VARIANTS = (
    *("sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
    "discopop",
)
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
OF_MARGIN = ("sigmoid", "ipo", "hinge", "robust", "exo_pair", "discopop")  # variants of a single difference
KTO_VARIANTS = ("kto", "apo_zero_unpaired")

_LARGEST = 80.0  # exp() overflows beyond 88 in float32
# At higher mean log probabilities the odds p / (1 - p) have no finite gradient.
_CERTAIN = -1e-6

Both = tuple[jax.Array, jax.Array]
"""Log probabilities (pairs,) of the chosen and of the rejected answers."""


class PreferenceRewards(NamedTuple):
    """Implicit rewards of the chosen and rejected answers, per pair, without gradient."""

    chosen: jax.Array
    rejected: jax.Array

    @property
    def margin(self) -> jax.Array:
        """Reward of the chosen minus reward of the rejected answer."""
        return self.chosen - self.rejected

    @property
    def correct(self) -> jax.Array:
        """Whether the chosen answer has the higher reward."""
        return self.chosen > self.rejected


def dpo_loss(
    policy: Both,
    reference: Both,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    variant: str = "sigmoid",
    discopop_tau: float = 0.05,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
) -> jax.Array:
    """Direct preference optimisation, per pair, from log probabilities (chosen, rejected), each (pairs,).

    `variant` is `"sigmoid"` (`label_smoothing` is the assumed share of mislabelled pairs), `"hinge"`, or `"ipo"`, which
    expects mean log probabilities per token instead of sums. `"robust"` and `"exo_pair"` use `label_smoothing` too,
    `"discopop"` has a temperature `discopop_tau`. `"nca_pair"`, `"bco_pair"`, `"sppo_hard"`, `"apo_zero"` and
    `"apo_down"` move each answer by itself relative to the reference. `f_divergence` is the divergence from it; with
    `"alpha_divergence"` of order `f_alpha`.

    >>> lost = jnp.array([-12.0]), jnp.array([-10.0])
    >>> same = jnp.array([-10.0]), jnp.array([-10.0])
    >>> round(float(dpo_loss(lost, same)[0]), 4)
    0.7981
    """
    check_choice("variant", variant, VARIANTS)
    chosen, rejected = (_float32(own) - _float32(other) for own, other in zip(policy, reference, strict=True))
    if variant not in OF_MARGIN:
        return _loss_of_both(variant, beta, chosen, rejected)
    margin = _scores(chosen, f_divergence, f_alpha) - _scores(rejected, f_divergence, f_alpha)
    if variant == "ipo":
        return jnp.square(margin - 1 / (2 * beta))
    logits = beta * margin
    if variant == "hinge":
        return relu(1 - logits)
    if variant == "robust":
        flipped = label_smoothing * (log_sigmoid(-logits) + log_sigmoid(logits))
        return (flipped - log_sigmoid(logits)) / (1 - 2 * label_smoothing)
    if variant == "exo_pair":
        return _reverse_cross_entropy(logits, label_smoothing)
    if variant == "discopop":
        share = sigmoid(logits / discopop_tau)
        return share * jnp.exp(jnp.minimum(-logits, _LARGEST)) - (1 - share) * log_sigmoid(logits)
    return _smoothed(logits, label_smoothing)


def orpo_loss(policy: Both, beta: float = 0.1) -> jax.Array:
    """Odds ratio preference optimisation (no reference), per pair, from mean log probabilities per token.

    >>> round(float(orpo_loss((jnp.array([-1.0]), jnp.array([-1.0])))[0]), 4)
    1.0693
    """
    chosen, rejected = _float32(policy[0]), _float32(policy[1])
    log_odds = (chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected))
    return -chosen - beta * log_sigmoid(log_odds)


def simpo_loss(policy: Both, beta: float = 2.0, gamma: float = 1.0, *, label_smoothing: float = 0.0) -> jax.Array:
    """Simple preference optimisation, per pair: `beta` times the gap of mean log probabilities, with margin `gamma`.

    >>> round(float(simpo_loss((jnp.array([-1.0]), jnp.array([-1.5])))[0]), 4)
    0.6931
    """
    return _smoothed(beta * (_float32(policy[0]) - _float32(policy[1])) - gamma, label_smoothing)


def kto_loss(
    policy: jax.Array,
    reference: jax.Array,
    desirable: jax.Array,
    kl: jax.Array | float = 0.0,
    beta: float = 0.1,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    variant: str = "kto",
) -> jax.Array:
    """Kahneman-Tversky optimisation, per answer that is desirable or not, from log probabilities (answers,).

    `kl` is the estimated divergence of the policy from the reference, without a gradient. `"apo_zero_unpaired"` does
    not use it.

    >>> policy, reference = jnp.array([-9.0, -9.0]), jnp.array([-10.0, -10.0])
    >>> kto_loss(policy, reference, jnp.array([True, False])).round(4).tolist()
    [0.4749999940395355, 0.5249999761581421]
    """
    check_choice("variant", variant, KTO_VARIANTS)
    value = _float32(policy) - _float32(reference)
    value = beta * (value - kl if variant == "kto" else value)
    losses = sigmoid(jnp.where(desirable, -value, value))  # 1 - sigmoid(x) = sigmoid(-x)
    return jnp.where(desirable, desirable_weight, undesirable_weight) * losses


def reward_model_loss(
    chosen: jax.Array, rejected: jax.Array, margin: jax.Array | float = 0.0, *, center: float = 0.0
) -> jax.Array:
    """The loss of a reward model (Bradley-Terry), per pair: the chosen answer should score higher, by `margin`.

    `center` weighs the squared sum of both rewards, which keeps them around zero.

    >>> round(float(reward_model_loss(jnp.array([1.0]), jnp.array([0.0]))[0]), 4)
    0.3133
    """
    chosen, rejected = _float32(chosen), _float32(rejected)
    losses = -log_sigmoid(chosen - rejected - margin)
    return losses + center * jnp.square(chosen + rejected) if center else losses


def preference_rewards(policy: Both, reference: Both | None = None, beta: float = 0.1) -> PreferenceRewards:
    """`beta` times the log-probability ratio of policy and reference, or without a reference of the policy alone.

    >>> zeros = jnp.zeros(2)
    >>> preference_rewards((jnp.array([1.0, -1.0]), zeros), (zeros, zeros)).correct.tolist()
    [True, False]
    """
    ratios = policy if reference is None else [own - other for own, other in zip(policy, reference, strict=True)]
    return PreferenceRewards(*(jax.lax.stop_gradient(beta * _float32(value)) for value in ratios))


def _float32(value: jax.Array) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """Binary cross-entropy of "the first is better" with label smoothing."""
    return label_smoothing * logits - log_sigmoid(logits)  # -log_sigmoid(-x) = x - log_sigmoid(x)


def _loss_of_both(variant: str, beta: float, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """The variants that move each answer by itself, given log ratios to the reference."""
    up, down = beta * chosen, beta * rejected
    if variant == "nca_pair":
        return -log_sigmoid(up) - 0.5 * log_sigmoid(-up) - 0.5 * log_sigmoid(-down)
    if variant == "bco_pair":
        return -log_sigmoid(up) - log_sigmoid(-down)
    if variant == "sppo_hard":
        return jnp.square(chosen - 0.5 / beta) + jnp.square(rejected + 0.5 / beta)
    if variant == "apo_zero":
        return sigmoid(-up) + sigmoid(down)
    return sigmoid(up) + sigmoid(down - up)  # apo_down


def _reverse_cross_entropy(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """KL divergence of the model's preference from the smoothed label (EXO)."""
    wins = sigmoid(logits) * (log_sigmoid(logits) - math.log1p(-label_smoothing))
    return wins + sigmoid(-logits) * (log_sigmoid(-logits) - math.log(label_smoothing))


def _scores(log_ratio: jax.Array, f_divergence: str, alpha: float) -> jax.Array:
    """f'(t) for t = exp(log_ratio), where f defines the divergence; constants cancel in margins."""
    if f_divergence == "forward_kl":
        return -jnp.exp(jnp.minimum(-log_ratio, _LARGEST))
    if f_divergence == "js_divergence":
        return log_sigmoid(log_ratio)
    if f_divergence == "alpha_divergence" and abs(alpha - 1) > 1e-6:
        return jnp.expm1(jnp.minimum((alpha - 1) * log_ratio, _LARGEST)) / (alpha - 1)
    return log_ratio


def _log_complement(log_probs: jax.Array) -> jax.Array:
    """log(1 - p) from log p. Each of the two formulas loses all precision where the other is exact."""
    log_probs = jnp.minimum(log_probs, _CERTAIN)
    likely = log_probs > -math.log(2)
    # Each formula gets safe inputs where it is not used: its gradient would be infinite there, and 0 * inf is NaN.
    near = jnp.log(-jnp.expm1(jnp.where(likely, log_probs, -1.0)))
    far = jnp.log1p(-jnp.exp(jnp.where(likely, -1.0, log_probs)))
    return jnp.where(likely, near, far)
