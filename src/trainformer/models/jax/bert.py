"""Bidirectional encoders: BERT, RoBERTa and DistilBERT, distinguished by configuration, with one of three heads.

Embeddings, blocks and heads. The blocks are post-norm: they share attention and feed-forward with the decoder, and
normalise after each residual connection. Configs and weight names of transformers are in `families.bert`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.models.jax.attention import positions_of, segments_of
from trainformer.models.jax.block import (
    BLOCK_RULES,
    Attention,
    BlockConfig,
    Execution,
    FeedForward,
    Model,
    Rules,
    run_stack,
)
from trainformer.models.jax.layers import (
    ACTIVATIONS,
    Embedding,
    Key,
    LayerNorm,
    Linear,
    constrain,
    dropout,
    key_source,
)

HEADS = ("masked_lm", "sequence_classification", "token_classification")


@dataclass(frozen=True, kw_only=True)
class BertConfig(BlockConfig):
    """Configuration of an encoder with its `head`: masked_lm, sequence_classification or token_classification.

    `max_position_embeddings` is the length of the longest sequence; RoBERTa has `position_offset` further positions.
    ``type_vocab_size=0`` means no token types. `source` is the original ``config.json`` text.

    >>> BertConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4).head
    'masked_lm'
    """

    vocab_size: int
    hidden_act: str = "gelu"
    norm: str = "layer"
    norm_eps: float = 1e-12
    gated: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    causal: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    max_position_embeddings: int = 512
    position_offset: int = 0
    type_vocab_size: int = 2
    head: str = "masked_lm"
    num_labels: int = 2
    label_names: tuple[str, ...] | None = None
    problem_type: str | None = None  # of transformers, for sequence_classification
    classifier_dropout: float | None = None  # None: hidden_dropout
    model_type: str = "bert"
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("head", self.head, HEADS)
        if self.label_names is not None and len(self.label_names) != self.num_labels:
            raise BadArgument(expected(f"{self.num_labels} label_names, one per class", list(self.label_names)))


class PostNormBlock(nnx.Module):
    """One layer, or a stack of layers; only a slice of a stack can be called."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs, stack: tuple[int, ...]) -> None:
        self.rate = config.hidden_dropout
        self.attention_rate = 0.0 if config.model_type == "distilbert" else config.hidden_dropout
        self.attention = Attention(config, rngs, stack)
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_eps, stack)
        self.mlp = FeedForward(config, rngs, stack)
        self.output_norm = LayerNorm(config.hidden_size, config.norm_eps, stack)

    def __call__(self, x: jax.Array, segments: Any, execution: Execution, key: Key) -> jax.Array:
        keys = key_source(key)
        mixed = self.attention(x, segments, None, execution, next(keys))
        x = self.attention_norm(x + dropout(mixed, self.attention_rate, next(keys)))
        x = self.output_norm(x + dropout(self.mlp(x, next(keys)), self.rate, next(keys)))
        return constrain(x, "batch", "sequence", None)


class MaskedLMHead(nnx.Module):
    """A layer with a norm before the output layer, whose weights are those of the token embedding."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.act = "gelu" if config.model_type == "roberta" else config.hidden_act
        self.dense = Linear(size, size, rngs=rngs, bias=True, scale=config.initializer_range)
        self.norm = LayerNorm(size, config.norm_eps)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(self, states: jax.Array, embedding: Embedding) -> jax.Array:
        states = self.norm(ACTIVATIONS[self.act](self.dense(states)))
        # Without this constraint XLA computes a wrong gradient on meshes with dp, fsdp and tp.
        logits = embedding.logits(constrain(states, "batch", "sequence", None))
        return constrain(logits + self.bias[...].astype(logits.dtype), "batch", "sequence", "features")


class ClassificationHead(nnx.Module):
    """Classifies sequences by their first token, or each token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        size, scale = config.hidden_size, config.initializer_range
        rate = config.classifier_dropout
        self.kind = config.model_type
        self.rate = config.hidden_dropout if rate is None else rate
        is_sequence = config.head == "sequence_classification"
        self.pooler = nnx.data(Linear(size, size, rngs=rngs, bias=True, scale=scale) if is_sequence else None)
        self.classifier = Linear(size, config.num_labels, rngs=rngs, bias=True, scale=scale)

    def __call__(self, states: jax.Array, key: Key) -> jax.Array:
        keys = key_source(key)
        if self.pooler is not None:
            first = states[:, 0]
            if self.kind == "roberta":
                first = dropout(first, self.rate, next(keys))
            pooled = self.pooler(first, next(keys))
            states = jax.nn.relu(pooled) if self.kind == "distilbert" else jnp.tanh(pooled)
        return self.classifier(dropout(states, self.rate, next(keys)), next(keys))


class Bert(Model):
    """``model(input_ids, attention_mask)`` returns logits: (batch, sequence, vocabulary) of a masked language model,
    (batch, labels) of sequences, or (batch, sequence, labels) of tokens.

    `attention_mask` marks padding (0), `segment_ids` separates packed texts; positions restart in each. Positions count
    from 0. Dropout is active only with ``deterministic=False`` and a `key`.

    >>> from trainformer.models.jax import model_from_config
    >>> config = BertConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4, head="sequence_classification", num_labels=3)
    >>> model_from_config(config)(jnp.ones((2, 8), jnp.int32)).shape
    (2, 3)
    """

    partition_rules: Rules = (
        *BLOCK_RULES,
        (r"embed_tokens/embedding$", ("tp", "fsdp")),
        (r"embed_(positions|types)/embedding$", (None, "fsdp")),
        (r"output/(dense|pooler|classifier)/kernel$", ("fsdp", "tp")),
        (r".*", ()),
    )
    config: BertConfig

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config)
        size, scale = config.hidden_size, config.initializer_range
        positions = config.max_position_embeddings + config.position_offset
        self.embed_tokens = Embedding(config.vocab_size, size, rngs=rngs, scale=scale)
        self.embed_positions = Embedding(positions, size, rngs=rngs, scale=scale)
        types = config.type_vocab_size
        self.embed_types = nnx.data(Embedding(types, size, rngs=rngs, scale=scale) if types else None)
        self.embed_norm = LayerNorm(size, config.norm_eps)
        self.layers = PostNormBlock(config, rngs, (config.num_hidden_layers,))
        self.output: Any = (MaskedLMHead if config.head == "masked_lm" else ClassificationHead)(config, rngs)

    def __call__(
        self, input_ids: jax.Array, *inputs: Any, deterministic: bool = True, key: Key = None, **options: Any
    ) -> jax.Array:
        """Logits. Arguments as for `hidden_states`."""
        keys = key_source(None if deterministic else key)
        states = self.hidden_states(input_ids, *inputs, deterministic=deterministic, key=next(keys), **options)
        return self.head(states, next(keys))

    def hidden_states(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        deterministic: bool = True,
        key: Key = None,
    ) -> jax.Array:
        """The input of the head, after the last layer: (batch, sequence, hidden_size)."""
        config, keys = self.config, key_source(None if deterministic else key)
        self._check(input_ids, token_type_ids, consecutive=position_ids is None and segment_ids is None)
        if position_ids is None:
            # As in transformers: RoBERTa does not count padding, BERT and DistilBERT do.
            counted = attention_mask if config.model_type == "roberta" else None
            position_ids = positions_of(input_ids.shape, counted, segment_ids)
        x = self.embed_tokens(input_ids) + self.embed_positions(position_ids + config.position_offset)
        if self.embed_types is not None:
            x = x + self.embed_types(jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        x = dropout(self.embed_norm(x), config.hidden_dropout, next(keys))
        x = constrain(x, "batch", "sequence", None)
        segments = segments_of(attention_mask, segment_ids)

        def call(block: PostNormBlock, x: jax.Array, kind: Any, number: Any, key: Key) -> tuple[jax.Array, None]:
            return block(x, segments, self.execution, key), None

        return run_stack(self.layers, x, call, config.layer_kinds, self.execution, next(keys))[0]

    def head(self, states: jax.Array, key: Key = None) -> jax.Array:
        """Logits in the dtype of the hidden states; cast them before a softmax."""
        if isinstance(self.output, MaskedLMHead):
            return self.output(states, self.embed_tokens)
        return self.output(states, key)

    def _check(self, input_ids: jax.Array, token_type_ids: Any, consecutive: bool) -> None:
        if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
            received = f"{input_ids.dtype}{list(input_ids.shape)}"
            raise BadArgument(expected("integer input_ids (batch, sequence)", received))
        if token_type_ids is not None and self.embed_types is None:
            raise BadArgument(expected("no token_type_ids", token_type_ids.shape, "This model has no token types."))
        limit = self.config.max_position_embeddings
        # Beyond the embedding table jax returns NaN. Positions that restart may still be inside it.
        if consecutive and input_ids.shape[1] > limit:
            what = f"at most {limit} tokens, the number of positions"
            raise BadArgument(expected(what, input_ids.shape[1], "Truncate the texts."))
