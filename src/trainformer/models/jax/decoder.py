"""One decoder for all families (Llama, Qwen, Gemma, Phi-3, OLMo 2, GPT-2, ...), distinguished by configuration.

It has no state besides its weights: the PRNG key for dropout and the KV cache are arguments. HF folders are in
`huggingface`, generation is in `generation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.attention import positions_of, segments_of
from trainformer.models.jax.block import BLOCK_RULES, Block, BlockConfig, Model, RouterProbe, Rules, run_layers
from trainformer.models.jax.cache import KVCache
from trainformer.models.jax.layers import NORMS, Embedding, Key, Linear, constrain, dropout, key_source
from trainformer.models.jax.rope import Rope
from trainformer.models.jax.scan import LayerKind


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(BlockConfig):
    """Configuration of a decoder. ``rope=None`` means learned positions. `source` is the original ``config.json`` text.

    `local_rope` is used by layers with a sliding window instead of `rope`. `no_rope_layers` has a 0 for each layer
    without positions and a 1 for the others, as in HF. `embedding_scale` multiplies the embeddings, `logits_scaling`
    divides the logits.

    >>> DecoderConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4).head_width
    8
    """

    vocab_size: int
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    rope: Rope | None = field(default_factory=Rope)
    local_rope: Rope | None = None
    no_rope_layers: tuple[int, ...] | None = None
    tie_word_embeddings: bool = False
    embedding_dropout: float = 0.0
    embedding_scale: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcapping: float | None = None
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for rope in self.ropes:
            rope.check(self.head_width)
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            what = f"no_rope_layers of {self.num_hidden_layers} layers"
            raise BadArgument(expected(what, list(self.no_rope_layers)))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings that `LayerKind.rope` indexes."""
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        kinds = super().layer_kinds
        if self.local_rope is not None:
            kinds = tuple(kind._replace(rope=int(kind.window is not None)) for kind in kinds)
        if self.no_rope_layers is not None:
            kinds = tuple(
                kind if used else kind._replace(rope=None)
                for kind, used in zip(kinds, self.no_rope_layers, strict=False)
            )
        return kinds


class Decoder(Model):
    """``model(input_ids)`` returns logits (batch, sequence, vocabulary).

    `attention_mask` marks padding (0) on either side; right-padded batches need none, since attention is causal
    (except with longrope).
    `segment_ids` separates packed texts; positions restart in each. Dropout is active only with
    ``deterministic=False`` and a `key`. A `cache` holds the tokens so far; those that follow need their `position_ids`.
    """

    partition_rules: Rules = (
        *BLOCK_RULES,
        (r"embed_tokens/embedding$", ("tp", "fsdp")),
        (r"embed_positions/embedding$", (None, "fsdp")),
        (r"lm_head/kernel$", ("fsdp", "tp")),
        (r"lm_head/lora_a$", ("fsdp", None)),
        (r"lm_head/lora_b$", (None, "tp")),
        (r".*", ()),
    )

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config)
        scale = config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, scale=scale)
        self.embed_positions = nnx.data(
            None
            if config.rope
            else Embedding(config.max_position_embeddings, config.hidden_size, rngs=rngs, scale=scale, axis=None)
        )
        self.layers = Block(config, rngs, (config.num_hidden_layers,))
        self.norm = NORMS[config.norm](config.hidden_size, config.norm_eps)
        self.lm_head = nnx.data(
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, rngs=rngs, bias=False, scale=scale)
        )

    @property
    def needs_attention_mask(self) -> bool:
        """Whether padding on the right must be marked as well: longrope depends on the length of texts."""
        return any(rope.kind == "longrope" for rope in self.config.ropes)

    def __call__(self, input_ids: jax.Array, *inputs: Any, **options: Any) -> jax.Array:
        """Logits. Arguments as for `hidden_states`."""
        return self.head(self.hidden_states(input_ids, *inputs, **options))

    def hidden_states(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        deterministic: bool = True,
        key: Key = None,
        cache: KVCache | None = None,
        probe: RouterProbe | None = None,
    ) -> jax.Array:
        """The input of the head, after the last norm: (batch, sequence, hidden_size).

        A `probe` observes the routers of a mixture of experts.
        """
        config = self.config
        self._check(input_ids, consecutive=position_ids is None and segment_ids is None)
        keys = key_source(None if deterministic else key)
        if position_ids is None:
            position_ids = positions_of(input_ids.shape, attention_mask, segment_ids)
        x = self.embed_tokens(input_ids)
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        x = constrain(dropout(x, config.embedding_dropout, next(keys)), "batch", "sequence", None)
        tables = [rope.tables(position_ids, config.head_width) for rope in config.ropes] or None
        segments = segments_of(attention_mask, segment_ids)
        if cache is not None:
            segments = cache.begin(segments)
        x = run_layers(self.layers, x, segments, tables, self.execution, next(keys), cache, probe)
        if cache is not None:
            cache.length += input_ids.shape[1]
        return self.norm(x)

    def head(self, states: jax.Array) -> jax.Array:
        """Logits in the dtype of the hidden states; cast them before a softmax."""
        logits = self.embed_tokens.logits(states) if self.lm_head is None else self.lm_head(states)
        if self.config.logits_scaling != 1.0:
            logits = logits / self.config.logits_scaling
        if self.config.final_logit_softcapping is not None:
            logits = self.config.final_logit_softcapping * jnp.tanh(logits / self.config.final_logit_softcapping)
        return constrain(logits, "batch", "sequence", "features")

    def _check(self, input_ids: jax.Array, consecutive: bool) -> None:
        if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
            received = f"{input_ids.dtype}{list(input_ids.shape)}"
            raise BadArgument(expected("integer input_ids (batch, sequence)", received))
        limit = self.config.max_position_embeddings
        # Beyond the embedding table jax returns NaN. Positions that restart may still be inside it.
        if consecutive and self.embed_positions is not None and input_ids.shape[1] > limit:
            do = "Truncate the texts, or pack them with segment_ids."
            what = f"at most {limit} tokens, the number of learned positions"
            raise BadArgument(expected(what, input_ids.shape[1], do))
