"""Attention over (batch, sequence, heads, head_dim): masks and rotary position embeddings.

The kernel is chosen in `attention_kernels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.attention_kernels import choose_kernel
from trainformer.models.jax.layers import Key, constrain, dropout
from trainformer.models.jax.ring_attention import ring_attention


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: the base, and the scaling for longer contexts ("linear" or "llama3")."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "llama3"):
            do = "The JAX models support 'default', 'linear' and 'llama3'."
            raise BadArgument(expected("a supported rotary scaling (rope_type)", self.kind, do))

    def frequencies(self, width: int) -> jax.Array:
        """One frequency per pair of features, in float32."""
        base = 1.0 / (self.theta ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width))
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            # Keep high frequencies, scale low ones, and interpolate between the two limits.
            turns = self.original_positions * base / (2 * math.pi)
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = jnp.clip(blend, 0.0, 1.0)
            return base / self.factor * (1 - blend) + base * blend
        return base

    def tables(self, positions: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines (batch, sequence, 1, width / 2)."""
        angles = positions[..., None, None].astype(jnp.float32) * self.frequencies(width)
        return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply rotary embeddings to (first half, second half) pairs, as in HF checkpoints."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def segments_of(attention_mask: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array | None:
    """Segment ids: tokens attend within their segment only. Padding is segment 0.

    So no attention row is empty, and padding needs no special case.
    """
    if attention_mask is None:
        return None if segment_ids is None else segment_ids.astype(jnp.int32)
    real = attention_mask.astype(jnp.bool_).astype(jnp.int32)
    return real if segment_ids is None else segment_ids.astype(jnp.int32) * real


def positions_of(
    shape: tuple[int, ...], attention_mask: jax.Array | None = None, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Position ids: counted within each segment, or else over the tokens that are not padding."""
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segment_ids is not None:
        starts = jnp.concatenate([jnp.ones_like(index[:, :1]), jnp.diff(segment_ids.astype(jnp.int32), axis=1)], axis=1)
        return index - jax.lax.cummax(jnp.where(starts != 0, index, 0), axis=1)
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
    implementation: str = "auto",
    rate: float = 0.0,
    key: Key = None,
) -> jax.Array:
    """Softmax attention in float32; `k` and `v` may have fewer heads. `window` includes the token itself, as in HF.

    `implementation` is one of `attention_kernels.KERNELS`; where it does not apply, another one is used.
    """
    drops = rate > 0.0 and key is not None
    given: dict[str, Any] = {"causal": causal, "window": window}
    kernel = choose_kernel(implementation, q, k, masked=segments is not None, drops=drops, **given)
    q = constrain(q, "batch", "sequence", "heads", None)
    if kernel == "ring":
        return ring_attention(q, k, v, segments, **given)
    # With sequence parallelism a device keeps its queries and attends to the keys and values of all.
    k, v = constrain(k, "batch", None, "heads", None), constrain(v, "batch", None, "heads", None)
    if kernel == "splash":
        from trainformer.models.jax.splash_attention import splash_attention

        return splash_attention(q, k, v, segments, **given, interpret=jax.default_backend() != "tpu")
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    if drops:
        # With dropout on the weights, which `jax.nn.dot_product_attention` lacks.
        distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])[None, :]
        visible = distance >= 0 if causal else jnp.ones_like(distance, dtype=jnp.bool_)
        if window is not None:
            visible = visible & (jnp.abs(distance) < window)
        visible = visible[None, None] if mask is None else mask & visible
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        logits = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(visible, logits, jnp.finfo(jnp.float32).min), axis=-1).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", dropout(weights, rate, key), v)
    local = None if window is None else (window - 1, 0 if causal else window - 1)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=causal,
        local_window_size=local,
        implementation="cudnn" if kernel == "cudnn" else "xla",
    )
