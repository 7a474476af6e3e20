"""Number formats: what names mean, casting trees, and which attention kernel fits.

Weights stay as they are kept (float32, as a rule); a step computes on copies in the compute format. How that goes into
the gradients is the business of `step`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, did_you_mean, expected

_FORMATS: dict[str, Any] = {
    "no": jnp.float32,
    "fp32": jnp.float32,
    "32": jnp.float32,
    "float32": jnp.float32,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "fp16": jnp.float16,
    "float16": jnp.float16,
}
_MATMUL = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


def platform() -> str:
    """What computes here: ``cpu``, ``gpu`` or ``tpu``."""
    return jax.default_backend()


def resolve_dtype(name: Any, on: str | None = None) -> Any:
    """The format that is meant; ``auto`` is bf16 on a GPU or TPU, else fp32. A dtype is taken as it is.

    >>> resolve_dtype("bf16"), resolve_dtype("auto", on="cpu")
    (dtype(bfloat16), dtype('float32'))
    """
    if name is None:
        return jnp.dtype(jnp.float32)
    if not isinstance(name, str):
        try:
            dtype = jnp.dtype(name)
        except TypeError as error:
            raise BadArgument(expected("a number format", name, f"Use one of {_known()}.")) from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise BadArgument(expected("a floating-point format", str(dtype), f"Use one of {_known()}."))
        return dtype
    word = name.lower()
    if word == "auto":
        return jnp.dtype(jnp.float32 if (on or platform()) == "cpu" else jnp.bfloat16)
    if word not in _FORMATS:
        advice = did_you_mean(word, ["auto", *_FORMATS]) or f"Use one of {_known()}."
        raise BadArgument(expected("the name of a number format", name, advice))
    return jnp.dtype(_FORMATS[word])


def _known() -> str:
    return ", ".join(["auto", *_FORMATS])


def resolve_matmul(name: str | None) -> str | None:
    """How exactly float32 matrices are multiplied, checked; for `jax.default_matmul_precision`. None: as jax does."""
    if name is None or name in _MATMUL:
        return name
    raise BadArgument(
        expected("a matmul precision", name, did_you_mean(str(name), _MATMUL) or f"Use one of {', '.join(_MATMUL)}.")
    )


def attention_kernel(use_fast_kernels: bool, dtype: Any, on: str | None = None) -> str:
    """Which attention a model is to use: cuDNN's takes 16-bit numbers on a GPU only, XLA's everything everywhere.

    >>> attention_kernel(True, jnp.bfloat16, on="gpu"), attention_kernel(True, jnp.float32, on="gpu")
    ('cudnn', 'xla')
    """
    is_narrow = jnp.dtype(dtype).itemsize == 2
    return "cudnn" if use_fast_kernels and is_narrow and (on or platform()) == "gpu" else "xla"


def cast_floating(tree: Any, dtype: Any) -> Any:
    """A tree whose floating-point arrays have the format `dtype`; whole numbers, flags and keys stay as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_floating(leaf) else leaf, tree)


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def compute_in(model: nnx.Module, dtype: Any) -> None:
    """Let layers that leave it open compute in `dtype`: flax would otherwise go by the widest of inputs and weights."""
    for _, module in nnx.iter_modules(model):
        if getattr(module, "dtype", dtype) is None:
            module.dtype = dtype  # type: ignore[attr-defined]
