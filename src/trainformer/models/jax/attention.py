"""Attention over (batch, sequence, heads, width): who sees whom, rotary positions, and the kernel that runs.

Owns what is shared by all models. Projections are the block's; how a configuration of HF spells its rotary scaling is
read by the name maps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.layers import Key, dropout
from trainformer.models.jax.layout import axis_size

IMPLEMENTATIONS = ("xla", "cudnn")


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and how the wave lengths were stretched for longer texts ("linear" or "llama3")."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "llama3"):
            do = "The JAX models compute 'default', 'linear' and 'llama3'; others would give wrong positions silently."
            raise BadArgument(expected("a known kind of rotary scaling (rope_type)", self.kind, do))

    def frequencies(self, width: int) -> jax.Array:
        """One per pair of features, in float32."""
        base = 1.0 / (self.theta ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width))
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            # Short waves stay, long ones are stretched, between the two limits they are blended.
            turns = self.original_positions * base / (2 * math.pi)
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = jnp.clip(blend, 0.0, 1.0)
            return base / self.factor * (1 - blend) + base * blend
        return base

    def tables(self, positions: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of shape (batch, sequence, 1, width / 2)."""
        angles = positions[..., None, None].astype(jnp.float32) * self.frequencies(width)
        return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The first half of the features is turned against the second, as in HF's checkpoints."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def segments_of(attention_mask: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array | None:
    """One number per token: tokens see only those of their own number. Padding is a segment of its own, 0.

    So no row of the attention is ever empty, and padding needs no rule of its own.
    """
    if attention_mask is None:
        return None if segment_ids is None else segment_ids.astype(jnp.int32)
    real = attention_mask.astype(jnp.bool_).astype(jnp.int32)
    return real if segment_ids is None else segment_ids.astype(jnp.int32) * real


def positions_of(
    shape: tuple[int, ...], attention_mask: jax.Array | None = None, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Where each token stands: from the start of its segment, else among the tokens that are not padding."""
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segment_ids is not None:
        begins = jnp.concatenate([jnp.ones_like(index[:, :1]), jnp.diff(segment_ids.astype(jnp.int32), axis=1)], axis=1)
        return index - jax.lax.cummax(jnp.where(begins != 0, index, 0), axis=1)
    if attention_mask is not None:
        real = attention_mask.astype(jnp.bool_).astype(jnp.int32)
        return jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    return index


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    implementation: str = "xla",
    rate: float = 0.0,
    key: Key = None,
) -> jax.Array:
    """Softmax attention in float32; `k` and `v` may have fewer heads. `window` counts the token itself, as HF does.

    cuDNN takes over only what it can: 16-bit types, no dropout, whole sequences on a device, even lengths with a mask.
    """
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    if rate > 0.0 and key is not None:
        return _attend_with_dropout(q, k, v, _full_mask(mask, q.shape[1], causal, window), rate, key)
    fast = implementation == "cudnn" and q.dtype in (jnp.bfloat16, jnp.float16) and axis_size("sp") == 1
    if mask is not None and q.shape[1] % 2:
        fast = False
    local = None if window is None else (window - 1, 0 if causal else window - 1)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=causal, local_window_size=local, implementation="cudnn" if fast else "xla"
    )


def _full_mask(mask: jax.Array | None, length: int, causal: bool, window: int | None) -> jax.Array:
    behind = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = behind >= 0 if causal else jnp.ones_like(behind, dtype=jnp.bool_)
    if window is not None:
        seen = seen & (jnp.abs(behind) < window)
    return seen[None, None] if mask is None else mask & seen


def _attend_with_dropout(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, rate: float, key: jax.Array
) -> jax.Array:
    """What jax's own attention does not offer: dropout on the weights."""
    shared = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, shared, axis=2), jnp.repeat(v, shared, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(jnp.float32).min), axis=-1).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", dropout(weights, rate, key), v)
