"""What the convolutional networks share: convolution, batch norm, remat of a block, and their config fields.

Images are (batch, height, width, channels), kernels (height, width, in, out).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.families.family import Weight
from trainformer.models.jax.layers import activation_spec, constrain

KERNEL_AXES = (2, 3, 1, 0)  # of torch's (out, in, height, width) in ours


class Conv(nnx.Module):
    """A convolution with an odd kernel and torch's padding of half of it, or with none."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        rngs: nnx.Rngs,
        stride: int = 1,
        groups: int = 1,
        bias: bool = False,
        padding: int = 0,
        scale: float | None = None,
    ) -> None:
        shape = (size, size, inputs // groups, outputs)
        scale = math.sqrt(2 / (size * size * outputs)) if scale is None else scale  # He's, by outputs
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), shape))
        self.bias = nnx.data(nnx.Param(jnp.zeros(outputs)) if bias else None)
        self.stride, self.groups, self.padding = stride, groups, padding

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        x, convolve = x.astype(kernel.dtype), self._convolve
        rows = activation_spec(x.shape, "batch")
        if self.groups > 1 and any(rows):
            # On a mesh with other axes beside those of the rows, XLA's partitioner multiplies the kernel gradient of a
            # grouped convolution by the size of the other axes. In a shard_map it is right.
            convolve = jax.shard_map(convolve, in_specs=(rows, PartitionSpec()), out_specs=rows)
        y = convolve(x, kernel)
        return constrain(y if self.bias is None else y + self.bias[...], "batch", None, None, None)

    def _convolve(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (self.stride, self.stride),
            [(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
        )


class BatchNorm(nnx.Module):
    """Batch norm with torch's running statistics (momentum 0.1, unbiased variance), computed in float32.

    Rows that `valid` excludes do not count. Statistics are of all rows of a micro-batch, on whatever device they are.
    `count` is torch's `num_batches_tracked`: the number of updates.
    """

    momentum = 0.1
    eps = 1e-5

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.mean = nnx.BatchStat(jnp.zeros(width))
        self.var = nnx.BatchStat(jnp.ones(width))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, deterministic: bool, valid: jax.Array | None = None) -> jax.Array:
        y = x.astype(jnp.float32)
        if deterministic:
            mean, var = self.mean[...].astype(jnp.float32), self.var[...].astype(jnp.float32)
        else:
            mean, var = self._batch_statistics(y, valid)
        y = (y - mean) * jax.lax.rsqrt(var + self.eps)
        return (y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)

    def _batch_statistics(self, y: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        rows = jnp.ones(y.shape[0]) if valid is None else valid.astype(jnp.float32)
        weights = rows.reshape(-1, 1, 1, 1)
        count = jnp.sum(rows) * y.shape[1] * y.shape[2]
        total = jnp.maximum(count, 1.0)
        mean = jnp.sum(y * weights, axis=(0, 1, 2)) / total
        var = jnp.sum(jnp.square(y - mean) * weights, axis=(0, 1, 2)) / total
        share = jnp.where(count > 0, self.momentum, 0.0)
        unbiased = var * total / jnp.maximum(total - 1.0, 1.0)
        for running, value in ((self.mean, mean), (self.var, unbiased)):
            old = running[...]
            running[...] = (old + share * (jax.lax.stop_gradient(value) - old)).astype(old.dtype)
        self.count[...] = self.count[...] + (count > 0).astype(jnp.int32)
        return mean, var


def call_block(block: Any, remat: Callable[..., Any] | None, *args: Any) -> jax.Array:
    """``block(*args)``, recomputed in the backward pass by a remat policy. Its batch statistics are updated."""
    if remat is None:
        return block(*args)
    graph, *states = nnx.split(block, nnx.Param, ...)

    def run(params: Any, statistics: Any) -> tuple[jax.Array, Any]:
        module = nnx.merge(graph, params, statistics)
        output = module(*args)
        return output, nnx.state(module, nnx.BatchStat).to_pure_dict()

    # As plain dicts: a variable may only be updated inside the trace that made it.
    output, statistics = jax.checkpoint(run, policy=remat)(*(state.to_pure_dict() for state in states))
    nnx.update(block, statistics)
    return output


def channels_last(pixels: jax.Array, channels: int) -> jax.Array:
    """Images (batch, height, width, channels); channels-first ones, as in torch, are transposed."""
    if pixels.ndim == 4 and pixels.shape[-1] == channels:
        return pixels
    if pixels.ndim == 4 and pixels.shape[1] == channels:
        return jnp.moveaxis(pixels, 1, -1)
    what = f"images of shape (batch, height, width, {channels})"
    raise BadArgument(expected(what, tuple(pixels.shape), "Convert them, or set num_channels."))


def conv_weights(path: str, name: str, *, bias: bool) -> list[Weight]:
    found = [Weight(f"{path}/kernel", f"{name}.weight", KERNEL_AXES)]
    return [*found, Weight(f"{path}/bias", f"{name}.bias")] if bias else found


def check_stages(hidden_sizes: tuple[int, ...], depths: tuple[int, ...]) -> None:
    if not depths or len(depths) != len(hidden_sizes) or min(*depths, *hidden_sizes) < 1:
        what = f"depths with one positive number per stage, of which hidden_sizes has {len(hidden_sizes)}"
        raise BadArgument(expected(what, list(depths)))
