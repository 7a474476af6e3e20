"""The choice of the attention kernel: XLA's own, cuDNN's flash attention, TPU's splash attention, or ring attention."""

from __future__ import annotations

import logging
from functools import cache

import jax
import jax.numpy as jnp

from trainformer.models.jax.layers import axis_size, platform

logger = logging.getLogger("trainformer")

KERNELS = ("auto", "xla", "cudnn", "splash", "ring")


def choose_kernel(
    asked: str,
    q: jax.Array,
    k: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    masked: bool = False,
    drops: bool = False,
    caps: bool = False,
) -> str:
    """The kernel for attention with these queries and keys.

    `masked`: there are segments; `drops`: there is dropout on the weights; `caps`: their logits are soft-capped.

    "auto" is ring attention if sequences are sharded, else the fast kernel of the platform, where it applies. If
    another kernel is asked for that does not apply, one line in the log says why.
    """
    if asked == "xla":
        return asked
    is_sharded = axis_size("sp") > 1
    best = "ring" if is_sharded else {"gpu": "cudnn", "tpu": "splash"}.get(platform(), "xla")
    wanted = best if asked == "auto" else asked
    reasons: dict[str, str] = {}
    for kernel in dict.fromkeys((wanted, best, "xla")):
        reason = _obstacle(kernel, q, k, causal, window, masked, drops, caps)
        if reason is None:
            break
        reasons[kernel] = reason
    if wanted in reasons and (asked != "auto" or is_sharded):
        gathers = "which gathers the keys and values of all devices" if is_sharded and kernel == "xla" else ""
        _explain(wanted, reasons[wanted], ", ".join(filter(None, (f"{kernel} instead", gathers))))
    return kernel


@cache
def _explain(wanted: str, reason: str, instead: str) -> None:
    """Once per process: a model is traced many times."""
    logger.info("%s attention is not used (%s): %s", wanted, reason, instead)


def _obstacle(
    kernel: str, q: jax.Array, k: jax.Array, causal: bool, window: int | None, masked: bool, drops: bool, caps: bool
) -> str | None:
    """Why a kernel does not apply; None if it does."""
    if kernel == "xla":
        return None
    if drops:
        return "it has no dropout on attention weights"
    if caps:
        return "it has no soft-capping of attention logits"
    if q.shape[1] != k.shape[1]:
        return "there are fewer queries than keys"
    if window is not None and not isinstance(window, int):
        return "the window differs between layers"
    if kernel == "ring":
        return _ring_obstacle(q.shape[1])
    if axis_size("sp") > 1:
        return "sequences are sharded over sp"
    return _cudnn_obstacle(q, causal, window, masked) if kernel == "cudnn" else _splash_obstacle(q)


def _ring_obstacle(length: int) -> str | None:
    devices = axis_size("sp")
    if devices == 1:
        return "sequences are not sharded: the sp axis has size 1"
    return f"{length} tokens are not a multiple of sp={devices}" if length % devices else None


def _cudnn_obstacle(q: jax.Array, causal: bool, window: int | None, masked: bool) -> str | None:
    device = jax.local_devices()[0]
    if platform() != "gpu" or "cuda" not in device.client.platform_version:
        return f"it needs an NVIDIA GPU, and this is a {platform()}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bf16 or fp16, and this is {q.dtype}"
    capability = float(device.compute_capability)
    widest = 256 if capability >= 9 else 128
    if capability < 8:
        return f"it needs compute capability 8.0, and this is {capability}"
    if q.shape[3] % 8 or q.shape[3] > widest:
        return f"it needs a head_dim of at most {widest} that is a multiple of 8, and this is {q.shape[3]}"
    if masked and q.shape[1] % 2:
        return f"with padding or packing it needs an even length, and this is {q.shape[1]}"
    return "it has a window only for causal attention" if window is not None and not causal else None


def _splash_obstacle(q: jax.Array) -> str | None:
    if platform() != "tpu":
        return f"it needs a TPU, and this is a {platform()}"
    if q.shape[1] % 128:
        return f"it needs a length that is a multiple of 128, and this is {q.shape[1]}"
    return f"it needs a head_dim that is a multiple of 64, and this is {q.shape[3]}" if q.shape[3] % 64 else None
