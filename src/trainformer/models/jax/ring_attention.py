"""Ring attention: exact attention over sequences that are sharded over the `sp` axis of the mesh.

A device keeps its queries, and blocks of keys and values travel around the ring of devices. Weights are computed chunk
by chunk with an online softmax in float32, so no device ever holds the keys of all or a square of logits. The backward
pass sends the blocks around once more, together with their gradients, and recomputes the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trainformer.models.jax.layers import activation_spec, axis_size

AXIS = "sp"
_CHUNK = 512  # queries and keys whose weights are in memory at once
_MIN_CHUNK = 64
_MASKED = -1e30  # finite: a difference of two of them is not NaN


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> jax.Array:
    """Softmax attention as in `attend`, for a sequence length that is a multiple of the `sp` axis."""
    if segments is None:
        segments = jnp.zeros(q.shape[:2], jnp.int32)
    spec = activation_spec(q.shape, "batch", "sequence", "heads", None)
    if spec[2] and k.shape[2] % axis_size("tp"):
        # Query heads are sharded further than there are key-value heads.
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    ring = Ring.make(q.shape[1], axis_size(AXIS), causal, window)
    local = jax.shard_map(
        ring.attend,
        in_specs=(spec, spec, spec, PartitionSpec(*spec[:2])),
        out_specs=spec,
        check_vma=False,
    )
    return local(q, k, v, segments)


@dataclass(frozen=True)
class Ring:
    """How the tokens of a sequence lie on the ring, and which blocks a device must see.

    Striped, device d of n holds the tokens d, d + n, d + 2n, ...: with causal attention all devices then have the same
    work, whereas of contiguous blocks the last device attends to all and the first to its own only. A short window
    needs contiguous blocks, of which it sees the last few (`steps`).
    """

    size: int
    steps: int
    length: int  # tokens per device
    chunk: int
    causal: bool
    window: int | None
    striped: bool

    @classmethod
    def make(cls, length: int, size: int, causal: bool, window: int | None) -> Ring:
        own = length // size
        steps = size
        if causal and window is not None:
            steps = min(size, 1 - (-(window - 1) // own))
        chunk = next(n for n in range(min(own, _CHUNK), 0, -1) if own % n == 0)
        chunk = own if chunk < _MIN_CHUNK else chunk
        striped = causal and steps == size and own % size == 0
        return cls(size, steps, own, chunk, causal, window, striped)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        """Attention of one device; inside `shard_map`."""
        if self.striped:
            q, k, v, segments = (self._stripe(x) for x in (q, k, v, segments))
        rows, heads, width = q.shape[0], k.shape[2], q.shape[3]
        grouped = self._split(q.reshape(rows, self.length, heads, -1, width))
        out = _attention(grouped, *(self._split(x) for x in (k, v, segments)), self)
        # (chunks, rows, heads, groups, queries, width)
        out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(q.shape)
        return self._unstripe(out) if self.striped else out

    def _split(self, x: jax.Array) -> jax.Array:
        """Chunks first, for a scan."""
        return jnp.moveaxis(x.reshape(x.shape[0], -1, self.chunk, *x.shape[2:]), 1, 0)

    def _stripe(self, x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0], -1, self.size, *x.shape[2:])
        return jax.lax.all_to_all(parts, AXIS, 2, 1, tiled=True).reshape(x.shape)

    def _unstripe(self, x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0], -1, 1, *x.shape[2:])
        return jax.lax.all_to_all(parts, AXIS, 1, 2, tiled=True).reshape(x.shape)

    def rotate(self, tree: Any, by: int = 1) -> Any:
        pairs = [(device, (device + by) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)

    def positions(self, device: jax.Array, chunk: jax.Array) -> jax.Array:
        inside = chunk * self.chunk + jnp.arange(self.chunk)
        return device + inside * self.size if self.striped else device * self.length + inside

    def attended(self, step: jax.Array, query: jax.Array, key: jax.Array) -> Chunks:
        """A chunk of this device's queries and a chunk of the keys that it holds after so many steps."""
        device = jax.lax.axis_index(AXIS)
        return Chunks(self, self.positions(device, query), self.positions((device - step) % self.size, key))


@dataclass(frozen=True)
class Chunks:
    """Positions of some queries and keys."""

    ring: Ring
    queries: jax.Array
    keys: jax.Array

    def run_if_visible(self, function: Callable[[Any], Any], carry: Any) -> Any:
        """``function(carry)``, or the carry itself if no query sees any of the keys."""
        ring, visible = self.ring, jnp.array(True)
        if ring.causal:
            visible &= self.queries[-1] >= self.keys[0]
        if ring.window is not None:
            visible &= self.queries[0] - self.keys[-1] < ring.window
            visible &= self.keys[0] - self.queries[-1] < ring.window
        return jax.lax.cond(visible, function, lambda carry: carry, carry)

    def logits(self, q: jax.Array, k: jax.Array, segments: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Logits (rows, heads, groups, queries, keys) in float32, and which of them count."""
        distance = self.queries[:, None] - self.keys[None, :]
        visible = segments[0][:, :, None] == segments[1][:, None, :]
        if self.ring.causal:
            visible &= distance >= 0
        if self.ring.window is not None:
            visible &= jnp.abs(distance) < self.ring.window
        visible = visible[:, None, None]
        logits = _product("bqhgd,bkhd->bhgqk", q, k) / math.sqrt(q.shape[-1])
        return jnp.where(visible, logits, _MASKED), visible


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, ring: Ring) -> jax.Array:
    return _forward(q, k, v, segments, ring)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, ring: Ring) -> tuple[jax.Array, Any]:
    """Chunks (count, rows, tokens, heads, ...) of the queries and of the first block; and what the gradient needs."""
    count, rows, tokens, heads, groups, width = q.shape
    numbers = jnp.arange(count)
    top = jnp.full((count, rows, heads, groups, tokens), _MASKED)
    state = jnp.zeros((*top.shape, width)), top, jnp.zeros_like(top)

    def per_step(carry: Any, step: jax.Array) -> tuple[Any, None]:
        state, block = carry
        arriving = ring.rotate(block)  # while this one is attended to

        def per_keys(state: Any, keys: Any) -> tuple[Any, None]:
            k, v, key_segments, key = keys

            def per_queries(_: None, queries: Any) -> tuple[None, Any]:
                q, query_segments, query, state = queries
                chunks = ring.attended(step, query, key)

                def update(state: Any) -> Any:
                    out, top, total = state
                    logits, visible = chunks.logits(q, k, (query_segments, key_segments))
                    higher = jnp.maximum(top, jnp.max(logits, axis=-1))
                    weights = jnp.where(visible, jnp.exp(logits - higher[..., None]), 0.0)
                    shrink = jnp.exp(top - higher)
                    added = _product("bhgqk,bkhd->bhgqd", weights.astype(v.dtype), v)
                    return out * shrink[..., None] + added, higher, total * shrink + jnp.sum(weights, axis=-1)

                return None, chunks.run_if_visible(update, state)

            return jax.lax.scan(per_queries, None, (q, segments, numbers, state))[1], None

        state, _ = jax.lax.scan(per_keys, state, (*block, numbers))
        return (state, arriving), None

    ((out, top, total), _), _ = jax.lax.scan(per_step, (state, (k, v, segments)), jnp.arange(ring.steps))
    # Every query sees at least itself.
    out = (out / total[..., None]).astype(q.dtype)
    return out, (q, k, v, segments, out, top + jnp.log(total))


def _backward(ring: Ring, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, out, log_total = saved
    numbers, scale = jnp.arange(q.shape[0]), 1.0 / math.sqrt(q.shape[-1])
    inner = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def per_step(carry: Any, step: jax.Array) -> tuple[Any, None]:
        dq, block, gradients = carry

        def per_keys(dq: Any, keys: Any) -> tuple[Any, Any]:
            k, v, key_segments, dk, dv, key = keys

            def per_queries(gradients: Any, queries: Any) -> tuple[Any, Any]:
                q, query_segments, d_out, log_total, inner, dq, query = queries
                chunks = ring.attended(step, query, key)

                def update(gradients: Any) -> Any:
                    dq, dk, dv = gradients
                    logits, visible = chunks.logits(q, k, (query_segments, key_segments))
                    weights = jnp.where(visible, jnp.exp(logits - log_total[..., None]), 0.0)
                    d_weights = _product("bhgqd,bkhd->bhgqk", d_out, v)
                    d_logits = (weights * (d_weights - inner[..., None]) * scale).astype(q.dtype)
                    dv += _product("bhgqk,bhgqd->bkhd", weights.astype(d_out.dtype), d_out)
                    dk += _product("bhgqk,bqhgd->bkhd", d_logits, q)
                    return dq + _product("bhgqk,bkhd->bqhgd", d_logits, k), dk, dv

                dq, *gradients = chunks.run_if_visible(update, (dq, *gradients))
                return tuple(gradients), dq

            rest = (q, segments, d_out, log_total, inner, dq, numbers)
            gradients, dq = jax.lax.scan(per_queries, (dk, dv), rest)
            return dq, gradients

        dq, gradients = jax.lax.scan(per_keys, dq, (*block, *gradients, numbers))
        return (dq, ring.rotate(block), ring.rotate(gradients)), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    carry = (zeros[0], (k, v, segments), zeros[1:])
    (dq, _, gradients), _ = jax.lax.scan(per_step, carry, jnp.arange(ring.steps))
    if ring.steps < ring.size:
        gradients = ring.rotate(gradients, -ring.steps)  # home
    dk, dv = gradients
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_forward, _backward)
