"""Counter-based random numbers per sample: pure functions of the sample's key and a stream number.

There is no generator and no state: number `i` is a hash (splitmix64) of key, stream and `i`. A sample gets the same
numbers in any batch, on any device and after any resume. They are computed on the CPU (0.1 ms for 256 samples with 40
numbers each), so the host knows them without a device sync.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, expected
from trainformer.data.order import GOLDEN, mix_bits

Keys = np.ndarray | Tensor | Sequence[int]

_GOLDEN = np.uint64(GOLDEN)
_ALIGNED = 16  # bytes: alignment of tensors in the shared buffer, enough for any dtype


def uniforms(keys: Keys | None, count: int, stream: int = 0, *, samples: int | None = None) -> Tensor:
    """Uniform numbers (N, count) in [0, 1) for N 64-bit keys; another `stream` gives other numbers.

    Without keys, `samples` fresh ones are drawn from torch's global CPU generator.

    >>> uniforms([7, 8], 3)[1].equal(uniforms([8], 3)[0])
    True
    >>> uniforms([7], 3, stream=1).equal(uniforms([7], 3))
    False
    """
    if count < 0:
        raise BadArgument(expected("count to be a number of draws, at least 0", count))
    if keys is None and samples is None:
        raise BadArgument("Expected keys, or the number of samples to draw fresh ones for, received neither.")
    known = fresh_keys(samples or 0) if keys is None else as_keys(keys, samples)
    # The key is mixed before the stream is added, so small or consecutive keys are as good as any.
    start = mix_bits(mix_bits(known + _GOLDEN) + _GOLDEN * np.array([stream + 1], dtype=np.uint64))
    steps = _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    bits = mix_bits(start[:, None] + steps)
    # float32 has 24 bits: the highest 24 give multiples of 2**-24 below 1, and never 1 itself.
    return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def fresh_keys(count: int) -> np.ndarray:
    """Random keys (count,) from torch's global CPU generator, for callers without keys."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device="cpu").numpy().view(np.uint64)


def as_keys(keys: Keys, samples: int | None = None) -> np.ndarray:
    """Keys as (N,) uint64, modulo 2**64; `samples` is the required number.

    >>> as_keys([1, -1]).tolist()
    [1, 18446744073709551615]
    """
    if isinstance(keys, Tensor):
        if keys.device.type != "cpu":
            raise BadArgument(
                expected("keys on the CPU", str(keys.device), "Keep them there: reading them back would sync the GPU.")
            )
        keys = keys.numpy()
    if not isinstance(keys, np.ndarray):
        keys = np.array([int(key) & (2**64 - 1) for key in keys], dtype=np.uint64)
    if keys.dtype.kind not in "iu":
        raise BadArgument(expected("keys to be 64-bit integers", str(keys.dtype)))
    if keys.ndim != 1 or (samples is not None and len(keys) != samples):
        wanted = "(N,)" if samples is None else f"({samples},)"
        raise BadArgument(expected(f"one key per sample, of shape {wanted}", keys.shape))
    return keys.astype(np.uint64)


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Small arrays as tensors on the device, in one asynchronous copy."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts, total = {}, 0
    for name, array in arrays.items():
        starts[name] = total
        total += math.ceil(array.nbytes / _ALIGNED) * _ALIGNED
    # Copies are asynchronous only from pinned memory; torch keeps the buffer until they are done.
    buffer = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    packed = buffer.numpy()
    for name, array in arrays.items():
        packed[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = buffer.to(device, non_blocking=True)
    return {
        name: on_device[starts[name] : starts[name] + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .reshape(array.shape)
        for name, array in arrays.items()
    }
