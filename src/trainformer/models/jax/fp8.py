"""Matmuls of linear layers in fp8: e4m3 in the forward pass, gradients in e5m2, and one scale per tensor.

Scales are those of the current values, so that there is no state. It is the "tensorwise" recipe of torchao.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument

#: Set to 1 to emulate fp8 on devices without it: slowly, to try things out.
EMULATE = "TRAINFORMER_FP8_EMULATE"
_CAPABILITY = 8.9
_MULTIPLE = 16  # of both sizes of a layer, for the kernels


def check_fp8_device(device: Any) -> None:
    """Raise if the device does not support fp8."""
    if os.environ.get(EMULATE, "0") not in ("", "0"):
        return
    received = device.device_kind
    if device.platform == "gpu" and "cuda" in device.client.platform_version:
        capability = float(device.compute_capability)
        if capability >= _CAPABILITY:
            return
        received += f", which has {capability}"
    raise BadArgument(
        f"Expected an NVIDIA GPU of compute capability {_CAPABILITY} or more for fp8 (Ada, Hopper, Blackwell), "
        f"received {received}. Pass dtype='bf16'. To try a run out elsewhere, slowly, set {EMULATE}=1."
    )


def is_aligned(shape: tuple[int, ...]) -> bool:
    """Whether the fp8 kernels support the sizes of a layer, by the shape of its kernel."""
    return not any(size % _MULTIPLE for size in shape[-2:])


@jax.custom_vjp
def fp8_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel``, with a gradient that keeps both operands in fp8."""
    return _forward(x, kernel)[0]


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    x8, kernel8 = _cast(x, jnp.float8_e4m3fn), _cast(kernel, jnp.float8_e4m3fn)
    # Empty arrays tell the backward pass the dtypes.
    saved = x8, kernel8, jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype)
    return _product("...i,io->...o", x8, kernel8, x.dtype), saved


def _backward(saved: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, kernel8, x, kernel = saved
    d_y8 = _cast(d_y, jnp.float8_e5m2)
    left, right = ((values.reshape(-1, values.shape[-1]), scale) for values, scale in (x8, d_y8))
    return _product("...o,io->...i", d_y8, kernel8, x.dtype), _product("ri,ro->io", left, right, kernel.dtype)


fp8_matmul.defvjp(_forward, _backward)


def _cast(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The values divided by a scale, so that the largest is the largest of the dtype; and the scale."""
    largest, limit = jnp.max(jnp.abs(x)).astype(jnp.float32), float(jnp.finfo(dtype).max)
    scale = jnp.where(largest == 0, 1.0, largest / limit)
    # Rounding could exceed the limit, which e4m3 has no infinity for.
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(dtype), scale


def _product(equation: str, a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array], dtype: Any) -> jax.Array:
    product = jnp.einsum(equation, a[0], b[0], preferred_element_type=jnp.float32)
    return (product * (a[1] * b[1])).astype(dtype)
