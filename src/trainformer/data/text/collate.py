"""Collating token sequences: padded, packed, preference pairs; and batches of similar lengths.

Lengths alone decide what is padding: the padding token may be the EOS token, which is trained on. Batches for JAX
(`token_batch`, `pair_batch`) are NumPy arrays of one fixed shape, since every new shape compiles again. torch is
imported only when a tensor is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import is_array
from trainformer.data.samplers import EpochSampler, positive
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.store import lengths_of

if TYPE_CHECKING:
    from torch import Tensor

_GROUPED = 0x1E46  # a random stream independent of other samplers with the same seed
_MEGABATCH = 50  # batches sorted together: more means less padding, but less randomness


def pad(
    examples: Sequence[Mapping[str, Any]],
    pad_id: int,
    *,
    multiple_of: int = 8,
    max_length: int | None = None,
    side: str = "right",
) -> dict[str, Tensor]:
    """One batch of sequences: `input_ids`, `labels` (-100 at the padding) and `attention_mask`.

    The length is that of the longest sequence, rounded up to a multiple of 8 for tensor cores and fewer shapes, but not
    beyond `max_length`, the positions of the model. Pad on the left for generation.

    >>> batch = pad([{"input_ids": [5, 6, 2]}, {"input_ids": [7]}], pad_id=2, multiple_of=1)
    >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 2], [7, -100, -100]], [[1, 1, 1], [1, 0, 0]])
    """
    if multiple_of < 1:
        raise BadArgument(expected("multiple_of to be at least 1", multiple_of))
    length = -(-check_lengths(examples, max_length) // multiple_of) * multiple_of
    length = length if max_length is None else min(length, max_length)
    return _tensors(padded_rows(examples, pad_id, length, side=side))


def collate_packed(
    examples: Sequence[Mapping[str, Any]],
    pad_id: int = 0,
    *,
    length: int | None = None,
    flatten: bool = False,
) -> dict[str, Tensor]:
    """A batch of packed sequences, without an attention mask: `position_ids` separate the documents.

    Each sequence is a row, padded to the longest, or to `length` (the capacity) for batches of one shape. The padding
    is a separate document without labels. A batch can be split between any two rows.

    With `flatten` all documents form one row without padding, for variable-length attention kernels: document i is at
    `cu_seqlens[i]` to `cu_seqlens[i + 1]`, and `max_seqlen` is the longest length.

    >>> one = {"input_ids": [7, 8, 4], "labels": [-100, 8, -100], "position_ids": [0, 1, 0], "lengths": [2, 1]}
    >>> two = {"input_ids": [9], "labels": [-100], "position_ids": [0], "lengths": [1]}
    >>> collate_packed([one, two])["position_ids"].tolist()
    [[0, 1, 0], [0, 0, 1]]
    >>> collate_packed([one, two], flatten=True)["cu_seqlens"].tolist()
    [0, 2, 3, 4]
    """
    if flatten:
        rows = {name: np.concatenate([np.asarray(example[name]) for example in examples]) for name in _PACKED}
        lengths = np.concatenate([np.asarray(example["lengths"]) for example in examples])
        batch: dict[str, np.ndarray] = {name: row.astype(np.int64)[None] for name, row in rows.items()}
        batch["cu_seqlens"] = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        batch["max_seqlen"] = np.asarray(lengths.max(), dtype=np.int64)
        return _tensors(batch)
    longest = check_lengths(examples, None)
    if length is not None and longest > length:
        raise BadArgument(expected(f"sequences of at most {length} tokens", longest, "Pass length=capacity."))
    return _tensors(packed_rows(examples, pad_id, longest if length is None else length))


def _tensors(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


class LengthGroupedSampler(EpochSampler):
    """Every sequence once, in random batches of similar lengths: `batch_size` consecutive indices are a batch.

    Sequences are shuffled, sorted by length within every `megabatch` batches, and these batches are shuffled again. The
    longest sequence is in the first batch, so that a lack of memory shows at once. `lengths` are numbers of tokens, or
    a dataset that has them. A rank gets whole batches.

    >>> sampler = LengthGroupedSampler([9, 1, 8, 2], batch_size=2)
    >>> sampler.order(epoch=0).tolist()
    [0, 2, 3, 1]
    """

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        megabatch: int = _MEGABATCH,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed, num_replicas, rank)
        self.batch_size = self.block = positive("batch_size", batch_size)
        self.megabatch = positive("megabatch", megabatch)
        is_lengths = is_array(lengths) or (
            isinstance(lengths, Sequence) and len(lengths) > 0 and not isinstance(lengths[0], Mapping)
        )
        array = np.asarray(lengths) if is_lengths else lengths_of(lengths)
        if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise DataError(expected("the lengths of at least one sequence, as integers", f"shape {array.shape}"))
        self._lengths = array.astype(np.int64)
        self.num_samples = len(self._lengths)

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        rng = self._random(_GROUPED, epoch, seed)
        shuffled = rng.permutation(len(self._lengths))
        longest = int(self._lengths[shuffled].argmax())
        shuffled[[0, longest]] = shuffled[[longest, 0]]
        group = np.arange(len(shuffled)) // (self.batch_size * self.megabatch)
        # lexsort is stable, so equal lengths stay in random order.
        by_length = shuffled[np.lexsort((-self._lengths[shuffled], group))]
        full = len(shuffled) // self.batch_size
        chance = rng.random(full)
        chance[:1] = -1.0  # the batch with the longest sequence stays first
        batches = np.lexsort((chance, np.arange(full) // self.megabatch))
        whole = by_length[: full * self.batch_size].reshape(full, self.batch_size)[batches].reshape(-1)
        return np.concatenate([whole, by_length[full * self.batch_size :]])


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
        "labels": np.full(shape, IGNORE_INDEX, dtype=dtype),
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
    """One row of `length` for each packed sequence. The padding is a separate document without labels."""
    fillers = {"input_ids": pad_id, "labels": IGNORE_INDEX, "position_ids": 0}
    batch = {name: np.full((len(examples), length), fillers[name], dtype=dtype) for name in _PACKED}
    for row, example in enumerate(examples):
        size = len(example["input_ids"])
        for name in _PACKED:
            batch[name][row, :size] = example[name]
        batch["position_ids"][row, size:] = np.arange(length - size)
    return batch


def token_batch(samples: Sequence[Mapping[str, Any]], length: int, pad_id: int | None) -> dict[str, np.ndarray]:
    """A batch of shape (samples, `length`) for JAX, int32: `input_ids`, `labels` (-100: not learned), `attention_mask`.

    Packed samples (of `PackedDataset`, or a `TokenStream` with a capacity) also have `position_ids`, which start at 0
    in each document, and `segment_ids`: the documents of a row are 1, 2, ... and padding is 0. Attention must not cross
    segments.

    >>> two = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    >>> token_batch(two, length=4, pad_id=0)["labels"].tolist()
    [[-100, 6, 7, -100], [8, -100, -100, -100]]
    >>> one = {"input_ids": [7, 8, 4], "labels": [-100, 8, -100], "position_ids": [0, 1, 0], "lengths": [2, 1]}
    >>> token_batch([one], length=5, pad_id=0)["segment_ids"].tolist()
    [[1, 1, 2, 0, 0]]
    """
    pad_id = 0 if pad_id is None else int(pad_id)  # irrelevant: padding is masked and has no labels
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
    """A batch of preference pairs for JAX, (pairs, 2, `length`), the chosen answer first: arrays as in `token_batch`.

    Labels are -100 in the prompt and in the padding. Reshape to (2 * pairs, length) for a single forward pass.

    >>> one = {"chosen": {"input_ids": [5, 6], "labels": [-100, 6]}, "rejected": {"input_ids": [5], "labels": [-100]}}
    >>> pair_batch([one], length=3, pad_id=0)["input_ids"].tolist()
    [[[5, 6, 0], [5, 0, 0]]]
    """
    batch = token_batch([pair[part] for pair in pairs for part in ("chosen", "rejected")], length, pad_id)
    return {name: array.reshape(-1, 2, length) for name, array in batch.items()}


def check_lengths(samples: Sequence[Mapping[str, Any]], limit: int | None) -> int:
    """The length of the longest sequence; an error if it exceeds the limit."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    if limit is not None and longest > limit:
        raise DataError(expected(f"sequences of at most {limit} tokens", longest, "Tokenise with that max_length."))
    return longest
