"""The KV cache: the keys and values of tokens that a model has read, so that each further token costs one forward step.

A model reads its prompt with an empty cache by the code that trains, and from then on attends to what is in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from trainformer.models.jax.layers import constrain


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "segments", "length"], meta_fields=[])
@dataclass
class KVCache:
    """A pytree of fixed shape. A model that reads tokens replaces the arrays of the object by updated ones.

    `keys` and `values` are (layers, rows, tokens, heads, head_dim), `segments` (rows, tokens) is 0 for padding.
    """

    keys: jax.Array
    values: jax.Array
    segments: jax.Array
    length: Any = 0  # tokens so far; the number 0 while it is empty

    @classmethod
    def empty(cls, config: Any, rows: int, tokens: int, dtype: Any) -> Self:
        """A cache for so many tokens of each row, of a model with this `BlockConfig`."""
        shape = (config.num_hidden_layers, rows, tokens, config.kv_heads, config.head_width)
        zeros = constrain(jnp.zeros(shape, dtype), None, "batch", None, "heads", None)
        return cls(zeros, zeros, jnp.ones((rows, tokens), jnp.int32))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was read yet, which is known when a function is traced."""
        return isinstance(self.length, int) and self.length == 0

    def begin(self, segments: jax.Array | None) -> jax.Array | None:
        """The segments to attend in: those of the tokens that are read first, or else of the whole cache."""
        if not self.is_empty:
            return self.segments
        if segments is not None:
            self.segments = self.segments.at[:, : segments.shape[1]].set(segments)
        return segments


class LayerCache:
    """The cache as one layer sees it. `start` is where its new tokens are; None if they are the first."""

    def __init__(self, arrays: tuple[jax.Array, jax.Array], layer: jax.Array, cache: KVCache) -> None:
        self.arrays: tuple[jax.Array, ...] = arrays
        self.start = None if cache.is_empty else cache.length
        self._layer = layer

    def update(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Store keys and values of new tokens. Returns those to attend to."""
        start = 0 if self.start is None else self.start
        self.arrays = tuple(
            jax.lax.dynamic_update_slice(stored, new[None].astype(stored.dtype), (self._layer, 0, start, 0, 0))
            for stored, new in zip(self.arrays, (k, v), strict=True)
        )
        if self.start is None:
            return k, v
        keys, values = (jax.lax.dynamic_index_in_dim(a, self._layer, keepdims=False) for a in self.arrays)
        return keys, values
