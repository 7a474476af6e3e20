"""Frozen kernels in 8 or 4 bits, as in QLoRA: one scale per block of inputs, dequantized when they are used.

A kernel (..., inputs, outputs) becomes integer codes and scales (..., blocks, outputs). Two 4-bit codes of neighbouring
inputs share a byte. Blocks, codes and scales are those of bitsandbytes' "nf4" and of torchao's symmetric integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainformer.core.errors import BadArgument, did_you_mean, expected

QUANTIZATIONS = ("int8", "int4", "nf4")
BLOCK = 64  # inputs that share a scale

# The levels of "4-bit NormalFloat" (https://arxiv.org/abs/2305.14314): quantiles of a normal distribution.
_LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_LIMITS = {"int8": 127, "int4": 7}


def check_quantization(kind: Any) -> None:
    if kind not in QUANTIZATIONS:
        do = did_you_mean(str(kind), QUANTIZATIONS)
        raise BadArgument(expected(f"quantization to be one of {', '.join(QUANTIZATIONS)}, or None", kind, do))


@dataclass(frozen=True)
class Quantization:
    """How a kernel is stored. `dtype` is that of the original, which `dequantize` restores."""

    kind: str
    dtype: str

    def quantize(self, kernel: Any) -> tuple[Any, Any]:
        """Codes and float32 scales of a kernel (a stack of them: one at a time, to save memory on the host)."""
        if isinstance(kernel, np.ndarray) and kernel.ndim > 2:
            codes, scales = zip(*(self.quantize(layer) for layer in kernel), strict=True)
            return np.stack(codes), np.stack(scales)
        xp: Any = np if isinstance(kernel, np.ndarray) else jnp
        block = block_size(kernel.shape[-2])
        values = kernel.astype(np.float32).reshape(*kernel.shape[:-2], -1, block, kernel.shape[-1])
        scales = xp.max(xp.abs(values), axis=-2, keepdims=True) / np.float32(_LIMITS.get(self.kind, 1))
        values = (values / xp.where(scales == 0, np.float32(1), scales)).reshape(kernel.shape)
        if self.kind == "nf4":
            codes = xp.searchsorted((_LEVELS[1:] + _LEVELS[:-1]) / 2, values).astype(np.uint8)
        else:
            codes = xp.round(values).astype(np.int8)
        if self.kind != "int8":
            codes = (codes[..., ::2, :] << 4) | (codes[..., 1::2, :] & 15)
        return codes, scales[..., 0, :]

    def dequantize(self, codes: Any, scales: Any, dtype: Any = None) -> Any:
        """The kernel in `dtype`, computed in float32."""
        xp: Any = np if isinstance(codes, np.ndarray) else jnp
        if self.kind != "int8":
            # A shift to the right keeps the sign of int8, the container of int4.
            low = codes & 15 if self.kind == "nf4" else (codes << 4) >> 4
            both = xp.stack([codes >> 4, low], axis=-2)
            codes = both.reshape(*codes.shape[:-2], -1, codes.shape[-1])
        values = xp.take(_LEVELS, codes, mode="clip") if self.kind == "nf4" else codes.astype(np.float32)
        blocks = values.reshape(*scales.shape[:-1], -1, scales.shape[-1])
        return (blocks * scales[..., None, :]).reshape(codes.shape).astype(jnp.dtype(dtype or self.dtype))


def block_size(inputs: int) -> int:
    """Inputs that share a scale: 64, or else the largest even number below it that divides the inputs."""
    found = next((size for size in range(BLOCK, 1, -2) if inputs % size == 0), None)
    if found is None:
        raise BadArgument(expected("layers with an even number of inputs to quantize", inputs))
    return found


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def quantized_matmul(x: jax.Array, codes: jax.Array, scales: jax.Array, quantization: Quantization) -> jax.Array:
    """``x @ kernel``. Autodiff would keep the dequantized kernel of every layer for the backward pass."""
    # The barriers make XLA dequantize right before the product: not earlier, and not once for both passes. Else the
    # kernels of all layers would be in memory at once if the layers are unrolled.
    x, codes, scales = jax.lax.optimization_barrier((x, codes, scales))
    return x @ quantization.dequantize(codes, scales, x.dtype)


def _forward(x: jax.Array, codes: jax.Array, scales: jax.Array, quantization: Quantization) -> tuple[jax.Array, Any]:
    return quantized_matmul(x, codes, scales, quantization), (codes, scales)


def _backward(quantization: Quantization, saved: Any, d_y: jax.Array) -> tuple[jax.Array, None, None]:
    codes, scales, d_y = jax.lax.optimization_barrier((*saved, d_y))
    return d_y @ quantization.dequantize(codes, scales, d_y.dtype).T, None, None


quantized_matmul.defvjp(_forward, _backward)
