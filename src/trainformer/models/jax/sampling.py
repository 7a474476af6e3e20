"""Sampling of tokens: the filters of transformers' `generate`, and draws by the random numbers of each row.

A draw is the inverse of the cumulative distribution at one random number, as on torch. So what is sampled depends on
the logits and the seed of a row, not on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from trainformer.models.generation import SamplingOptions


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "min_p", "repetition_penalty"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Sampler:
    """Sampling options as a pytree: None for what is not used, scalars for what is, so that no value is compiled in."""

    temperature: jax.Array | None = None  # None: greedy
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None
    repetition_penalty: jax.Array | None = None

    @classmethod
    def of(cls, options: SamplingOptions) -> Self:
        """A sampler for the options; those that change nothing are left out."""
        used: dict[str, tuple[Any, Any]] = {"repetition_penalty": (options.repetition_penalty, 1.0)}
        if options.temperature > 0:
            used |= {"temperature": (options.temperature, None), "top_k": (options.top_k, None)}
            used |= {"top_p": (options.top_p, 1.0), "min_p": (options.min_p or None, None)}
        kinds = {"top_k": jnp.int32}
        return cls(
            **{
                name: jnp.asarray(value, kinds.get(name, jnp.float32))
                for name, (value, off) in used.items()
                if value is not None and value != off
            }
        )

    def penalized(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Logits with the repetition penalty on the tokens in `seen` (rows, vocabulary)."""
        if self.repetition_penalty is None:
            return logits
        assert seen is not None
        lowered = jnp.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
        return jnp.where(seen, lowered, logits)

    def scaled(self, logits: jax.Array) -> jax.Array:
        """Logits divided by the temperature."""
        return logits if self.temperature is None else logits / self.temperature

    def filtered(self, scores: jax.Array) -> jax.Array:
        """Scaled logits with -inf for the tokens that top_k, top_p and min_p exclude, in this order."""
        if self.top_k is not None or self.top_p is not None:
            ranked = jnp.sort(scores, axis=-1, descending=True)
            if self.top_k is not None:
                last = jnp.minimum(self.top_k, scores.shape[-1]) - 1
                least = jnp.take(ranked, last, axis=-1)[..., None]
                scores = jnp.where(scores < least, -jnp.inf, scores)
                ranked = jnp.where(ranked < least, -jnp.inf, ranked)
            if self.top_p is not None:
                weights = jax.nn.softmax(ranked, axis=-1)
                kept = jnp.cumsum(weights, axis=-1) - weights < self.top_p
                least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
                scores = jnp.where(scores < least, -jnp.inf, scores)
        if self.min_p is not None:
            largest = jnp.max(scores, axis=-1, keepdims=True)
            scores = jnp.where(scores < largest + jnp.log(self.min_p), -jnp.inf, scores)
        return scores

    def choose(self, logits: jax.Array, numbers: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """One token per row (rows,) of logits (rows, vocabulary), by random numbers (rows,) in [0, 1)."""
        logits = self.penalized(logits, seen)
        if self.temperature is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        weights = jax.nn.softmax(self.filtered(self.scaled(logits)), axis=-1)
        cumulative = jnp.cumsum(weights, axis=-1)
        # Rounding can make the sums grow where the weight is 0, so such tokens are excluded explicitly.
        possible = weights > 0
        reached = possible & (cumulative > numbers[:, None] * cumulative[:, -1:])
        last = weights.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
        return jnp.where(reached.any(-1), jnp.argmax(reached, axis=-1), last).astype(jnp.int32)

    def log_probs(self, logits: jax.Array, tokens: jax.Array) -> jax.Array:
        """Log probabilities (rows,) of tokens at the temperature, whatever the filters exclude."""
        logs = jax.nn.log_softmax(self.scaled(logits), axis=-1)
        return jnp.take_along_axis(logs, tokens[:, None], axis=-1)[:, 0]
