"""The transformer block that the decoder and the Vision Transformer share, and the run through a stack of them.

Owns pre-norm blocks (attention, then a feed-forward part) with their weights stacked over layers, the scan over layers,
and what is computed again in the backward pass. Embeddings and heads are the models' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.attention import IMPLEMENTATIONS, attend, rotate
from trainformer.models.jax.layers import ACTIVATIONS, NORMS, Key, Linear, check_activation, dropout, key_source
from trainformer.models.jax.layout import constrain

Rules = tuple[tuple[str, tuple], ...]

# For the weight of one layer; whoever places stacked weights pads on the left.
BLOCK_RULES: Rules = (
    (r"(q|k|v|qkv|gate|up)_proj/kernel$", ("fsdp", "tp")),
    (r"(o|down)_proj/kernel$", ("tp", "fsdp")),
    (r"(q|k|v|qkv|gate|up)_proj/bias$", ("tp",)),
    (r"(q|k|v|qkv|gate|up)_proj/lora_a$", ("fsdp", None)),
    (r"(q|k|v|qkv|gate|up)_proj/lora_b$", (None, "tp")),
    (r"(o|down)_proj/lora_a$", ("tp", None)),
    (r"(o|down)_proj/lora_b$", (None, "fsdp")),
)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What a block needs to know, in the words of HF's configurations where they have one."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    norm: str = "rms"
    norm_eps: float = 1e-6
    gated: bool = True
    fused_qkv: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    causal: bool = True
    sliding_window: int | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_activation(self.hidden_act)
        if self.num_attention_heads % self.kv_heads:
            do = "Each head of keys serves the same number of query heads."
            raise BadArgument(expected(f"num_key_value_heads to divide {self.num_attention_heads}", self.kv_heads, do))
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            what = f"hidden_size to be a multiple of num_attention_heads ({self.num_attention_heads})"
            raise BadArgument(expected(what, self.hidden_size, "Change one of them, or give head_dim."))

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class Running:
    """How a model computes, as opposed to what: `remat` is a policy of `jax.checkpoint`, None to keep everything."""

    remat: Callable[..., Any] | None = None
    attention: str = "xla"
    unroll: int = 1

    def __post_init__(self) -> None:
        if self.remat is not None and not callable(self.remat):
            do = "Pass one of jax.checkpoint_policies, or None to keep all activations."
            raise BadArgument(expected("remat to be a checkpoint policy", self.remat, do))
        if self.attention not in IMPLEMENTATIONS:
            raise BadArgument(expected(f"attention to be one of {', '.join(IMPLEMENTATIONS)}", self.attention))
        if not isinstance(self.unroll, int) or self.unroll < 1:
            do = "It is the number of layers written out per turn of the scan; True for all of them."
            raise BadArgument(expected("unroll to be a positive integer or True", self.unroll, do))


def running(depth: int, remat: Any, attention: str, unroll: int | bool) -> Running:
    """`unroll=True` writes out all layers. It is kept as a number: to a cache of compiled functions True would be 1."""
    return Running(remat, attention, depth if unroll is True else unroll)


class Attention(nnx.Module):
    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.config = config
        width, heads, kv = config.head_width, config.num_attention_heads, config.kv_heads
        shared: dict[str, Any] = {"rngs": rngs, "stack": stack, "scale": config.initializer_range}
        size, bias = config.hidden_size, config.qkv_bias
        if config.fused_qkv:
            self.qkv_proj = Linear(size, (heads + 2 * kv) * width, bias=bias, **shared)
        else:
            self.q_proj = Linear(size, heads * width, bias=bias, **shared)
            self.k_proj = Linear(size, kv * width, bias=bias, **shared)
            self.v_proj = Linear(size, kv * width, bias=bias, **shared)
        self.o_proj = Linear(heads * width, size, bias=config.output_bias, **shared)
        if config.qk_norm:
            self.q_norm = NORMS[config.norm](width, config.norm_eps, stack)
            self.k_norm = NORMS[config.norm](width, config.norm_eps, stack)

    def __call__(self, x: jax.Array, segments: Any, rope: Any, running: Running, key: Key) -> jax.Array:
        config, keys = self.config, key_source(key)
        if config.fused_qkv:
            width, kv = config.head_width, config.kv_heads
            ends = [config.num_attention_heads * width, (config.num_attention_heads + kv) * width]
            q, k, v = jnp.split(self.qkv_proj(x, next(keys)), ends, axis=-1)
        else:
            q, k, v = (proj(x, next(keys)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.reshape(*part.shape[:-1], -1, config.head_width) for part in (q, k, v))
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        # Over "sp" each device keeps its queries and sees the keys and values of all.
        q = constrain(q, "batch", "sequence", "heads", None)
        k, v = constrain(k, "batch", None, "heads", None), constrain(v, "batch", None, "heads", None)
        mixed = attend(
            q,
            k,
            v,
            segments,
            causal=config.causal,
            window=config.sliding_window,
            implementation=running.attention,
            rate=config.attention_dropout,
            key=next(keys),
        )
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1), next(keys))


class FeedForward(nnx.Module):
    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        shared: dict[str, Any] = {"rngs": rngs, "stack": stack, "scale": config.initializer_range}
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.hidden_act
        self.gate_proj = nnx.data(Linear(size, inner, bias=bias, **shared) if config.gated else None)
        self.up_proj = Linear(size, inner, bias=bias, **shared)
        self.down_proj = Linear(inner, size, bias=bias, **shared)

    def __call__(self, x: jax.Array, key: Key) -> jax.Array:
        keys, act = key_source(key), ACTIVATIONS[self.activation]
        up = self.up_proj(x, next(keys))
        inner = act(up) if self.gate_proj is None else act(self.gate_proj(x, next(keys))) * up
        inner = constrain(inner, "batch", "sequence", "features")
        return self.down_proj(inner, next(keys))


class Block(nnx.Module):
    """One layer, or a stack of them; only a slice of a stack can be called."""

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.rate = config.hidden_dropout
        self.input_norm = NORMS[config.norm](config.hidden_size, config.norm_eps, stack)
        self.attention = Attention(config, rngs, stack)
        self.post_norm = NORMS[config.norm](config.hidden_size, config.norm_eps, stack)
        self.mlp = FeedForward(config, rngs, stack)

    def __call__(self, x: jax.Array, segments: Any, rope: Any, running: Running, key: Key) -> jax.Array:
        keys = key_source(key)
        mixed = self.attention(self.input_norm(x), segments, rope, running, next(keys))
        x = x + dropout(mixed, self.rate, next(keys))
        x = x + dropout(self.mlp(self.post_norm(x), next(keys)), self.rate, next(keys))
        return constrain(x, "batch", "sequence", None)


def run_layers(layers: Block, x: jax.Array, segments: Any, rope: Any, running: Running, key: Key) -> jax.Array:
    """`x` through all layers of the stack, each with a key of its own."""
    graph, weights = nnx.split(layers)
    depth = jax.tree.leaves(weights)[0].shape[0]

    def one(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        weights, number = layer
        own = None if key is None else jax.random.fold_in(key, number)
        return nnx.merge(graph, weights)(x, segments, rope, running, own), None

    if running.remat is not None:
        # Inside a scan nothing can be merged with the forward pass; the barrier against that would only be in the way.
        one = jax.checkpoint(one, policy=running.remat, prevent_cse=running.unroll > 1)
    x, _ = jax.lax.scan(one, x, (weights, jnp.arange(depth)), unroll=running.unroll)
    return x
