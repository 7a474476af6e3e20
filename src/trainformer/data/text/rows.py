"""Batches of token sequences as NumPy arrays: padded, packed, and pairs of answers.

Owns the shapes. What padding is, is told by the lengths of the sequences alone: the id of the padding token may well be
that of EOS, which is trained on. `batches` makes tensors of the same arrays. Batches for JAX have one shape, whatever
is in them, since every new one is compiled anew: `token_batch` and `pair_batch` are the ones to collate with there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.text.encode import IGNORED

_PACKED = ("input_ids", "labels", "position_ids")


def padded_rows(
    examples: Sequence[Mapping[str, Any]], pad_id: int, length: int, *, side: str = "right", dtype: Any = np.int64
) -> dict[str, np.ndarray]:
    """One row of `length` for each sequence: `input_ids`, `labels` (-100 at the padding) and `attention_mask`."""
    if side not in ("right", "left"):
        raise BadArgument(expected("side to be 'right' or 'left'", side))
    shape = len(examples), length
    batch = {
        "input_ids": np.full(shape, pad_id, dtype=dtype),
        "labels": np.full(shape, IGNORED, dtype=dtype),
        "attention_mask": np.zeros(shape, dtype=dtype),
    }
    for row, example in enumerate(examples):
        size = len(example["input_ids"])
        place = slice(0, size) if side == "right" else slice(length - size, length)
        batch["input_ids"][row, place] = example["input_ids"]
        batch["labels"][row, place] = example.get("labels", example["input_ids"])
        batch["attention_mask"][row, place] = 1
    return batch


def packed_rows(
    examples: Sequence[Mapping[str, Any]], pad_id: int, length: int, *, dtype: Any = np.int64
) -> dict[str, np.ndarray]:
    """One row of `length` for each packed sequence. The filling is a document of its own, without labels."""
    fillers = {"input_ids": pad_id, "labels": IGNORED, "position_ids": 0}
    batch = {name: np.full((len(examples), length), fillers[name], dtype=dtype) for name in _PACKED}
    for row, example in enumerate(examples):
        size = len(example["input_ids"])
        for name in _PACKED:
            batch[name][row, :size] = example[name]
        batch["position_ids"][row, size:] = np.arange(length - size)
    return batch


def token_batch(samples: Sequence[Mapping[str, Any]], length: int, pad_id: int | None) -> dict[str, np.ndarray]:
    """A batch of shape (samples, `length`) for JAX, int32: `input_ids`, `labels` (-100: not learned), `attention_mask`.

    Packed samples (of `PackedDataset`, or of a `TokenStream` with a capacity) also have `position_ids`, which begin at
    0 in each document, and `segment_ids`: the documents of a row are 1, 2, ... and the filling is 0. Attention must not
    reach from one segment into another.

    >>> two = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    >>> token_batch(two, length=4, pad_id=0)["labels"].tolist()
    [[-100, 6, 7, -100], [8, -100, -100, -100]]
    >>> one = {"input_ids": [7, 8, 4], "labels": [-100, 8, -100], "position_ids": [0, 1, 0], "lengths": [2, 1]}
    >>> token_batch([one], length=5, pad_id=0)["segment_ids"].tolist()
    [[1, 1, 2, 0, 0]]
    """
    pad_id = 0 if pad_id is None else int(pad_id)  # nothing looks at it: padding is masked and has no labels
    check_lengths(samples, length)
    if "position_ids" not in samples[0]:
        return padded_rows(samples, pad_id, length, dtype=np.int32)
    batch = packed_rows(samples, pad_id, length, dtype=np.int32)
    segments = np.zeros_like(batch["input_ids"])
    for row, sample in enumerate(samples):
        lengths = np.asarray(sample["lengths"])
        segments[row, : lengths.sum()] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return {**batch, "attention_mask": (segments > 0).astype(np.int32), "segment_ids": segments}


def pair_batch(pairs: Sequence[Mapping[str, Any]], length: int, pad_id: int | None) -> dict[str, np.ndarray]:
    """A batch of pairs of answers for JAX, (pairs, 2, `length`), the chosen one first: the arrays of `token_batch`.

    Labels are -100 in the prompt and in the padding. Flattened to (2 * pairs, length), both go through one forward.

    >>> one = {"chosen": {"input_ids": [5, 6], "labels": [-100, 6]}, "rejected": {"input_ids": [5], "labels": [-100]}}
    >>> pair_batch([one], length=3, pad_id=0)["input_ids"].tolist()
    [[[5, 6, 0], [5, 0, 0]]]
    """
    batch = token_batch([pair[part] for pair in pairs for part in ("chosen", "rejected")], length, pad_id)
    return {name: array.reshape(-1, 2, length) for name, array in batch.items()}


def check_lengths(samples: Sequence[Mapping[str, Any]], limit: int | None) -> int:
    """The length of the longest of some sequences; an error, if that is more than the limit."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    if limit is not None and longest > limit:
        raise DataError(expected(f"sequences of at most {limit} tokens", longest, "Tokenise with that max_length."))
    return longest
