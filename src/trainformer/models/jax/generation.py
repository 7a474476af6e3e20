"""Generation with a KV cache: batches of prompts of any lengths, greedy or sampled, compiled once per bucket of sizes.

Prompts are padded on the left. The numbers of rows, of prompt tokens and of new tokens are rounded up to powers of two,
so that few programs are compiled; the loop ends when all rows have. Neither padding nor the other rows of a batch
change what is generated for a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.models.generation import SamplingOptions, random_numbers
from trainformer.models.jax.cache import KVCache
from trainformer.models.jax.decoder import Decoder
from trainformer.models.jax.layers import axis_size, constrain
from trainformer.models.jax.sampling import Sampler

_MIN_TOKENS = 16  # of a bucket
_NO_TOKEN = -1


class Completions(NamedTuple):
    """Completions, as NumPy arrays: a row per prompt, and as many columns as tokens were asked for at most.

    `tokens` have `pad_id` after the end of a row, and `lengths` counts those before, with the stop token that ended it.
    `finished` tells which rows ended with one. `log_probs` are those of the tokens at the temperature, under the model
    itself: without filters and repetition penalty. They are 0 after the end.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    log_probs: np.ndarray

    def rows(self) -> list[list[int]]:
        """The tokens of each row, without padding."""
        return [row[:length].tolist() for row, length in zip(self.tokens, self.lengths, strict=True)]


def generate(
    model: Decoder,
    input_ids: Any,
    max_new_tokens: int | Sequence[int] = 64,
    attention_mask: Any = None,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    drawn: Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    dtype: Any = None,
) -> Completions:
    """Continue prompts: lists of tokens, or an array (rows, tokens), whose padding `attention_mask` marks with 0.

    Greedy, unless an option says otherwise: `temperature` (0: greedy; default: 1 with one of the filters), `top_k`,
    `top_p` and `min_p`, which are applied in this order. A row ends after one of `stop_ids`, or after `max_new_tokens`,
    a number or one per row. `seed` is a number, or one per row; `drawn` says how many random numbers of its seed a row
    has used before. `dtype` is that of the computation (default: that of the weights).

    >>> from trainformer.models.jax import DecoderConfig
    >>> config = DecoderConfig(
    ...     vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> model = Decoder(config, rngs=nnx.Rngs(0))
    >>> found = generate(model, [[5, 6, 7], [8]], max_new_tokens=4)
    >>> found.tokens.shape, found.lengths.tolist(), found.finished.tolist()
    ((2, 4), [4, 4], [False, False])
    """
    if not isinstance(model, Decoder):
        raise BadArgument(expected("a decoder of trainformer.models.jax", type(model).__name__))
    prompts = _prompts(input_ids, attention_mask)
    limits = _limits(model, prompts, max_new_tokens)
    if temperature is None:
        temperature = 1.0 if top_k is not None or top_p != 1 or min_p is not None else 0.0
    options = SamplingOptions(max(limits), temperature, top_k, top_p, min_p, repetition_penalty)
    shards = axis_size("dp") * axis_size("fsdp")
    rows = shards * bucket(-(-len(prompts) // shards))
    width, count = (bucket(max(sizes), _MIN_TOKENS) for sizes in (map(len, prompts), limits))
    inputs = _inputs(prompts, limits, rows, width)
    if options.temperature > 0:
        numbers = random_numbers(row_seeds(seed, len(prompts)), count, drawn)
        inputs["numbers"] = _fill(numbers, rows).astype(np.float32)
    inputs["stops"] = _fill(np.asarray(list(stop_ids), np.int32), bucket(len(stop_ids), 4), _NO_TOKEN)
    inputs["pad"] = np.int32(pad_id)
    graph, state = nnx.split(model)
    found = _generate(graph, state, inputs, Sampler.of(options), count, None if dtype is None else jnp.dtype(dtype))
    tokens, lengths, finished, log_probs = (np.asarray(array)[: len(prompts)] for array in found)
    return Completions(tokens[:, : max(limits)], lengths, finished, log_probs[:, : max(limits)])


def bucket(size: int, least: int = 1) -> int:
    """The power of two that a size is rounded up to.

    >>> bucket(1), bucket(5), bucket(16), bucket(3, least=16)
    (1, 8, 16, 16)
    """
    return max(least, 1 << max(0, size - 1).bit_length())


def row_seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """A seed per row: of one number and the index of the row, or those that were given.

    >>> row_seeds(3, 2)[0] == row_seeds(3, 1)[0], row_seeds([5, 6], 2)
    (True, [5, 6])
    """
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return [
            int(np.random.SeedSequence([int(seed) % 2**64, n]).generate_state(1, np.uint64)[0]) for n in range(count)
        ]
    if isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, str) and len(seed) == count:
        return [int(each) for each in seed]
    raise BadArgument(expected(f"seed to be an integer, or a list of {count} of them", seed))


# -- inputs ----------------------------------------------------------------------------------------------------------


def _prompts(input_ids: Any, attention_mask: Any) -> list[np.ndarray]:
    """The tokens of each prompt without padding."""
    if attention_mask is not None or hasattr(input_ids, "ndim"):
        ids = np.asarray(input_ids)
        mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
        if ids.ndim != 2 or mask.shape != ids.shape:
            what = "input_ids (rows, tokens) and an attention_mask of the same shape"
            raise BadArgument(expected(what, f"{ids.shape} and {mask.shape}"))
        rows = [row[kept] for row, kept in zip(ids, mask, strict=True)]
    else:
        rows = [np.asarray(row) for row in input_ids]
    if not rows or not all(row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in rows):
        do = "Pass lists of tokens, or an array with an attention_mask."
        raise BadArgument(expected("prompts of at least one integer token each", input_ids, do))
    return rows


def _limits(model: Decoder, prompts: list[np.ndarray], max_new_tokens: int | Sequence[int]) -> list[int]:
    """The most new tokens of each prompt."""
    is_one = isinstance(max_new_tokens, (int, np.integer))
    limits: list[Any] = [max_new_tokens] * len(prompts) if is_one else list(max_new_tokens)  # type: ignore[arg-type]
    if len(limits) != len(prompts):
        raise BadArgument(expected(f"max_new_tokens to be a number, or {len(prompts)} of them", limits))
    for limit in limits:
        check_count("max_new_tokens", int(limit) if isinstance(limit, np.integer) else limit)
    positions = model.config.max_position_embeddings
    longest = max(len(row) + limit for row, limit in zip(prompts, limits, strict=True))
    if model.embed_positions is not None and longest > positions:
        what = f"prompts with max_new_tokens of at most {positions} tokens, the number of learned positions"
        raise BadArgument(expected(what, longest, "Shorten the prompts, or pass a smaller max_new_tokens."))
    return [int(limit) for limit in limits]


def _inputs(prompts: list[np.ndarray], limits: list[int], rows: int, width: int) -> dict[str, Any]:
    """Prompts padded on the left, and their limits. Rows beyond the prompts have the limit 0."""
    ids, mask = np.zeros((2, rows, width), np.int32)
    for number, row in enumerate(prompts):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
    return {"ids": ids, "mask": mask, "limits": _fill(np.asarray(limits, np.int32), rows)}


def _fill(array: np.ndarray, rows: int, value: int = 0) -> np.ndarray:
    return np.pad(array, ((0, rows - len(array)), *((0, 0),) * (array.ndim - 1)), constant_values=value)


# -- the loop --------------------------------------------------------------------------------------------------------


class _Loop(NamedTuple):
    """What the loop carries. `done` rows have ended; `step` tokens were generated."""

    step: Any
    done: jax.Array
    finished: jax.Array
    lengths: jax.Array
    tokens: jax.Array
    log_probs: jax.Array
    seen: jax.Array | None
    cache: KVCache


@partial(jax.jit, static_argnums=(0, 4, 5))
def _generate(
    graph: Any, state: Any, inputs: dict[str, jax.Array], sampler: Sampler, count: int, dtype: Any
) -> tuple[jax.Array, ...]:
    if dtype is not None:
        state = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    model = nnx.merge(graph, state)
    ids, mask = inputs["ids"], inputs["mask"]
    (rows, width), prompt_lengths = ids.shape, jnp.sum(mask, axis=1)

    def sample(loop: _Loop, states: jax.Array) -> _Loop:
        """Add the token that follows the last of the hidden states."""
        logits = constrain(model.head(states[:, -1:]).astype(jnp.float32), "batch", None, None)[:, 0]
        numbers = inputs["numbers"][:, loop.step] if "numbers" in inputs else logits[:, 0]
        chosen = sampler.choose(logits, numbers, loop.seen)
        active = ~loop.done
        token = jnp.where(active, chosen, inputs["pad"])
        log_probs = jnp.where(active, sampler.log_probs(logits, chosen), 0.0)
        is_stop = active & (chosen[:, None] == inputs["stops"]).any(-1)
        return loop._replace(
            step=loop.step + 1,
            done=loop.done | is_stop | (loop.step + 1 >= inputs["limits"]),
            finished=loop.finished | is_stop,
            lengths=loop.lengths + active,
            tokens=loop.tokens.at[:, loop.step].set(token),
            log_probs=loop.log_probs.at[:, loop.step].set(log_probs),
            seen=None if loop.seen is None else loop.seen.at[jnp.arange(rows), token].max(active),
        )

    def advance(loop: _Loop) -> _Loop:
        last = jax.lax.dynamic_slice_in_dim(loop.tokens, loop.step - 1, 1, axis=1)
        # Rows that have ended stay at a position that exists.
        position = jnp.where(loop.done, 0, prompt_lengths + loop.step - 1)
        states = model.hidden_states(last, position_ids=position[:, None], cache=loop.cache)
        if switches:
            switched = ~loop.done & jnp.isin(position, jnp.asarray(switches))
            states, keys, values = _reread(model, ids, mask, loop, states, switched)
            loop = loop._replace(cache=replace(loop.cache, keys=keys, values=values))
        return sample(loop, states)

    switches = [rope.original_positions for rope in model.config.ropes if rope.kind == "longrope"]
    cache = KVCache.empty(model.config, rows, width + count, model.embed_tokens.embedding[...].dtype)
    states = model.hidden_states(ids, mask, cache=cache)
    no, none = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    tokens = jnp.full((rows, count), inputs["pad"], jnp.int32)
    seen = None
    if sampler.repetition_penalty is not None:
        seen = jnp.zeros((rows, model.config.vocab_size), bool).at[jnp.arange(rows)[:, None], ids].max(mask > 0)
    zeros = jnp.zeros((rows, count), jnp.float32)
    loop = _Loop(jnp.int32(0), inputs["limits"] <= 0, no, none, tokens, zeros, seen, cache)
    loop = jax.lax.while_loop(lambda loop: ~loop.done.all(), advance, sample(loop, states))
    return tuple(_replicated(x) for x in (loop.tokens, loop.lengths, loop.finished, loop.log_probs))


def _reread(
    model: Decoder, ids: jax.Array, mask: jax.Array, loop: _Loop, states: jax.Array, switched: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states of the last token, keys and values, where `switched` rows are read again from their beginning.

    With longrope, all tokens of a text have other frequencies once it is longer than `original_positions`. As in
    transformers, its tokens so far are read once more then.
    """
    cache = loop.cache
    (rows, width), count = ids.shape, loop.tokens.shape[1]

    def read() -> tuple[jax.Array, jax.Array, jax.Array]:
        fresh = KVCache.empty(model.config, rows, width + count, cache.keys.dtype)
        written = jnp.broadcast_to(jnp.arange(count) < loop.step, (rows, count)).astype(mask.dtype)
        texts, kept = jnp.concatenate([ids, loop.tokens], axis=1), jnp.concatenate([mask, written], axis=1)
        found = model.hidden_states(texts, kept, cache=fresh)
        last = jax.lax.dynamic_slice_in_dim(found, width + loop.step - 1, 1, axis=1)
        chosen = switched[None, :, None, None, None]
        return (
            jnp.where(switched[:, None, None], last, states),
            jnp.where(chosen, fresh.keys, cache.keys),
            jnp.where(chosen, fresh.values, cache.values),
        )

    return jax.lax.cond(switched.any(), read, lambda: (states, cache.keys, cache.values))


def _replicated(x: jax.Array) -> jax.Array:
    """On all devices, so that every process can read it."""
    is_on_mesh = not jax.sharding.get_abstract_mesh().empty
    return jax.lax.with_sharding_constraint(x, PartitionSpec()) if is_on_mesh else x
