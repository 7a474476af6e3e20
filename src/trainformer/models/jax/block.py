"""The transformer block that the decoder and the Vision Transformer share, the scan over its layers, and `Model`.

A block is attention and feed-forward with norms before or after them, or both. Weights are stacked over layers; layers
of different kinds (window, rotary embeddings) are compiled once per pattern. `Execution` says how a model computes:
remat policy, attention kernel, unrolled layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.attention import attend
from trainformer.models.jax.attention_kernels import KERNELS
from trainformer.models.jax.cache import KVCache, LayerCache
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
    project,
)
from trainformer.models.jax.rope import Tables, rotate
from trainformer.models.jax.scan import LayerKind, layer_groups, scan_layers

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
    (r"experts/(gate|up)_proj$", ("ep", "fsdp", "tp")),
    (r"experts/down_proj$", ("ep", "tp", "fsdp")),
)


SLIDING, FULL = "sliding_attention", "full_attention"
NORM_PLACEMENTS = ("pre", "post", "both")


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Configuration of a block, named as in HF configs where possible.

    `layer_types` says which layers use `sliding_window` ("sliding_attention" or "full_attention"; None: all).
    `norm_placement` is "pre" (of attention and feed-forward), "post" (of their outputs) or "both". `qk_norm_whole`
    normalises over all heads together. `qkv_interleaved` orders a fused projection by heads, as GPT-NeoX.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_placement: str = "pre"
    parallel_residual: bool = False
    residual_multiplier: float = 1.0
    gated: bool = True
    fused_gate_up: bool = False
    fused_qkv: bool = False
    qkv_interleaved: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    causal: bool = True
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    query_pre_attn_scalar: float | None = None
    attention_multiplier: float | None = None
    attn_logit_softcapping: float | None = None
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
        if self.norm_placement not in NORM_PLACEMENTS:
            raise BadArgument(
                expected(f"norm_placement to be one of {', '.join(NORM_PLACEMENTS)}", self.norm_placement)
            )
        types = self.layer_types or ()
        if not set(types) <= {SLIDING, FULL} or (self.layer_types and len(types) < self.num_hidden_layers):
            what = f"layer_types of {self.num_hidden_layers} layers, each {SLIDING!r} or {FULL!r}"
            raise BadArgument(expected(what, list(types)))
        if SLIDING in types and self.sliding_window is None:
            do = "Qwen and SmolLM3 also need use_sliding_window."
            raise BadArgument(expected(f"a sliding_window, since layer_types has {SLIDING!r}", None, do))

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def feed_forward(self, rngs: nnx.Rngs, stack: tuple[int, ...]) -> nnx.Module:
        """The feed-forward layers of a stack of blocks."""
        return FeedForward(self, rngs, stack)

    @property
    def attention_scale(self) -> float:
        """The factor of the attention logits."""
        return self.attention_multiplier or (self.query_pre_attn_scalar or self.head_width) ** -0.5

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        types = (self.layer_types or (SLIDING,) * self.num_hidden_layers)[: self.num_hidden_layers]
        return tuple(LayerKind(self.sliding_window if kind == SLIDING else None) for kind in types)


@dataclass
class RouterProbe:
    """Reduces the routing of each layer of a mixture of experts, during a forward pass.

    `reduce` gets the router's logits (batch, sequence, experts) and the chosen experts (batch, sequence, per token).
    Afterwards `found` has its results, stacked over layers.
    """

    reduce: Callable[[jax.Array, jax.Array], Any]
    found: Any = None


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
            widths = (heads * width, kv * width) if config.qk_norm_whole else (width, width)
            self.q_norm, self.k_norm = (NORMS[config.norm](size, config.norm_eps, stack) for size in widths)

    def _projections(self, x: jax.Array, keys: Iterator[Key]) -> Sequence[jax.Array]:
        """Queries, keys and values (batch, sequence, heads * head_dim)."""
        config = self.config
        if not config.fused_qkv:
            return project(x, (self.q_proj, self.k_proj, self.v_proj), keys)
        fused, width = self.qkv_proj(x, next(keys)), config.head_width
        if config.qkv_interleaved:
            by_head = fused.reshape(*x.shape[:-1], config.num_attention_heads, 3 * width)
            return [part.reshape(*x.shape[:-1], -1) for part in jnp.split(by_head, 3, axis=-1)]
        heads, kv = config.num_attention_heads, config.kv_heads
        return jnp.split(fused, [heads * width, (heads + kv) * width], axis=-1)

    def __call__(
        self,
        x: jax.Array,
        segments: Any,
        rope: Tables | None,
        execution: Execution,
        key: Key,
        window: int | None = None,
        cache: LayerCache | None = None,
    ) -> jax.Array:
        config, keys = self.config, key_source(key)
        q, k, v = self._projections(x, keys)
        if config.qk_norm and config.qk_norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.reshape(*part.shape[:-1], -1, config.head_width) for part in (q, k, v))
        if config.qk_norm and not config.qk_norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.update(k, v)
        mixed = attend(
            q,
            k,
            v,
            segments,
            start=None if cache is None else cache.start,
            causal=config.causal,
            window=window,
            scale=config.attention_scale,
            softcap=config.attn_logit_softcapping,
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
        self.fused = config.gated and config.fused_gate_up
        if self.fused:
            self.gate_up_proj = Linear(size, 2 * inner, bias=bias, **shared)
        else:
            self.gate_proj = nnx.data(Linear(size, inner, bias=bias, **shared) if config.gated else None)
            self.up_proj = Linear(size, inner, bias=bias, **shared)
        self.down_proj = Linear(inner, size, bias=bias, **shared)

    def __call__(self, x: jax.Array, key: Key) -> jax.Array:
        keys, act = key_source(key), ACTIVATIONS[self.activation]
        if self.fused:
            gate, up = jnp.split(self.gate_up_proj(x, next(keys)), 2, axis=-1)
            inner = act(gate) * up
        elif self.gate_proj is None:
            inner = act(self.up_proj(x, next(keys)))
        else:
            up, gate = project(x, (self.up_proj, self.gate_proj), keys)
            inner = act(gate) * up
        inner = constrain(inner, "batch", "sequence", "features")
        return self.down_proj(inner, next(keys))


class Block(nnx.Module):
    """One layer, or a stack of layers; only a slice of a stack can be called."""

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.config = config

        def norm(*placements: str) -> Any:
            has = config.norm_placement in placements
            return nnx.data(NORMS[config.norm](config.hidden_size, config.norm_eps, stack) if has else None)

        self.input_norm = norm("pre", "both")
        self.attention = Attention(config, rngs, stack)
        self.attention_output_norm = norm("post", "both")
        self.post_norm = norm("pre", "both")
        self.mlp: Any = config.feed_forward(rngs, stack)
        self.mlp_output_norm = norm("post", "both")

    def __call__(
        self,
        x: jax.Array,
        segments: Any,
        rope: Tables | None,
        execution: Execution,
        key: Key,
        window: int | None = None,
        cache: LayerCache | None = None,
    ) -> jax.Array:
        keys = key_source(key)
        mixed = self.attention(_normed(x, self.input_norm), segments, rope, execution, next(keys), window, cache)
        between = x + self._residual(mixed, self.attention_output_norm, next(keys))
        source = x if self.config.parallel_residual else between
        inner = self.mlp(_normed(source, self.post_norm), next(keys))
        x = between + self._residual(inner, self.mlp_output_norm, next(keys))
        return constrain(x, "batch", "sequence", None)

    def _residual(self, output: jax.Array, norm: Any, key: Key) -> jax.Array:
        """What attention or feed-forward add to the residual stream."""
        added = dropout(_normed(output, norm), self.config.hidden_dropout, key)
        return added if self.config.residual_multiplier == 1.0 else added * self.config.residual_multiplier


def _normed(x: jax.Array, norm: Callable[[jax.Array], jax.Array] | None) -> jax.Array:
    return x if norm is None else norm(x)


def run_layers(
    layers: Block,
    x: jax.Array,
    segments: Any,
    ropes: Sequence[Tables] | None,
    execution: Execution,
    key: Key,
    cache: KVCache | None = None,
    probe: RouterProbe | None = None,
) -> jax.Array:
    """Apply all layers of the stack. `ropes` are the rotary tables that the kinds of layers name.

    With a `cache`, the tokens are added to it; a `probe` collects what the routers did.
    """

    # The arrays of the cache are carried along, not scanned over: so each layer updates its part of them in place.
    def call(block: Any, carry: tuple[jax.Array, Any], kind: LayerKind, number: jax.Array, key: Key) -> tuple[Any, Any]:
        x, stored = carry
        rope = None if ropes is None or kind.rope is None else ropes[kind.rope]
        view = None if cache is None else LayerCache(stored, number, cache)
        x = block(x, segments, rope, execution, key, kind.window, view)
        found = None if probe is None else probe.reduce(*block.mlp.routing)
        return (x, None if view is None else view.arrays), found

    carry = x, None if cache is None else (cache.keys, cache.values)
    (x, stored), found = run_stack(layers, carry, call, layers.config.layer_kinds, execution, key)
    if cache is not None:
        cache.keys, cache.values = stored
    if probe is not None:
        probe.found = found
    return x


def run_stack(
    layers: nnx.Module,
    x: Any,
    call: Callable[[Any, Any, LayerKind, jax.Array, Key], tuple[Any, Any]],
    kinds: Sequence[LayerKind],
    execution: Execution,
    key: Key,
) -> tuple[Any, Any]:
    """Apply ``call(layer, x, kind, number, key) -> (x, output)`` to each layer of a stack in a scan.

    Each layer has its own key. Outputs are stacked.
    """
    graph, weights = nnx.split(layers)

    def one(x: Any, layer: tuple[Any, jax.Array], kind: LayerKind) -> tuple[Any, Any]:
        weights, number = layer
        own = None if key is None else jax.random.fold_in(key, number)
        return call(nnx.merge(graph, weights), x, kind, number, own)

    if execution.remat is not None:
        # A loop already prevents common subexpression elimination; the extra barrier would only cost time.
        loops = execution.unroll == 1 and all(count > 1 for _, count in layer_groups(kinds))
        one = jax.checkpoint(one, policy=execution.remat, prevent_cse=not loops, static_argnums=2)
    return scan_layers(one, x, (weights, jnp.arange(len(kinds))), kinds, execution.unroll)


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
