"""Dtypes by name, and casting pytrees.

Parameters keep their dtype (usually float32); a step computes on copies in the compute dtype (`step`).
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, did_you_mean, expected

_DTYPES: dict[str, Any] = {
    "no": jnp.float32,
    "fp32": jnp.float32,
    "32": jnp.float32,
    "float32": jnp.float32,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "fp16": jnp.float16,
    "float16": jnp.float16,
    "fp8": jnp.bfloat16,  # around fp8 matmuls
}
_EXACT = re.compile(r"\bkernel_scale\b")
_CHOICES = f"Use one of {', '.join(['auto', *_DTYPES])}."


def resolve_dtype(name: Any, on: str | None = None) -> Any:
    """A dtype from its name; ``auto`` is bf16 on a GPU or TPU, else fp32. `on` replaces the detected platform.

    >>> resolve_dtype("bf16"), resolve_dtype("auto", on="cpu")
    (dtype(bfloat16), dtype('float32'))
    """
    if name is None:
        return jnp.dtype(jnp.float32)
    if not isinstance(name, str):
        try:
            dtype = jnp.dtype(name)
        except TypeError as error:
            raise BadArgument(expected("a dtype", name, _CHOICES)) from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise BadArgument(expected("a floating-point dtype", str(dtype), _CHOICES))
        return dtype
    lowered = name.lower()
    if lowered == "auto":
        return jnp.dtype(jnp.float32 if (on or jax.default_backend()) == "cpu" else jnp.bfloat16)
    if lowered not in _DTYPES:
        raise BadArgument(expected("the name of a dtype", name, did_you_mean(lowered, ["auto", *_DTYPES]) or _CHOICES))
    return jnp.dtype(_DTYPES[lowered])


def cast_floating(tree: Any, dtype: Any) -> Any:
    """A pytree whose floating-point arrays are cast to `dtype`; integers, booleans and PRNG keys stay as they are.

    So do the scales of quantized kernels: their rounding would add to that of the kernels.
    """

    def cast(path: Any, leaf: Any) -> Any:
        is_floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_floating and not _EXACT.search(jax.tree_util.keystr(path)) else leaf

    return jax.tree_util.tree_map_with_path(cast, tree)


def set_compute_dtype(model: nnx.Module, dtype: Any) -> None:
    """Set `dtype` on layers that have none: flax would promote to the widest dtype of inputs and weights."""
    for _, module in nnx.iter_modules(model):
        if getattr(module, "dtype", dtype) is None:
            module.dtype = dtype  # type: ignore[attr-defined]
