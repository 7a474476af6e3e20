"""T5: the encoder-decoder of T5 1.0 and 1.1 and mT5, with relative position biases, and greedy generation.

Encoder and decoder are stacks of pre-norm layers whose weights are stacked, as in the decoder. Attention is not scaled;
its position bias, one table per stack, is computed once for all layers. XLA runs it: cuDNN has no such bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.block import BLOCK_RULES, Execution, Model, Rules, run_stack
from trainformer.models.jax.layers import (
    ACTIVATIONS,
    Embedding,
    Key,
    Linear,
    RMSNorm,
    check_activation,
    constrain,
    dropout,
    key_source,
)
from trainformer.models.jax.scan import LayerKind


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """Configuration of a T5. T5 1.1 and mT5 have ``gated=True``, ``hidden_act="gelu_new"``, and no scaled outputs.

    `num_decoder_layers` defaults to `num_hidden_layers`. `scale_outputs` divides the input of the output layer by the
    square root of its width. `source` is the original ``config.json`` text.

    >>> T5Config(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4).depth
    2
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_decoder_layers: int | None = None
    head_dim: int = 64
    hidden_act: str = "relu"
    gated: bool = False
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    scale_outputs: bool = True
    initializer_factor: float = 1.0
    pad_token_id: int = 0
    eos_token_id: int = 1
    decoder_start_token_id: int = 0
    model_type: str = "t5"
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_activation(self.hidden_act)
        if self.relative_attention_num_buckets < 4 or self.relative_attention_num_buckets % 2:
            what = "relative_attention_num_buckets to be an even number of at least 4"
            raise BadArgument(expected(what, self.relative_attention_num_buckets))

    @property
    def depth(self) -> int:
        """The number of decoder layers."""
        return self.num_decoder_layers or self.num_hidden_layers


class Context(NamedTuple):
    """What all layers of a stack share: position bias (1, heads, queries, keys), which keys are visible, and for a
    decoder the encoder's states with the mask of their padding.
    """

    bias: jax.Array
    visible: jax.Array | None
    memory: jax.Array | None = None
    memory_visible: jax.Array | None = None


class T5Attention(nnx.Module):
    def __init__(self, config: T5Config, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.width, self.rate = config.head_dim, config.dropout_rate
        size, inner, factor = (
            config.hidden_size,
            config.num_attention_heads * config.head_dim,
            config.initializer_factor,
        )
        shared: dict[str, Any] = {"rngs": rngs, "bias": False, "stack": stack}
        self.q_proj = Linear(size, inner, scale=factor * (size * config.head_dim) ** -0.5, **shared)
        self.k_proj = Linear(size, inner, scale=factor * size**-0.5, **shared)
        self.v_proj = Linear(size, inner, scale=factor * size**-0.5, **shared)
        self.o_proj = Linear(inner, size, scale=factor * inner**-0.5, **shared)

    def __call__(self, x: jax.Array, memory: jax.Array, bias: Any, visible: Any, key: Key) -> jax.Array:
        keys = key_source(key)
        q, k, v = self.q_proj(x, next(keys)), self.k_proj(memory, next(keys)), self.v_proj(memory, next(keys))
        q, k, v = (part.reshape(*part.shape[:-1], -1, self.width) for part in (q, k, v))
        q = constrain(q, "batch", "sequence", "heads", None)
        k, v = constrain(k, "batch", None, "heads", None), constrain(v, "batch", None, "heads", None)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        scores = scores if bias is None else scores + bias
        if visible is not None:
            scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        shares = dropout(jax.nn.softmax(scores, axis=-1).astype(v.dtype), self.rate, next(keys))
        mixed = jnp.einsum("bnts,bsnh->btnh", shares, v)
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1), next(keys))


class T5FeedForward(nnx.Module):
    def __init__(self, config: T5Config, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.act, self.rate = config.hidden_act, config.dropout_rate
        size, inner, factor = config.hidden_size, config.intermediate_size, config.initializer_factor
        shared: dict[str, Any] = {"rngs": rngs, "bias": False, "stack": stack}
        self.gate_proj = nnx.data(Linear(size, inner, scale=factor * size**-0.5, **shared) if config.gated else None)
        self.up_proj = Linear(size, inner, scale=factor * size**-0.5, **shared)
        self.down_proj = Linear(inner, size, scale=factor * inner**-0.5, **shared)

    def __call__(self, x: jax.Array, key: Key) -> jax.Array:
        keys, act = key_source(key), ACTIVATIONS[self.act]
        up = self.up_proj(x, next(keys))
        inner = act(up) if self.gate_proj is None else act(self.gate_proj(x, next(keys))) * up
        inner = dropout(constrain(inner, "batch", "sequence", "features"), self.rate, next(keys))
        return self.down_proj(inner, next(keys))


class T5Block(nnx.Module):
    """One layer, or a stack of layers; only a slice of a stack can be called. `cross`: with cross-attention."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs, stack: tuple[int, ...], *, cross: bool) -> None:
        self.rate = config.dropout_rate
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, stack)
        self.attention = T5Attention(config, rngs, stack)
        self.cross_norm = nnx.data(RMSNorm(config.hidden_size, config.norm_eps, stack) if cross else None)
        self.cross_attention = nnx.data(T5Attention(config, rngs, stack) if cross else None)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, stack)
        self.mlp = T5FeedForward(config, rngs, stack)

    def __call__(self, x: jax.Array, context: Context, key: Key) -> jax.Array:
        keys, normed = key_source(key), self.attention_norm(x)
        mixed = self.attention(normed, normed, context.bias, context.visible, next(keys))
        x = x + dropout(mixed, self.rate, next(keys))
        if self.cross_attention is not None and self.cross_norm is not None:
            memory, visible = context.memory, context.memory_visible
            assert memory is not None, "of a decoder"
            mixed = self.cross_attention(self.cross_norm(x), memory, None, visible, next(keys))
            x = x + dropout(mixed, self.rate, next(keys))
        x = x + dropout(self.mlp(self.mlp_norm(x), next(keys)), self.rate, next(keys))
        return constrain(x, "batch", "sequence", None)


class T5Stack(nnx.Module):
    """The encoder or the decoder: relative position biases, layers, and the norm after them."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs, *, is_decoder: bool) -> None:
        self.config, self.is_decoder = config, is_decoder
        self.depth = config.depth if is_decoder else config.num_hidden_layers
        scale = config.initializer_factor * config.hidden_size**-0.5
        shape = (config.relative_attention_num_buckets, config.num_attention_heads)
        self.relative_bias = nnx.Param(scale * jax.random.normal(rngs.params(), shape))
        self.layers = T5Block(config, rngs, (self.depth,), cross=is_decoder)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        execution: Execution,
        key: Key,
        memory: jax.Array | None = None,
    ) -> jax.Array:
        """`mask` marks padding (0) in the input of the encoder, or in its output if this is the decoder."""
        keys, rate, length = key_source(key), self.config.dropout_rate, x.shape[1]
        keys_visible = None if mask is None else mask.astype(jnp.bool_)[:, None, None, :]
        visible = jnp.tril(jnp.ones((length, length), jnp.bool_)) if self.is_decoder else keys_visible
        x = constrain(dropout(x, rate, next(keys)), "batch", "sequence", None)
        context = Context(self.position_bias(length), visible, memory, keys_visible)

        def call(block: T5Block, x: jax.Array, kind: Any, number: Any, key: Key) -> tuple[jax.Array, None]:
            return block(x, context, key), None

        x, _ = run_stack(self.layers, x, call, (LayerKind(),) * self.depth, execution, next(keys))
        return dropout(self.norm(x), rate, next(keys))

    def position_bias(self, length: int) -> jax.Array:
        """The bias of attention by relative position: (1, heads, length, length) in float32."""
        config = self.config
        options = config.relative_attention_num_buckets, config.relative_attention_max_distance
        buckets = relative_buckets(length, not self.is_decoder, *options)
        bias = jnp.moveaxis(self.relative_bias[...][buckets], -1, 0)[None].astype(jnp.float32)
        return constrain(bias, None, "heads", "sequence", None)


def relative_buckets(length: int, bidirectional: bool, buckets: int, longest: int) -> np.ndarray:
    """The bucket of each pair of positions (queries, keys): exact for short distances, logarithmic up to `longest`.

    >>> relative_buckets(4, False, 4, 8)[3].tolist(), relative_buckets(3, True, 4, 8)[1].tolist()
    ([2, 2, 1, 0], [1, 0, 3])
    """
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    found = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        found += np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    position = np.log(np.maximum(distance, 1) / exact) / math.log(longest / exact) * (buckets - exact)
    # A distance on the border of two buckets is in the upper one, whatever the rounding of the logarithm.
    large = np.minimum(exact + np.floor(position + 1e-6).astype(np.int64), buckets - 1)
    return found + np.where(distance < exact, distance, large)


class T5(Model):
    """``model(input_ids, attention_mask, decoder_input_ids)`` returns logits (batch, target, vocabulary).

    `attention_mask` marks padding (0) of the input. `decoder_input_ids` are the target shifted to the right
    (`shift_right`); it needs no mask if its padding is on the right. Dropout is active only with
    ``deterministic=False`` and a `key`.

    >>> from trainformer.models.jax import model_from_config
    >>> model = model_from_config(T5Config(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4, head_dim=8))
    >>> ids = jnp.ones((2, 5), jnp.int32)
    >>> model(ids, decoder_input_ids=model.shift_right(ids[:, :3])).shape
    (2, 3, 96)
    """

    partition_rules: Rules = (
        *BLOCK_RULES,
        (r"shared/embedding$", ("tp", "fsdp")),
        (r"lm_head/kernel$", ("fsdp", "tp")),
        (r"lm_head/lora_a$", ("fsdp", None)),
        (r"lm_head/lora_b$", (None, "tp")),
        (r".*", ()),
    )
    config: T5Config

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        size, factor = config.hidden_size, config.initializer_factor
        self.shared = Embedding(config.vocab_size, size, rngs=rngs, scale=factor)
        self.encoder = T5Stack(config, rngs, is_decoder=False)
        self.decoder = T5Stack(config, rngs, is_decoder=True)
        is_tied = config.tie_word_embeddings
        self.lm_head = nnx.data(
            None if is_tied else Linear(size, config.vocab_size, rngs=rngs, bias=False, scale=factor * size**-0.5)
        )

    def __call__(self, input_ids: jax.Array, *inputs: Any, **options: Any) -> jax.Array:
        """Logits. Arguments as for `hidden_states`."""
        return self.head(self.hidden_states(input_ids, *inputs, **options))

    def hidden_states(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        decoder_input_ids: jax.Array | None = None,
        *,
        deterministic: bool = True,
        key: Key = None,
    ) -> jax.Array:
        """The output of the decoder, after its norm: (batch, target, hidden_size)."""
        if decoder_input_ids is None:
            do = "Pass model.shift_right(labels)."
            raise BadArgument(expected("decoder_input_ids", None, do))
        keys = key_source(None if deterministic else key)
        memory = self.encode(input_ids, attention_mask, key=next(keys))
        return self.decode(decoder_input_ids, memory, attention_mask, key=next(keys))

    def encode(self, input_ids: jax.Array, attention_mask: jax.Array | None = None, *, key: Key = None) -> jax.Array:
        """The output of the encoder (batch, sequence, hidden_size); with a key, dropout is active."""
        _check_ids("input_ids", input_ids)
        return self.encoder(self.shared(input_ids), attention_mask, self.execution, key)

    def decode(
        self, input_ids: jax.Array, memory: jax.Array, attention_mask: jax.Array | None = None, *, key: Key = None
    ) -> jax.Array:
        """The output of the decoder on the output of the encoder, whose padding `attention_mask` marks."""
        _check_ids("decoder_input_ids", input_ids)
        return self.decoder(self.shared(input_ids), attention_mask, self.execution, key, memory)

    def head(self, states: jax.Array) -> jax.Array:
        """Logits in the dtype of the hidden states; cast them before a softmax."""
        if self.config.scale_outputs:
            states = states * jnp.asarray(self.config.hidden_size**-0.5, states.dtype)
        logits = self.shared.logits(states) if self.lm_head is None else self.lm_head(states)
        return constrain(logits, "batch", "sequence", "features")

    def shift_right(self, labels: jax.Array) -> jax.Array:
        """The decoder's input for labels: the start token before them, and padding where they are -100."""
        ids = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=self.config.decoder_start_token_id)
        return jnp.where(ids < 0, self.config.pad_token_id, ids)

    def generate(self, input_ids: jax.Array, max_new_tokens: int, attention_mask: jax.Array | None = None) -> jax.Array:
        """Greedy continuations (batch, max_new_tokens), padded after the end token; the encoder runs once.

        Without a KV cache, each token costs a pass of the decoder: for evaluations, not for serving.
        """
        if max_new_tokens < 1:
            raise BadArgument(expected("max_new_tokens of at least 1", max_new_tokens))
        graph, state = nnx.split(self)
        mask = jnp.ones_like(input_ids) if attention_mask is None else jnp.asarray(attention_mask)
        return _generate(graph, state, jnp.asarray(input_ids), mask, max_new_tokens)


@partial(jax.jit, static_argnums=(0, 4))
def _generate(graph: Any, state: Any, ids: jax.Array, mask: jax.Array, count: int) -> jax.Array:
    model = nnx.merge(graph, state)
    config, memory = model.config, model.encode(ids, mask)
    start = jnp.full((ids.shape[0], count + 1), config.pad_token_id, ids.dtype)
    start = start.at[:, 0].set(config.decoder_start_token_id)

    def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        number, _, ended = carry
        return (number < count) & ~jnp.all(ended)

    def one(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        number, tokens, ended = carry
        last = jax.lax.dynamic_slice_in_dim(model.decode(tokens, memory, mask), number, 1, axis=1)
        chosen = jnp.argmax(model.head(last)[:, 0], axis=-1).astype(ids.dtype)
        chosen = jnp.where(ended, config.pad_token_id, chosen)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, chosen[:, None], number + 1, axis=1)
        return number + 1, tokens, ended | (chosen == config.eos_token_id)

    first = jnp.zeros((), jnp.int32), start, jnp.zeros(ids.shape[0], jnp.bool_)
    return jax.lax.while_loop(unfinished, one, first)[1][:, 1:]


def _check_ids(name: str, ids: jax.Array) -> None:
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise BadArgument(expected(f"integer {name} (batch, sequence)", f"{ids.dtype}{list(ids.shape)}"))
