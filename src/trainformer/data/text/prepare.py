"""From what a user passes as text to tokens that can be trained on, in one call and without torch.

Owns which of the readers, encoders and packers are put together for the two ways of tuning a causal language model.
What each of them does is said in its own module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.data.labels import is_stream
from trainformer.data.text.encode import Encoder
from trainformer.data.text.packing import PackedDataset
from trainformer.data.text.preferences import PairEncoder, Pairs
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.sources import load_text
from trainformer.data.text.store import TokenStore, tokenize
from trainformer.data.text.streams import TokenStream

logger = logging.getLogger("trainformer")


def causal_tokens(
    data: Any,
    encoder: Encoder,
    *,
    packing: bool = False,
    cache_dir: str | Path | None = None,
    name: str = "data",
) -> TokenStore | PackedDataset | TokenStream:
    """Texts, prompts with completions, Alpaca records or conversations, tokenised once; a stream as it is read.

    `data` is a path or name that `load_text` knows, records of any kind, or data that are tokenised already
    (`input_ids`). With `packing`, sequences of the encoder's `max_length` are filled with whole documents. Collate the
    samples with `rows.token_batch`.
    """
    if packing and encoder.max_length is None:
        raise BadArgument(expected("an encoder with a max_length, to pack to", None))
    if isinstance(data, str | Path):
        data = load_text(data)
    capacity = encoder.max_length if packing else None
    if is_stream(data):
        return TokenStream(data, encoder, capacity=capacity)
    records: Any = data if has_tokens(data) else StandardRecords(data)
    store = tokenize(records, encoder, cache_dir=cache_dir, name=name)
    if capacity is None:
        return store
    packed = PackedDataset(store, capacity)
    counts = f"{len(store):,}", f"{len(packed):,}"
    logger.info("packed %s documents into %s sequences, %.1f %% full", *counts, 100 * packed.efficiency)
    return packed


def preference_tokens(
    data: Any, encoder: PairEncoder, *, cache_dir: str | Path | None = None, name: str = "data"
) -> Pairs:
    """Pairs of answers, tokenised once: records have a `prompt`, a `chosen` and a `rejected` answer.

    Collate the samples with `rows.pair_batch`.
    """
    records: Any = StandardRecords(data, "preference")
    return Pairs(tokenize(records, encoder, cache_dir=cache_dir, name=name))


def has_tokens(data: Any) -> bool:
    """Whether records are tokenised already.

    >>> has_tokens([{"input_ids": [1, 2]}]), has_tokens(["a text"])
    (True, False)
    """
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, Mapping) or not len(data):
        return False
    first = data[0]
    return isinstance(first, Mapping) and "input_ids" in first
