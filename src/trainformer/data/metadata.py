"""Metadata of a dataset (`DatasetInfo`): size, classes, input shape, target statistics.

Classes come from the labels, without loading samples; at most one sample is read, for the input shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainformer.core.errors import DataError, TrainformerError, expected
from trainformer.data.labels import (
    HF_DATASET,
    concatenated,
    is_concatenation,
    is_instance_of,
    is_stream,
    is_subset,
    length,
    targets_of,
)

if TYPE_CHECKING:
    from torch import Tensor

_INPUT_KEYS = ("image", "img", "pixel_values", "x", "input")


@dataclass
class DatasetInfo:
    """Metadata of a dataset. Unknown fields are None; an unknown number of samples is 0."""

    num_samples: int = 0

    # Classes
    num_classes: int | None = None
    class_names: list[str] | None = None
    class_counts: list[int] | None = None

    # Images
    input_shape: tuple[int, ...] | None = None  # (C, H, W) for images, else the shape of one input
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    # Sequences
    max_length: int | None = None

    # Regression
    num_targets: int | None = None
    target_mean: float | None = None
    target_std: float | None = None

    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def class_weights(self) -> Tensor | None:
        """Inverse-frequency weights for a class-balanced loss; 0 for a class without samples.

        >>> DatasetInfo(class_counts=[1, 3, 0]).class_weights
        tensor([1.3333, 0.4444, 0.0000])
        """
        if self.class_counts is None:
            return None
        import torch

        total, classes = sum(self.class_counts), len(self.class_counts)
        return torch.tensor([total / (classes * count) if count else 0.0 for count in self.class_counts])


def extract_info(dataset: Any) -> DatasetInfo:
    """Extract metadata from a dataset's attributes and at most one sample.

    Random generators are preserved. An iterable-style dataset is not read: only its attributes count (`classes`,
    `num_classes`, `class_counts`, `input_shape`, and its length).

    >>> info = extract_info([(0.5, 0), (0.1, 2), (0.3, 2)])
    >>> info.num_samples, info.num_classes, info.class_counts
    (3, 3, [1, 0, 2])
    """
    targets = targets_of(dataset)
    info = DatasetInfo(num_samples=length(dataset) or 0)
    info.num_classes, info.class_names = targets.num_classes, targets.names
    if targets.labels is not None and targets.num_classes is not None:
        if targets.labels.size and targets.labels.max() >= targets.num_classes:
            what = f"labels from 0 to {targets.num_classes - 1} in a dataset of {targets.num_classes} classes"
            do = "Number labels from 0, and let `classes` (or `num_classes`) cover all of them."
            raise DataError(expected(what, int(targets.labels.max()), do))
        info.class_counts = np.bincount(targets.labels, minlength=targets.num_classes).tolist()
    if targets.continuous is not None and targets.continuous.size:
        values = targets.continuous
        info.num_targets = 1 if values.ndim == 1 else values.shape[1]
        info.target_mean, info.target_std = float(values.mean()), float(values.std())
    if is_stream(dataset):
        counts, shape = getattr(dataset, "class_counts", None), getattr(dataset, "input_shape", None)
        info.class_counts = list(counts) if isinstance(counts, list | tuple) else None
        info.input_shape = tuple(shape) if isinstance(shape, list | tuple) else None
    elif info.num_samples:
        sample = _first_sample(dataset)
        info.input_shape = _input_shape(sample)
        # The longest sequence if lengths are known without loading samples, else the length of the first one.
        lengths = _token_lengths(dataset)
        info.max_length = int(lengths.max()) if lengths is not None and lengths.size else _token_length(sample)
    return info


def _first_sample(dataset: Any) -> Any:
    from trainformer.data.order import preserved_generators

    with preserved_generators():
        try:
            return dataset[0]
        except TrainformerError:
            raise
        except Exception as error:
            what = f"the first sample of {type(dataset).__name__} to be readable"
            raise DataError(expected(what, error, "Read dataset[0] yourself to see where it fails.")) from error


def _input_shape(sample: Any) -> tuple[int, ...] | None:
    value = sample[0] if isinstance(sample, tuple | list) and len(sample) > 0 else sample
    if isinstance(value, Mapping):
        value = next((value[key] for key in _INPUT_KEYS if key in value), None)
    if is_instance_of(value, "PIL.Image.Image"):
        return (len(value.getbands()), value.height, value.width)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    shape = tuple(int(size) for size in value.shape)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and len(shape) == 3 and shape[2] in (1, 3, 4):
        return (shape[2], shape[0], shape[1])  # images decoded into NumPy arrays are channels-last
    # Integers of another rank are tokens or indices, whose number says nothing about a model's input.
    is_input = len(shape) == 3 or (len(shape) > 0 and "float" in str(value.dtype))
    return shape if is_input else None


def _token_lengths(dataset: Any) -> np.ndarray | None:
    if is_subset(dataset):
        lengths = _token_lengths(dataset.dataset)
        return None if lengths is None else lengths[np.asarray(dataset.indices, dtype=np.int64)]
    if is_concatenation(dataset):
        return concatenated([_token_lengths(part) for part in dataset.datasets])
    if is_instance_of(dataset, HF_DATASET):
        return _list_lengths(dataset, "input_ids")
    if isinstance(dataset, list | tuple):
        found = [_token_length(sample) for sample in dataset]
        return None if None in found else np.asarray(found, dtype=np.int64)
    return None


def _token_length(sample: Any) -> int | None:
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    if ids is None or not hasattr(ids, "__len__"):
        return None
    return int(ids.shape[-1]) if hasattr(ids, "shape") else len(ids)


def _list_lengths(dataset: Any, column: str) -> np.ndarray | None:
    if column not in dataset.column_names:
        return None
    import pyarrow.compute  # comes with `datasets`

    values = dataset.data.column(column)
    if not (pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type)) or values.null_count:
        return None
    # Lengths come from the offsets: no token is read, however large the file.
    lengths = pyarrow.compute.list_value_length(values).to_numpy()
    chosen = getattr(dataset, "_indices", None)  # after select or shuffle
    return lengths if chosen is None else lengths[chosen.column(0).to_numpy()]
