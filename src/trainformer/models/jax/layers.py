"""The layers that all models here are made of: linear maps (with LoRA where asked for), tables, norms, dropout.

A layer is built for one place in the network or, with ``stack=(layers,)``, for all layers of it at once: its weights
then have a leading axis, and whoever runs it takes the slices. Kernels are (in, out). Norms compute in float32 and give
back the type they were given; a linear map computes in the type of its input. Drawing keys is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, did_you_mean, expected

Key = jax.Array | None
Stack = tuple[int, ...]

# By the names of HF configurations. "gelu" is the exact one there; "gelu_new" and others are its tanh form.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_fast": partial(jax.nn.gelu, approximate=True),
}


def check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        do = did_you_mean(str(name), ACTIVATIONS) or f"The JAX models know {', '.join(sorted(ACTIVATIONS))}."
        raise BadArgument(expected("a known activation (hidden_act)", name, do))


class Linear(nnx.Module):
    """``x @ kernel + bias``, and what LoRA adds to it once `apply_lora` has given it ``lora_a`` and ``lora_b``."""

    def __init__(
        self, inputs: int, outputs: int, *, rngs: nnx.Rngs, bias: bool, scale: float = 0.02, stack: Stack = ()
    ) -> None:
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (*stack, inputs, outputs)))
        self.bias = nnx.data(nnx.Param(jnp.zeros((*stack, outputs))) if bias else None)
        self.lora_a: Any = nnx.data(None)
        self.lora_b: Any = nnx.data(None)
        self.lora_scale = 0.0
        self.lora_dropout = 0.0

    def __call__(self, x: jax.Array, key: Key = None) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        if self.lora_a is not None:
            low = dropout(x, self.lora_dropout, key) @ self.lora_a[...].astype(x.dtype)
            y = y + (low @ self.lora_b[...].astype(x.dtype)) * jnp.asarray(self.lora_scale, x.dtype)
        return y


class Embedding(nnx.Module):
    """A table of vectors."""

    def __init__(self, rows: int, width: int, *, rngs: nnx.Rngs, scale: float = 0.02) -> None:
        self.embedding = nnx.Param(scale * jax.random.normal(rngs.params(), (rows, width)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...], ids, axis=0)

    def logits(self, x: jax.Array) -> jax.Array:
        """The table as the output layer of a language model."""
        return x @ self.embedding[...].T.astype(x.dtype)


class RMSNorm(nnx.Module):
    def __init__(self, width: int, eps: float, stack: Stack = ()) -> None:
        self.scale = nnx.Param(jnp.ones((*stack, width)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    def __init__(self, width: int, eps: float, stack: Stack = ()) -> None:
        self.scale = nnx.Param(jnp.ones((*stack, width)))
        self.bias = nnx.Param(jnp.zeros((*stack, width)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


NORMS: dict[str, Callable[..., nnx.Module]] = {"rms": RMSNorm, "layer": LayerNorm}


def dropout(x: jax.Array, rate: float, key: Key) -> jax.Array:
    """Without a key, or at rate 0, `x` as it is."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros((), x.dtype))


def key_source(key: Key) -> Iterator[Key]:
    """Keys without end, each for one use; Nones if there is no key."""
    count = 0
    while True:
        yield None if key is None else jax.random.fold_in(key, count)
        count += 1
