"""Several documents in one sequence: which go together, and the sequence they make.

Owns the packing. Which documents there are is decided before, by `store`, and in which order sequences come is decided
after, by the loader. That attention does not cross from one document to the next is the model's business; it can tell
them apart by `position_ids`, which begin at 0 in each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import Indexed
from trainformer.data.text.encode import IGNORED
from trainformer.data.text.store import lengths_of


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of at most `capacity` tokens, each the numbers of its documents: best fit, the longest documents first.

    Every document is in one bin. Equal lengths give equal bins; the documents of a bin are in the order of the data,
    and so are the bins by their first. A million lengths take two to five seconds.

    >>> pack([3, 8, 2, 5, 1], capacity=8)
    [[0, 3], [1], [2, 4]]
    """
    sizes = np.asarray(lengths)
    _check(sizes, capacity)
    bins: list[list[int]] = []
    with_space: defaultdict[int, list[int]] = defaultdict(list)  # free tokens -> bins
    spaces = _Spaces(capacity)
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    for document, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        space = spaces.smallest_from(size)
        if space:
            chosen = with_space[space].pop()
            if not with_space[space]:
                spaces.remove(space)
            bins[chosen].append(document)
        else:
            space, chosen = capacity, len(bins)
            bins.append([document])
        left = space - size
        if left:
            if not with_space[left]:
                spaces.add(left)
            with_space[left].append(chosen)
    for documents in bins:
        documents.sort()
    return sorted(bins)


class _Spaces:
    """A set of numbers up to a limit that knows its smallest from a given one on.

    Numbers are bits in blocks of about the square root of the limit, and so are the blocks that hold any: to find one
    is to look at two integers of some hundred bits, half a microsecond. A search tree in Python takes ten times that.
    """

    def __init__(self, limit: int) -> None:
        self._shift = limit.bit_length() // 2 + 1
        self._low = (1 << self._shift) - 1
        self._blocks = [0] * ((limit >> self._shift) + 1)
        self._filled = 0

    def add(self, number: int) -> None:
        block = number >> self._shift
        self._blocks[block] |= 1 << (number & self._low)
        self._filled |= 1 << block

    def remove(self, number: int) -> None:
        block = number >> self._shift
        self._blocks[block] ^= 1 << (number & self._low)
        if not self._blocks[block]:
            self._filled ^= 1 << block

    def smallest_from(self, number: int) -> int:
        """0 if there is none."""
        block = number >> self._shift
        bits = self._blocks[block] >> (number & self._low)
        if bits:
            return number + (bits & -bits).bit_length() - 1
        filled = self._filled >> (block + 1)
        if not filled:
            return 0
        block += (filled & -filled).bit_length()
        bits = self._blocks[block]
        return (block << self._shift) + (bits & -bits).bit_length() - 1


def _check(sizes: np.ndarray, capacity: int) -> None:
    if isinstance(capacity, bool) or capacity < 1:
        raise BadArgument(expected("capacity to be at least 1", capacity))
    if sizes.size == 0:
        raise DataError(expected("at least one document to pack", "none"))
    if sizes.ndim != 1 or not np.issubdtype(sizes.dtype, np.integer):
        raise BadArgument(expected("lengths to be a list of whole numbers", f"{sizes.dtype} of shape {sizes.shape}"))
    longest = int(sizes.argmax())
    if sizes[longest] > capacity:
        raise DataError(
            expected(
                f"documents of at most {capacity} tokens, the capacity of a sequence",
                f"{sizes[longest]} tokens in document {longest}",
                "Tokenise with max_length=capacity, or pass a larger capacity.",
            )
        )
    if sizes.min() < 1:
        raise DataError(expected("documents of at least one token", f"an empty one, number {int(sizes.argmin())}"))


class PackedDataset(Indexed):
    """Sequences of whole documents, from a store (or a `Subset` of one, or any data with `input_ids` and `labels`).

    An item has `input_ids` and `labels` one document after the other, `position_ids` that begin at 0 in each, and the
    `lengths` of the documents. The first label of every document is -100: what comes before it belongs to another.
    `bins` are those of `pack` by default.

    >>> data = [{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    >>> packed = PackedDataset(data, capacity=8)
    >>> packed[0]["labels"].tolist(), packed[0]["position_ids"].tolist(), packed.efficiency
    ([-100, 8, 9, -100, 5], [0, 1, 2, 0, 1], 0.625)
    """

    def __init__(self, store: Any, capacity: int, bins: Sequence[Sequence[int]] | None = None) -> None:
        sizes = lengths_of(store)
        bins = pack(sizes, capacity) if bins is None else bins
        self.store = store
        self.capacity = capacity
        # Flat, since a million small lists would take longer to send to a worker than to pack.
        self._documents = np.concatenate([np.asarray(documents, dtype=np.int64) for documents in bins])
        self._offsets = np.cumsum([0, *map(len, bins)])
        self.lengths = np.add.reduceat(sizes[self._documents], self._offsets[:-1])
        if self.lengths.max() > capacity:
            raise BadArgument(expected(f"bins of at most {capacity} tokens", int(self.lengths.max())))

    @property
    def efficiency(self) -> float:
        """The share of the sequences' capacity that is filled with tokens."""
        return float(self.lengths.sum() / (self.capacity * len(self)))

    @property
    def in_memory(self) -> bool:
        """Whether reading is too cheap for worker processes to pay."""
        return bool(getattr(self.store, "in_memory", isinstance(self.store, list)))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index = int(index) % len(self)
        documents = self._documents[self._offsets[index] : self._offsets[index + 1]]
        return join_documents([self.store[document] for document in documents.tolist()])


def join_documents(items: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """One sequence of several documents, each with `input_ids` and `labels`."""
    lengths = np.array([len(item["input_ids"]) for item in items], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    labels = np.concatenate([item["labels"] for item in items])
    labels[starts] = IGNORED
    return {
        "input_ids": np.concatenate([item["input_ids"] for item in items]),
        "labels": labels,
        "position_ids": np.arange(len(labels)) - np.repeat(starts, lengths),
        "lengths": lengths,
    }
