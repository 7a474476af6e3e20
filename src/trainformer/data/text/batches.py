"""Batches of token sequences as tensors: padded, packed, and with sequences of like lengths together.

Owns how long the rows of a batch are, and the sampler that keeps like lengths together. What is in the rows is said in
`rows`. torch is imported when a tensor is made, so that the sampler serves without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import is_array
from trainformer.data.samplers import EpochSampler
from trainformer.data.text.rows import check_lengths, packed_rows, padded_rows
from trainformer.data.text.store import lengths_of

if TYPE_CHECKING:
    from torch import Tensor

_GROUPED = 0x1E46  # sets this stream of random numbers apart from those of other samplers with the same seed
_MEGABATCH = 50  # batches that are sorted together; the more, the less padding and the less chance


def pad(
    examples: Sequence[Mapping[str, Any]],
    pad_id: int,
    *,
    multiple_of: int = 8,
    max_length: int | None = None,
    side: str = "right",
) -> dict[str, Tensor]:
    """One batch of sequences: `input_ids`, `labels` (-100 at the padding) and `attention_mask`.

    The length is that of the longest, rounded up to a multiple of 8, which suits tensor cores and keeps the number of
    shapes small; not beyond `max_length`, where the model has no positions for more. Pad on the left to generate.

    >>> batch = pad([{"input_ids": [5, 6, 2]}, {"input_ids": [7]}], pad_id=2, multiple_of=1)
    >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 2], [7, -100, -100]], [[1, 1, 1], [1, 0, 0]])
    """
    length = _padded_length(check_lengths(examples, max_length), multiple_of, max_length)
    return _tensors(padded_rows(examples, pad_id, length, side=side))


def collate_packed(
    examples: Sequence[Mapping[str, Any]],
    pad_id: int = 0,
    *,
    length: int | None = None,
    flatten: bool = False,
) -> dict[str, Tensor]:
    """A batch of packed sequences, without an attention mask: documents are told apart by `position_ids`.

    Each sequence is a row, filled up to the longest, or to `length`: with the capacity given, all batches have one
    shape. The filling is a document of its own, without labels. A batch can be cut between any two rows.

    With `flatten` all documents are one row without filling, as kernels for sequences of unequal lengths want them:
    document i is at `cu_seqlens[i]` to `cu_seqlens[i + 1]`, and `max_seqlen` is the length of the longest.

    >>> one = {"input_ids": [7, 8, 4], "labels": [-100, 8, -100], "position_ids": [0, 1, 0], "lengths": [2, 1]}
    >>> two = {"input_ids": [9], "labels": [-100], "position_ids": [0], "lengths": [1]}
    >>> collate_packed([one, two])["position_ids"].tolist()
    [[0, 1, 0], [0, 0, 1]]
    >>> collate_packed([one, two], flatten=True)["cu_seqlens"].tolist()
    [0, 2, 3, 4]
    """
    if flatten:
        return _flattened(examples)
    longest = check_lengths(examples, None)
    if length is not None and longest > length:
        raise BadArgument(expected(f"sequences of at most {length} tokens", longest, "Pass length=capacity."))
    return _tensors(packed_rows(examples, pad_id, longest if length is None else length))


def _flattened(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    import torch

    names = ("input_ids", "labels", "position_ids")
    rows = {name: np.concatenate([np.asarray(example[name]) for example in examples]) for name in names}
    lengths = np.concatenate([np.asarray(example["lengths"]) for example in examples])
    return {
        **_tensors({name: row.astype(np.int64)[None] for name, row in rows.items()}),
        "cu_seqlens": torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)),
        "max_seqlen": torch.tensor(int(lengths.max())),
    }


def _tensors(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


def _padded_length(longest: int, multiple_of: int, max_length: int | None) -> int:
    if multiple_of < 1:
        raise BadArgument(expected("multiple_of to be at least 1", multiple_of))
    rounded = -(-longest // multiple_of) * multiple_of
    return rounded if max_length is None else min(rounded, max_length)


class LengthGroupedSampler(EpochSampler):
    """Every sequence once, in random batches of like lengths: consecutive `batch_size` are a batch.

    Sequences are shuffled, and those of every `megabatch` batches sorted by length; these batches then come in random
    order. The longest sequence of all is in the first batch, so that a run that lacks memory ends at once.
    `lengths` are numbers of tokens, or data to ask for them. A rank gets whole batches.

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
        for name, value in (("batch_size", batch_size), ("megabatch", megabatch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadArgument(expected(f"{name} to be a positive integer", value))
        self._lengths = _as_lengths(lengths)
        self.batch_size = batch_size
        self.megabatch = megabatch

    @property
    def block(self) -> int:  # type: ignore[override]
        """What one rank gets at a time: a batch."""
        return self.batch_size

    @property
    def num_samples(self) -> int:
        """Length of an epoch over all ranks: all sequences."""
        return len(self._lengths)

    def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
        """Indices of the whole epoch, over all ranks; every `batch_size` of them are a batch, the last may be less."""
        rng = self._random(_GROUPED, epoch, seed)
        shuffled = rng.permutation(len(self._lengths))
        longest = int(self._lengths[shuffled].argmax())
        shuffled[[0, longest]] = shuffled[[longest, 0]]
        group = np.arange(len(shuffled)) // (self.batch_size * self.megabatch)
        # Equal lengths stay in random order: lexsort is stable.
        by_length = shuffled[np.lexsort((-self._lengths[shuffled], group))]
        full = len(shuffled) // self.batch_size
        chance = rng.random(full)
        chance[:1] = -1.0  # the batch with the longest of all stays first
        batches = np.lexsort((chance, np.arange(full) // self.megabatch))
        whole = by_length[: full * self.batch_size].reshape(full, self.batch_size)[batches].reshape(-1)
        return np.concatenate([whole, by_length[full * self.batch_size :]])


def _as_lengths(lengths: Any) -> np.ndarray:
    is_numbers = is_array(lengths) or (
        isinstance(lengths, Sequence) and len(lengths) > 0 and not isinstance(lengths[0], Mapping)
    )
    array = np.asarray(lengths) if is_numbers else lengths_of(lengths)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(expected("the lengths of at least one sequence, as whole numbers", f"shape {array.shape}"))
    return array.astype(np.int64)
