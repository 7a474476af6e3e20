"""Splash attention: JAX's flash attention for TPUs, which skips the blocks that a mask hides."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from trainformer.models.jax.layers import activation_spec, axis_size

_BLOCKS = (512, 256, 128)


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention as in `attend`, for lengths that are multiples of 128. Sharded over rows and heads.

    `interpret` runs the kernel in Pallas' interpreter, on any device.
    """
    length, width = q.shape[1], q.shape[3]
    block = next(size for size in _BLOCKS if length % size == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    blocks: dict[str, Any] = dict.fromkeys(names, block)
    sizes = splash.BlockSizes(**blocks)
    mask: splash.Mask = splash.CausalMask((length, length)) if causal else splash.FullMask((length, length))
    if window is not None:
        sides = (window - 1, 0 if causal else window - 1)
        mask = splash.LocalMask((length, length), sides, 0)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        heads = splash.MultiHeadMask([mask] * q.shape[2])
        kernel = splash.make_splash_mha_single_device(heads, block_sizes=sizes, interpret=interpret)
        ids = None if segments is None else splash.SegmentIds(segments, segments)
        # It does not scale, and takes (heads, sequence, head_dim) of one row.
        rows = [x.swapaxes(1, 2) for x in ((q / math.sqrt(width)).astype(q.dtype), k, v)]
        return jax.vmap(kernel)(*rows, ids).swapaxes(1, 2)

    spec = activation_spec(q.shape, "batch", None, "heads", None)
    if not any(spec):
        return attend(q, k, v, segments)
    if spec[2] and k.shape[2] % axis_size("tp"):
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat(groups, axis=2) for x in (k, v))
    # XLA cannot shard a Pallas kernel by itself.
    specs = (spec, spec, spec, None if segments is None else PartitionSpec(spec[0], None))
    return jax.shard_map(attend, in_specs=specs, out_specs=spec, check_vma=False)(q, k, v, segments)
