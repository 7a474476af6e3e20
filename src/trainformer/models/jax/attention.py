"""Attention over (batch, sequence, heads, head_dim): segments and positions, masks, and the choice of kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainformer.models.jax.layers import Key, axis_size, dropout

IMPLEMENTATIONS = ("xla", "cudnn")


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
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str = "xla",
    rate: float = 0.0,
    key: Key = None,
) -> jax.Array:
    """Softmax attention in float32; `k` and `v` may have fewer heads. `window` includes the token itself, as in HF.

    `scale` of the logits is by default ``head_dim ** -0.5``; `softcap` bounds them by a tanh. cuDNN is used only where
    it is supported: 16-bit dtypes, no dropout, no softcap, no sequence sharding, even lengths with a mask.
    """
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    if softcap is not None or (rate > 0.0 and key is not None):
        # Softcap and dropout on the weights, which `jax.nn.dot_product_attention` lacks.
        distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])[None, :]
        visible = distance >= 0 if causal else jnp.ones_like(distance, dtype=jnp.bool_)
        if window is not None:
            visible = visible & (jnp.abs(distance) < window)
        visible = visible[None, None] if mask is None else mask & visible
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        weights = jax.nn.softmax(jnp.where(visible, logits, jnp.finfo(jnp.float32).min), axis=-1).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", dropout(weights, rate, key), v)
    fast = implementation == "cudnn" and q.dtype in (jnp.bfloat16, jnp.float16) and axis_size("sp") == 1
    if mask is not None and q.shape[1] % 2:
        fast = False
    local = None if window is None else (window - 1, 0 if causal else window - 1)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=causal,
        local_window_size=local,
        implementation="cudnn" if fast else "xla",
    )
