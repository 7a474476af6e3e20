"""Packing several documents into one sequence.

`position_ids` start at 0 in each document, by which the model keeps attention from crossing documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import IndexedDataset, normalize_index
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.store import lengths_of


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of at most `capacity` tokens, as lists of document indices: best fit decreasing.

    Every document is in one bin. The result is deterministic; documents in a bin are sorted, and so are the bins. A
    million lengths take two to five seconds.

    >>> pack([3, 8, 2, 5, 1], capacity=8)
    [[0, 3], [1], [2, 4]]
    """
    sizes = np.asarray(lengths)
    if isinstance(capacity, bool) or capacity < 1:
        raise BadArgument(expected("capacity to be at least 1", capacity))
    if sizes.size == 0:
        raise DataError(expected("at least one document to pack", "none"))
    if sizes.ndim != 1 or not np.issubdtype(sizes.dtype, np.integer):
        raise BadArgument(expected("lengths to be a list of integers", f"{sizes.dtype} of shape {sizes.shape}"))
    longest = int(sizes.argmax())
    if sizes[longest] > capacity:
        what = f"documents of at most {capacity} tokens, the capacity of a sequence"
        do = "Tokenise with max_length=capacity, or pass a larger capacity."
        raise DataError(expected(what, f"{sizes[longest]} tokens in document {longest}", do))
    if sizes.min() < 1:
        raise DataError(expected("documents of at least one token", f"an empty one, number {int(sizes.argmin())}"))
    bins: list[list[int]] = []
    with_space: defaultdict[int, list[int]] = defaultdict(list)  # free tokens -> bins
    spaces: list[int] = []  # the keys of `with_space` that have bins, sorted
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    for document, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        place = bisect_left(spaces, size)
        if place < len(spaces):
            space = spaces[place]
            chosen = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
            bins[chosen].append(document)
        else:
            space, chosen = capacity, len(bins)
            bins.append([document])
        left = space - size
        if left:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(chosen)
    for documents in bins:
        documents.sort()
    return sorted(bins)


class PackedDataset(IndexedDataset):
    """Packed sequences of whole documents, from a store (or a `Subset`, or any data with `input_ids` and `labels`).

    An item has the concatenated `input_ids` and `labels`, `position_ids` that start at 0 in each document, and the
    `lengths` of the documents. The first label of every document is -100: the token before it belongs to another one
    (not with ``causal=False``, where labels belong to their own position). `bins` are those of `pack` by default.

    >>> data = [{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    >>> packed = PackedDataset(data, capacity=8)
    >>> packed[0]["labels"].tolist(), packed[0]["position_ids"].tolist(), packed.efficiency
    ([-100, 8, 9, -100, 5], [0, 1, 2, 0, 1], 0.625)
    """

    def __init__(
        self, store: Any, capacity: int, bins: Sequence[Sequence[int]] | None = None, *, causal: bool = True
    ) -> None:
        sizes = lengths_of(store)
        bins = pack(sizes, capacity) if bins is None else bins
        self.store = store
        self.capacity = capacity
        self.causal = causal
        # Flat arrays: a million small lists would take longer to send to a worker than to pack.
        self._documents = np.concatenate([np.asarray(documents, dtype=np.int64) for documents in bins])
        self._offsets = np.cumsum([0, *map(len, bins)])
        self.lengths = np.add.reduceat(sizes[self._documents], self._offsets[:-1])
        if self.lengths.max() > capacity:
            raise BadArgument(expected(f"bins of at most {capacity} tokens", int(self.lengths.max())))

    @property
    def efficiency(self) -> float:
        """The share of the capacity that is filled with tokens."""
        return float(self.lengths.sum() / (self.capacity * len(self)))

    @property
    def in_memory(self) -> bool:
        """Whether reading is so cheap that worker processes would not pay off."""
        return bool(getattr(self.store, "in_memory", isinstance(self.store, list)))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = normalize_index(index, len(self))
        documents = self._documents[self._offsets[index] : self._offsets[index + 1]]
        return join_documents([self.store[document] for document in documents.tolist()], self.causal)


def join_documents(items: Sequence[Mapping[str, Any]], causal: bool = True) -> dict[str, np.ndarray]:
    """Concatenate documents with `input_ids` and `labels` to one sequence."""
    lengths = np.array([len(item["input_ids"]) for item in items], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    labels = np.concatenate([item["labels"] for item in items])
    if causal:
        labels[starts] = IGNORE_INDEX
    return {
        "input_ids": np.concatenate([item["input_ids"] for item in items]),
        "labels": labels,
        "position_ids": np.arange(len(labels)) - np.repeat(starts, lengths),
        "lengths": lengths,
    }
