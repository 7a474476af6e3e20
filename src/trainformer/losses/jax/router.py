"""Router losses of mixtures of experts on JAX, from statistics that add up over micro-batches. Never imports torch.

The same as `losses.router` on torch: with the experts' shares of a whole optimizer step, which carry no gradient, the
load-balancing loss of the step is a sum over its micro-batches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class RouterStatistics(NamedTuple):
    """Sums over tokens: choices (layers, experts), probabilities (layers, experts), z (layers), and tokens.

    `probabilities` and `z` carry gradients. `z` is the squared logsumexp of the router's logits.
    """

    choices: jax.Array
    probabilities: jax.Array
    z: jax.Array
    tokens: jax.Array


def layer_sums(
    logits: jax.Array, chosen: jax.Array, mask: jax.Array, over: tuple[int, ...] = (0, 1)
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first three sums for one layer, `over` rows and tokens. `mask` (batch, sequence) is 1 for tokens that count.

    >>> logits, chosen = jnp.array([[[2.0, 0.0], [0.0, 2.0], [0.0, 9.0]]]), jnp.array([[[0], [1], [1]]])
    >>> layer_sums(logits, chosen, jnp.array([[1, 1, 0]]))[0].tolist()
    [1.0, 1.0]
    """
    scores, weight = logits.astype(jnp.float32), mask.astype(jnp.float32)[..., None]
    is_chosen = jnp.sum(chosen[..., None] == jnp.arange(logits.shape[-1]), axis=-2)
    z = jnp.square(jax.nn.logsumexp(scores, axis=-1)) * weight[..., 0]
    return jnp.sum(is_chosen * weight, over), jnp.sum(jax.nn.softmax(scores) * weight, over), jnp.sum(z, over)


def load_balancing_loss(part: RouterStatistics, whole: RouterStatistics) -> jax.Array:
    """The load-balancing loss, as transformers computes it: the share of the `part` in that of the `whole` step.

    >>> even = RouterStatistics(jnp.full((1, 2), 4.0), jnp.full((1, 2), 2.0), jnp.zeros(1), jnp.array(4.0))
    >>> float(load_balancing_loss(even, even))  # as many experts as a token chooses
    2.0
    """
    layers, experts = part.choices.shape
    rows = jnp.maximum(layers * whole.tokens, 1)
    shares = jax.lax.stop_gradient(jnp.sum(whole.choices, axis=0)) / rows
    return experts * jnp.sum(shares * jnp.sum(part.probabilities, axis=0)) / rows


def router_z_loss(part: RouterStatistics, whole: RouterStatistics) -> jax.Array:
    """The mean squared logsumexp of the router's logits over tokens and layers (ST-MoE); additive like the above."""
    return jnp.mean(part.z) / jnp.maximum(whole.tokens, 1)


def expert_load(statistics: RouterStatistics) -> dict[str, jax.Array]:
    """How evenly tokens are spread over the experts, averaged over layers.

    `load_max` is the load of the busiest expert relative to the mean: 1 is even. `load_entropy` is the entropy of the
    loads relative to the largest possible one: 1 is even, 0 means that one expert receives everything.

    >>> counts = jnp.array([[3.0, 1.0]])
    >>> {name: round(float(value), 3) for name, value in expert_load(RouterStatistics(counts, *[counts] * 3)).items()}
    {'load_entropy': 0.811, 'load_max': 1.5}
    """
    experts = statistics.choices.shape[1]
    shares = statistics.choices / jnp.maximum(jnp.sum(statistics.choices, axis=1, keepdims=True), 1)
    entropy = jnp.sum(jax.scipy.special.entr(shares), axis=1) / math.log(max(experts, 2))
    return {"load_entropy": jnp.mean(entropy), "load_max": jnp.mean(jnp.max(shares, axis=1) * experts)}
