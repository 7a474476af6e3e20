"""The transformer block that the decoder and the Vision Transformer share, the scan over its layers, and `Model`.

Blocks are pre-norm (attention, then feed-forward), with weights stacked over layers. `Execution` says how a model
computes: remat policy, attention kernel, unrolled layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.attention import attend, rotate
from trainformer.models.jax.attention_kernels import KERNELS
from trainformer.models.jax.fp8 import is_aligned
from trainformer.models.jax.layers import (
    ACTIVATIONS,
    NORMS,
    Key,
    Linear,
    check_activation,
    constrain,
    dropout,
    key_source,
)

Rules = tuple[tuple[str, tuple], ...]

# PartitionSpecs for the weights of one layer; leading dimensions of stacked weights are not sharded.
BLOCK_RULES: Rules = (
    (r"(q|k|v|qkv|gate|up)_proj/kernel(_scale)?$", ("fsdp", "tp")),
    (r"(o|down)_proj/kernel(_scale)?$", ("tp", "fsdp")),
    (r"(q|k|v|qkv|gate|up)_proj/bias$", ("tp",)),
    (r"(q|k|v|qkv|gate|up)_proj/lora_a$", ("fsdp", None)),
    (r"(q|k|v|qkv|gate|up)_proj/lora_b$", (None, "tp")),
    (r"(o|down)_proj/lora_a$", ("tp", None)),
    (r"(o|down)_proj/lora_b$", (None, "fsdp")),
)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Configuration of a block, named as in HF configs where possible."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    norm: str = "rms"
    norm_eps: float = 1e-6
    gated: bool = True
    fused_qkv: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    causal: bool = True
    sliding_window: int | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_activation(self.hidden_act)
        if self.num_attention_heads % self.kv_heads:
            do = "Each key-value head is shared by the same number of query heads."
            raise BadArgument(expected(f"num_key_value_heads to divide {self.num_attention_heads}", self.kv_heads, do))
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            what = f"hidden_size to be a multiple of num_attention_heads ({self.num_attention_heads})"
            raise BadArgument(expected(what, self.hidden_size, "Change one of them, or give head_dim."))

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class Execution:
    """How a model computes: `remat` is a `jax.checkpoint` policy (None: keep all activations)."""

    remat: Callable[..., Any] | None = None
    attention: str = "auto"
    unroll: int = 1

    def __post_init__(self) -> None:
        if self.remat is not None and not callable(self.remat):
            do = "Pass one of jax.checkpoint_policies, or None to keep all activations."
            raise BadArgument(expected("remat to be a checkpoint policy", self.remat, do))
        if self.attention not in KERNELS:
            raise BadArgument(expected(f"attention to be one of {', '.join(KERNELS)}", self.attention))
        if not isinstance(self.unroll, int) or self.unroll < 1:
            do = "It is the number of layers per scan iteration; True for all of them."
            raise BadArgument(expected("unroll to be a positive integer or True", self.unroll, do))


class Attention(nnx.Module):
    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.config = config
        width, heads, kv = config.head_width, config.num_attention_heads, config.kv_heads
        shared: dict[str, Any] = {"rngs": rngs, "stack": stack, "scale": config.initializer_range}
        size, bias = config.hidden_size, config.qkv_bias
        if config.fused_qkv:
            self.qkv_proj = Linear(size, (heads + 2 * kv) * width, bias=bias, **shared)
        else:
            self.q_proj = Linear(size, heads * width, bias=bias, **shared)
            self.k_proj = Linear(size, kv * width, bias=bias, **shared)
            self.v_proj = Linear(size, kv * width, bias=bias, **shared)
        self.o_proj = Linear(heads * width, size, bias=config.output_bias, **shared)
        if config.qk_norm:
            self.q_norm = NORMS[config.norm](width, config.norm_eps, stack)
            self.k_norm = NORMS[config.norm](width, config.norm_eps, stack)

    def __call__(self, x: jax.Array, segments: Any, rope: Any, execution: Execution, key: Key) -> jax.Array:
        config, keys = self.config, key_source(key)
        if config.fused_qkv:
            width, kv = config.head_width, config.kv_heads
            ends = [config.num_attention_heads * width, (config.num_attention_heads + kv) * width]
            q, k, v = jnp.split(self.qkv_proj(x, next(keys)), ends, axis=-1)
        else:
            q, k, v = (proj(x, next(keys)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.reshape(*part.shape[:-1], -1, config.head_width) for part in (q, k, v))
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        mixed = attend(
            q,
            k,
            v,
            segments,
            causal=config.causal,
            window=config.sliding_window,
            implementation=execution.attention,
            rate=config.attention_dropout,
            key=next(keys),
        )
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1), next(keys))


class FeedForward(nnx.Module):
    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        shared: dict[str, Any] = {"rngs": rngs, "stack": stack, "scale": config.initializer_range}
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.hidden_act
        self.gate_proj = nnx.data(Linear(size, inner, bias=bias, **shared) if config.gated else None)
        self.up_proj = Linear(size, inner, bias=bias, **shared)
        self.down_proj = Linear(inner, size, bias=bias, **shared)

    def __call__(self, x: jax.Array, key: Key) -> jax.Array:
        keys, act = key_source(key), ACTIVATIONS[self.activation]
        up = self.up_proj(x, next(keys))
        inner = act(up) if self.gate_proj is None else act(self.gate_proj(x, next(keys))) * up
        inner = constrain(inner, "batch", "sequence", "features")
        return self.down_proj(inner, next(keys))


class Block(nnx.Module):
    """One layer, or a stack of layers; only a slice of a stack can be called."""

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.rate = config.hidden_dropout
        self.input_norm = NORMS[config.norm](config.hidden_size, config.norm_eps, stack)
        self.attention = Attention(config, rngs, stack)
        self.post_norm = NORMS[config.norm](config.hidden_size, config.norm_eps, stack)
        self.mlp = FeedForward(config, rngs, stack)

    def __call__(self, x: jax.Array, segments: Any, rope: Any, execution: Execution, key: Key) -> jax.Array:
        keys = key_source(key)
        mixed = self.attention(self.input_norm(x), segments, rope, execution, next(keys))
        x = x + dropout(mixed, self.rate, next(keys))
        x = x + dropout(self.mlp(self.post_norm(x), next(keys)), self.rate, next(keys))
        return constrain(x, "batch", "sequence", None)


def run_layers(layers: Block, x: jax.Array, segments: Any, rope: Any, execution: Execution, key: Key) -> jax.Array:
    """Apply all layers of the stack in a scan, each with its own key."""
    graph, weights = nnx.split(layers)
    depth = jax.tree.leaves(weights)[0].shape[0]

    def one(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        weights, number = layer
        own = None if key is None else jax.random.fold_in(key, number)
        return nnx.merge(graph, weights)(x, segments, rope, execution, own), None

    if execution.remat is not None:
        # A scan already prevents common subexpression elimination; the extra barrier would only cost time.
        one = jax.checkpoint(one, policy=execution.remat, prevent_cse=execution.unroll > 1)
    x, _ = jax.lax.scan(one, x, (weights, jnp.arange(depth)), unroll=execution.unroll)
    return x


@dataclass(frozen=True)
class LoraSettings:
    """The LoRA of a model, as in an adapter folder; layers are given by path."""

    r: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()


class Model(nnx.Module):
    """Base class of the models. `partition_rules` are the sharding rules for the weights of one layer."""

    partition_rules: Rules = ()
    config: Any

    def __init__(self, config: BlockConfig) -> None:
        self.config = config
        self.execution = Execution()
        self.lora: LoraSettings | None = None

    def configure(
        self,
        remat: Callable[..., Any] | None = None,
        attention: str = "auto",
        unroll: int | bool = 1,
        fp8: bool = False,
    ) -> None:
        """Set the remat policy, the attention kernel, and the number of layers per scan iteration (True: all).

        With `fp8` the linear layers inside the blocks multiply in fp8, those whose sizes are multiples of 16.
        """
        # Stored as a number: a compilation cache would treat True and 1 as equal.
        self.execution = Execution(remat, attention, self.config.num_hidden_layers if unroll is True else unroll)
        linear = {path: layer for path, layer in nnx.iter_graph(self) if isinstance(layer, Linear) and "layers" in path}
        for layer in linear.values():
            layer.fp8 = fp8 and is_aligned(layer.kernel.shape)
        if fp8 and not any(layer.fp8 for layer in linear.values()):
            what = "linear layers whose sizes are multiples of 16 for fp8"
            raise BadArgument(expected(what, f"a {type(self).__name__} without any", "Pass dtype='bf16'."))

    def save_pretrained(self, folder: str | os.PathLike[str], params: Mapping[str, Any] | None = None) -> Path:
        """Write ``config.json`` and ``model.safetensors`` for transformers; `params` replace the model's own."""
        from trainformer.models.jax.huggingface import save_model

        return save_model(self, folder, params)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], dtype: Any = jnp.float32, **options: Any) -> Self:
        """Load a model from an HF folder or hub name. Options as for `load_model`."""
        from trainformer.models.jax.huggingface import load_model

        return load_model(folder, dtype, kind=cls, **options)
