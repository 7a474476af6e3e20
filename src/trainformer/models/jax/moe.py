"""The feed-forward layer of a mixture of experts: a router, and experts of which each token uses a few.

No token is dropped: rows are sorted by expert and multiplied in groups of any size (`jax.lax.ragged_dot`). On a mesh
each device holds the experts of its part of ``ep`` and sees the tokens of all devices along that axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.block import FeedForward
from trainformer.models.jax.decoder import DecoderConfig
from trainformer.models.jax.layers import ACTIVATIONS, Key, Linear, activation_spec, axis_size, key_source


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Configuration of a decoder whose feed-forward layers are mixtures of experts; `intermediate_size` is an expert's.

    With `norm_topk_prob` the weights of the experts of a token add up to 1. All tokens also go through a shared expert
    of `shared_expert_intermediate_size`, if it is given.

    >>> MoEConfig(vocab_size=96, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    ...     num_experts=8, num_experts_per_tok=2).router_aux_loss_coef
    0.001
    """

    model_type: str = "mixtral"
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int | None = None
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            what = f"num_experts_per_tok from 1 to the {self.num_experts} experts"
            raise BadArgument(expected(what, self.num_experts_per_tok))

    def feed_forward(self, rngs: nnx.Rngs, stack: tuple[int, ...]) -> nnx.Module:
        return SparseFeedForward(self, rngs, stack)


class SparseFeedForward(nnx.Module):
    """Sends each token to a few experts. After a call, `routing` has the router's logits and the experts it chose."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.config = config
        size, scale = config.hidden_size, config.initializer_range
        # No `Linear`: LoRA leaves routers as they are.
        self.router = nnx.Param(scale * jax.random.normal(rngs.params(), (*stack, size, config.num_experts)))
        self.experts = Experts(config, rngs, stack)
        self.shared_expert: Any = nnx.data(None)
        self.shared_expert_gate: Any = nnx.data(None)
        if config.shared_expert_intermediate_size:
            shared = replace(config, intermediate_size=config.shared_expert_intermediate_size)
            self.shared_expert = nnx.data(FeedForward(shared, rngs, stack))
            self.shared_expert_gate = nnx.data(Linear(size, 1, rngs=rngs, bias=False, scale=scale, stack=stack))
        self.routing: tuple[jax.Array, jax.Array] | None = nnx.data(None)

    def __call__(self, x: jax.Array, key: Key) -> jax.Array:
        keys, logits = key_source(key), x @ self.router[...].astype(x.dtype)
        mixed, chosen = self.experts(x, logits)
        self.routing = nnx.data((logits, chosen))
        if self.shared_expert is None:
            return mixed
        weight = jax.nn.sigmoid(self.shared_expert_gate(x, next(keys)))
        return mixed + weight * self.shared_expert(x, next(keys))


class Experts(nnx.Module):
    """The weights of all experts, (experts, in, out), without biases."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.config = config
        inner, outer = config.hidden_size, config.intermediate_size

        def weights(*shape: int) -> nnx.Param:
            whole = (*stack, config.num_experts, *shape)
            return nnx.Param(config.initializer_range * jax.random.normal(rngs.params(), whole))

        self.gate_proj, self.up_proj, self.down_proj = (
            weights(inner, outer),
            weights(inner, outer),
            weights(outer, inner),
        )

    def __call__(self, x: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weighted sum of the experts that the router's logits choose for each token, and which ones these are."""
        config = self.config
        weights = [part[...].astype(x.dtype) for part in (self.gate_proj, self.up_proj, self.down_proj)]
        tokens = activation_spec(x.shape, "batch", "sequence", None)
        ep = "ep" if axis_size("ep") > 1 and config.num_experts % axis_size("ep") == 0 else None
        tp = "tp" if axis_size("tp") > 1 and config.intermediate_size % axis_size("tp") == 0 else None
        mix = partial(_mix, config=config, ep=ep, tp=tp, exchange=ep is not None and "ep" in (tokens[0] or ()))
        if not any((*tokens, ep, tp)):
            return mix(x, logits, *weights)
        inward, outward = PartitionSpec(ep, None, tp), PartitionSpec(ep, tp, None)
        mapped = jax.shard_map(mix, in_specs=(tokens, tokens, inward, inward, outward), out_specs=(tokens, tokens))
        return mapped(x, logits, *weights)


def _mix(
    x: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    config: MoEConfig,
    ep: str | None,
    tp: str | None,
    exchange: bool,
) -> tuple[jax.Array, jax.Array]:
    """The sums of one device's tokens, with its part of the experts (`ep`) and of their features (`tp`).

    With `exchange` the devices along `ep` have different tokens: each computes its experts for the tokens of all.
    """
    shape = x.shape
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), config.num_experts_per_tok)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    rows, weights, experts = (part.reshape(-1, part.shape[-1]) for part in (x, weights, chosen))
    if ep is not None:
        if exchange:
            rows, weights, experts = (jax.lax.all_gather(part, ep, tiled=True) for part in (rows, weights, experts))
        experts = experts - jax.lax.axis_index(ep) * len(gate)
    act = ACTIVATIONS[config.hidden_act]

    def apply(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        inner = act(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
        return jax.lax.ragged_dot(inner, down, sizes)

    mixed = _expert_sums(rows, experts, weights, len(gate), apply)
    if tp is not None:
        mixed = jax.lax.psum(mixed, tp)
    if ep is not None:
        mixed = jax.lax.psum_scatter(mixed, ep, tiled=True) if exchange else jax.lax.psum(mixed, ep)
    return mixed.reshape(shape), chosen


def _expert_sums(
    rows: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    count: int,
    apply: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The weighted sums (tokens, width) of what the `count` experts here return; those elsewhere contribute nothing.

    `apply` gets rows sorted by expert and the number of rows of each, and may return anything for the rows after them.
    """
    flat = experts.reshape(-1)
    is_here = (flat >= 0) & (flat < count)
    flat = jnp.where(is_here, flat, count)
    order = jnp.argsort(flat, stable=True)
    # Once per expert of a token, so that no two rows are equal: their gradient is a permutation, not a scatter-add.
    repeated = jnp.where(is_here[:, None], jnp.repeat(rows, experts.shape[1], axis=0), 0)
    applied = apply(_permute(repeated, order), jnp.bincount(flat, length=count + 1)[:count])
    found = jnp.where(is_here[:, None], _permute(applied, jnp.argsort(order)), 0)
    found = found.reshape(*experts.shape, -1).astype(jnp.float32) * weights[..., None]
    return jnp.sum(found, axis=1).astype(rows.dtype)


def _permute(rows: jax.Array, order: jax.Array) -> jax.Array:
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
