"""Attention over (batch, sequence, heads, head_dim): segments, positions and masks. Kernels: `attention_kernels`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trainformer.models.jax.attention_kernels import choose_kernel
from trainformer.models.jax.layers import Key, constrain, dropout
from trainformer.models.jax.ring_attention import ring_attention


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
    start: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
    rate: float = 0.0,
    key: Key = None,
) -> jax.Array:
    """Softmax attention in float32; `k` and `v` may have fewer heads. `window` includes the token itself, as in HF.

    `scale` of the logits is by default ``head_dim ** -0.5``; `softcap` bounds them by a tanh. With `start` the queries
    are those of the tokens from there on, and keys, values and segments those of a cache. `implementation` is one of
    `attention_kernels.KERNELS`; where it does not apply, another one is used.
    """
    drops = rate > 0.0 and key is not None
    given: dict[str, Any] = {"causal": causal, "window": window}
    kernel = "xla"
    if start is None:
        features = {"masked": segments is not None, "drops": drops, "caps": softcap is not None}
        kernel = choose_kernel(implementation, q, k, **features, **given)
    q = constrain(q, "batch", "sequence", "heads", None)
    if kernel in ("ring", "splash") and scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    if kernel == "ring":
        return ring_attention(q, k, v, segments, **given)
    # With sequence parallelism a device keeps its queries and attends to the keys and values of all.
    k, v = constrain(k, "batch", None, "heads", None), constrain(v, "batch", None, "heads", None)
    if kernel == "splash":
        from trainformer.models.jax.splash_attention import splash_attention

        return splash_attention(q, k, v, segments, **given, interpret=jax.default_backend() != "tpu")
    places = jnp.arange(q.shape[1])
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    if start is not None:
        mask = _visible(places + start, jnp.arange(k.shape[1]), **given)
        if segments is not None:
            own = jax.lax.dynamic_slice_in_dim(segments, start, q.shape[1], axis=1)
            mask = mask & (own[:, None, :, None] == segments[:, None, None, :])
        given = {"causal": False, "window": None}  # in the mask
    if softcap is not None or drops:
        # Softcap and dropout on the weights, which `jax.nn.dot_product_attention` lacks.
        visible = mask
        if start is None or visible is None:
            visible = _visible(places, places, causal, window)
            visible = visible if mask is None else mask & visible
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        weights = jax.nn.softmax(jnp.where(visible, logits, jnp.finfo(jnp.float32).min), axis=-1).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", dropout(weights, rate, key), v)
    local = None if window is None or start is not None else (window - 1, 0 if causal else window - 1)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=given["causal"],
        local_window_size=local,
        implementation="cudnn" if kernel == "cudnn" else "xla",
    )


def _visible(queries: jax.Array, keys: jax.Array, causal: bool, window: int | None) -> jax.Array:
    """Which of the keys at these places a query attends to: (1, 1, queries, keys)."""
    distance = queries[:, None] - keys[None, :]
    visible = distance >= 0 if causal else jnp.ones_like(distance, dtype=jnp.bool_)
    if window is not None:
        visible = visible & (jnp.abs(distance) < window)
    return visible[None, None]
