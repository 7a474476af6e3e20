"""Map-style datasets without a framework: the base class, arrays in memory, and subsets.

They have a length and an index, which is all a torch `DataLoader` needs, so they serve torch and JAX alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected


class IndexedDataset:
    """Base of map-style datasets: a length, and samples by index."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        """Concatenate, as torch's datasets do."""
        from torch.utils.data import ConcatDataset

        parts: list[Any] = [self, other]
        return ConcatDataset(parts)


def normalize_index(index: int, size: int) -> int:
    """A non-negative index, else an `IndexError`, which also ends a loop over the dataset.

    >>> normalize_index(-1, 3)
    2
    """
    positive = index + size if index < 0 else index
    if not 0 <= positive < size:
        raise IndexError(f"index {index} is out of range for {size} samples")
    return int(positive)


class Subset(IndexedDataset):
    """The samples of a dataset at `indices`: torch's `Subset`, without torch.

    >>> Subset(["a", "b", "c"], [2, 0])[0]
    'c'
    """

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


class Concatenation(IndexedDataset):
    """Several datasets one after the other: torch's `ConcatDataset`, without torch.

    >>> Concatenation(["ab", "cde"])[3]
    'd'
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        sizes = [len(dataset) for dataset in self.datasets]
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        number, place = self.locate(index)
        return self.datasets[number][place]

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the dataset that has a sample, and the index there."""
        numbers, places = self.locate_all(np.asarray([normalize_index(index, len(self))]))
        return int(numbers[0]), int(places[0])

    def locate_all(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for many samples."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        return numbers, indices - self._starts[numbers]


class ArrayDataset(IndexedDataset):
    """Arrays of one length in memory: a dict (samples are dicts), a tuple (samples are tuples), or a single array.

    Anything NumPy can read is an array. Whole batches are read with one index operation.

    >>> ArrayDataset({"x": [[0.5], [1.5]], "label": [[3], [4]]})[1]
    {'x': array([1.5]), 'label': array([4])}
    """

    in_memory = True
    classes: list[str]  # set if class names are known

    def __init__(self, arrays: Any) -> None:
        if isinstance(arrays, Mapping):
            self.arrays: Any = {key: _as_array(value, repr(key)) for key, value in arrays.items()}
            lengths = {repr(key): len(value) for key, value in self.arrays.items()}
        elif isinstance(arrays, tuple):
            self.arrays = tuple(_as_array(value, f"array {place}") for place, value in enumerate(arrays))
            lengths = {f"array {place}": len(value) for place, value in enumerate(self.arrays)}
        else:
            self.arrays = _as_array(arrays, "the array")
            lengths = {"the array": len(self.arrays)}
        if len(set(lengths.values())) != 1:
            received = ", ".join(f"{length} rows in {name}" for name, length in lengths.items())
            raise DataError(f"Expected arrays of one length, one row per sample, received {received or 'no array'}.")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.rows(normalize_index(index, len(self)))

    def rows(self, indices: np.ndarray | int) -> Any:
        """The samples at these indices, as a batch; the sample at a single index."""
        if isinstance(self.arrays, dict):
            return {key: array[indices] for key, array in self.arrays.items()}
        if isinstance(self.arrays, tuple):
            return tuple(array[indices] for array in self.arrays)
        return self.arrays[indices]


def is_array(value: Any) -> bool:
    """Whether a value is an array or tensor of any framework, with at least one dimension.

    >>> is_array(np.zeros(2)), is_array([0, 0]), is_array(np.float32(0))
    (True, False, False)
    """
    return hasattr(value, "shape") and hasattr(value, "ndim") and hasattr(value, "dtype") and value.ndim > 0


def _as_array(value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged rows, or a tensor on a device
        raise DataError(expected(f"{name} to be an array", error, "Rows of unequal length must be padded.")) from error
    if array.ndim == 0 or array.dtype.kind not in "biufcV":
        received = f"{type(value).__name__} ({array.dtype}, {array.ndim} dimensions)"
        do = "Pass records that hold text as a list of dicts."
        raise BadArgument(expected(f"{name} to be an array of numbers, one row per sample", received, do))
    return array
