"""The targets of a data set, found without loading its samples.

Owns the knowledge of where the data sets people use keep their labels and the names of their classes: torchvision's
attributes, the samples of an ImageFolder, tensors, columns of HF `datasets`, and subsets and concatenations of all of
them. Packages are recognised by the names of their classes, so none is imported for data that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainformer.data.dataset import Arrays, Subset

SUBSET = "torch.utils.data.dataset.Subset"
CONCATENATION = "torch.utils.data.dataset.ConcatDataset"
TENSORS = "torch.utils.data.dataset.TensorDataset"
STREAM = "torch.utils.data.dataset.IterableDataset"
HF_DATASET = "datasets.arrow_dataset.Dataset"
HF_STREAM = "datasets.iterable_dataset.IterableDataset"

_LABEL_ATTRIBUTES = ("targets", "labels", "y", "_labels")  # the last is torchvision's Food101, Flowers102 and others
_SAMPLE_ATTRIBUTES = ("samples", "imgs", "_samples")  # lists of (path, label): ImageFolder; torchvision's GTSRB
_LABEL_COLUMNS = ("label", "labels", "target", "targets", "fine_label", "class", "y")
_MOST_CLASSES = 10_000_000  # beyond, integers are identifiers: counting them would take 80 MB and more


def labels_of(dataset: Any) -> np.ndarray | None:
    """The class label of every sample, as int64, without loading samples; None where there are no classes.

    Labels that are negative or not whole numbers are no classes.

    >>> labels_of([("a", 1), ("b", 0)])
    array([1, 0])
    """
    return targets_of(dataset).labels


@dataclass(frozen=True)
class Targets:
    """The targets of every sample: classes, or numbers to be predicted, or neither."""

    labels: np.ndarray | None = None
    continuous: np.ndarray | None = None
    names: list[str] | None = None
    num_classes: int | None = None


def targets_of(dataset: Any) -> Targets:
    """All that a data set says about its targets. Only `labels_of` and `extract_info` are meant for others."""
    if is_subset(dataset):
        return _chosen(targets_of(dataset.dataset), np.asarray(dataset.indices, dtype=np.int64))
    if is_a(dataset, CONCATENATION):
        return _joined([targets_of(part) for part in dataset.datasets])
    labels, continuous, names = None, None, _class_names(dataset)
    if is_stream(dataset):
        pass  # what its items are is known only by consuming it
    elif is_a(dataset, HF_DATASET):
        labels = _column_labels(dataset)
    else:
        stored = _stored_labels(dataset)
        if stored is not None:
            labels = _after_target_transform(dataset, stored)
            names = names if np.array_equal(labels, stored) else None  # they belong to the labels before
        elif is_a(dataset, TENSORS) and len(dataset.tensors) > 1:
            labels, continuous = _tensor_targets(_target_tensor(dataset.tensors))
        elif isinstance(dataset, Arrays):
            labels, continuous = _array_targets(dataset.arrays)
    return Targets(labels, continuous, names, _number_of_classes(dataset, labels, names))


def _chosen(targets: Targets, indices: np.ndarray) -> Targets:
    """A subset has the classes of the whole, also those it has no sample of."""
    return replace(
        targets,
        labels=None if targets.labels is None else targets.labels[indices],
        continuous=None if targets.continuous is None else targets.continuous[indices],
    )


def _joined(parts: Sequence[Targets]) -> Targets:
    names = [part.names for part in parts]
    numbers = [part.num_classes for part in parts]
    known = [number for number in numbers if number is not None]
    return Targets(
        labels=concatenated([part.labels for part in parts]),
        continuous=concatenated([part.continuous for part in parts]),
        names=names[0] if all(other == names[0] for other in names) else None,  # else one label has several names
        num_classes=max(known) if len(known) == len(parts) else None,
    )


def concatenated(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """All arrays as one, if none is missing and their rows are alike."""
    known = [array for array in arrays if array is not None]
    if len(known) < len(arrays) or len({array.shape[1:] for array in known}) != 1:
        return None
    return np.concatenate(known)


def _number_of_classes(dataset: Any, labels: np.ndarray | None, names: list[str] | None) -> int | None:
    if names is not None:
        return len(names)
    declared = getattr(dataset, "num_classes", None)
    if isinstance(declared, int | np.integer) and not isinstance(declared, bool) and declared > 0:
        return int(declared)
    if labels is None or not labels.size or labels.max() >= _MOST_CLASSES:
        return None
    return int(labels.max()) + 1


def _class_names(dataset: Any) -> list[str] | None:
    features = getattr(dataset, "features", None) if _comes_from(dataset, "datasets") else None
    if isinstance(features, Mapping):
        column = label_column(features)
        names = None if column is None else getattr(features[column], "names", None)
    else:
        names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple | np.ndarray) or len(names) == 0:
        return None
    # torchvision's ImageNet gives every class a tuple of synonyms.
    return [", ".join(map(str, name)) if isinstance(name, tuple | list) else str(name) for name in names]


def _stored_labels(dataset: Any) -> np.ndarray | None:
    """The labels a map-style data set keeps beside its samples, or in samples that are in memory already."""
    size = length(dataset)
    if size is None:
        return None
    for name in _LABEL_ATTRIBUTES:
        labels = _as_labels(getattr(dataset, name, None), size)
        if labels is not None:
            return labels
    for name in _SAMPLE_ATTRIBUTES:
        labels = _as_labels(_labels_in(getattr(dataset, name, None)), size)
        if labels is not None:
            return labels
    return _as_labels(_labels_in(dataset), size)


def _labels_in(samples: Any) -> list[Any] | None:
    """The second of every pair, or the label of every record, of samples that are in memory."""
    if not (isinstance(samples, list | tuple) or _holds_objects(samples)):
        return None
    found = []
    for sample in samples:
        if (isinstance(sample, tuple | list) or _holds_objects(sample)) and len(sample) == 2:
            found.append(sample[1])
        elif isinstance(sample, Mapping) and any(name in sample for name in _LABEL_COLUMNS):
            found.append(next(sample[name] for name in _LABEL_COLUMNS if name in sample))
        else:
            return None
    return found


def _holds_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object and value.ndim > 0


def _after_target_transform(dataset: Any, labels: np.ndarray) -> np.ndarray:
    """The labels as samples will show them, where the transform gives labels again (and not, say, one-hot rows)."""
    transform: Callable[[int], Any] | None = getattr(dataset, "target_transform", None)
    if transform is None:
        return labels
    from trainformer.data.order import preserved_generators

    unique, inverse = np.unique(labels, return_inverse=True)
    with preserved_generators():
        try:
            results = [transform(int(label)) for label in unique]
        except Exception:  # made for something else than a plain label; reading samples will tell
            return labels
    shown = _as_labels(results, len(unique))
    return labels if shown is None else shown[inverse]


def _target_tensor(tensors: Sequence[Any]) -> Any:
    """The last tensor, but for marks of queries behind the labels."""
    marked = len(tensors) == 3 and str(tensors[-1].dtype) in ("torch.bool", "bool")
    return tensors[-2] if marked else tensors[-1]


def _array_targets(arrays: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Of several arrays the last, as with tensors; of named ones that with a usual name."""
    if isinstance(arrays, Mapping):
        name = next((name for name in _LABEL_COLUMNS if name in arrays), None)
        return (None, None) if name is None else _tensor_targets(arrays[name])
    return _tensor_targets(_target_tensor(arrays)) if isinstance(arrays, tuple) and len(arrays) > 1 else (None, None)


def _tensor_targets(tensor: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    array = _as_array(tensor)
    if array is not None and array.dtype.kind == "f" and array.ndim in (1, 2):
        return None, array.astype(np.float64)
    return _as_labels(array, len(tensor)), None


def _as_labels(values: Any, size: int) -> np.ndarray | None:
    """One whole number from 0 per sample, or None."""
    array = _as_array(values)
    if array is None or array.shape != (size,) or array.dtype.kind not in "iub":
        return None
    labels = array.astype(np.int64)
    return None if size and labels.min() < 0 else labels


def _as_array(values: Any) -> np.ndarray | None:
    if callable(values) or isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        return None
    if is_a(values, "torch.Tensor"):
        values = values.detach().cpu()
        return (values.float() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16
    try:
        if isinstance(values, list | tuple):  # of numbers, or of tensors that hold one number each
            values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
        array = np.asarray(values)
        return np.asarray(array.tolist()) if array.dtype == object else array
    except (ValueError, TypeError, RuntimeError):  # rows of unequal length, or something else entirely
        return None


# -- HF datasets -------------------------------------------------------------------------------------------


def label_column(features: Mapping[str, Any]) -> str | None:
    """A column of whole numbers with a usual name, else the only column that has class names."""
    for name in _LABEL_COLUMNS:
        if str(getattr(features.get(name), "dtype", "")).startswith(("int", "uint", "bool")):
            return name
    named = [name for name, feature in features.items() if getattr(feature, "names", None)]
    return named[0] if len(named) == 1 else None


def _column_labels(dataset: Any) -> np.ndarray | None:
    column = label_column(dataset.features)
    if column is None:
        return None
    # Selecting the column first keeps images and texts unread; "arrow" also sets a transform of the user's aside.
    values = dataset.select_columns([column]).with_format("arrow")[:].column(column)
    return None if values.null_count else _as_labels(values.to_numpy(), len(dataset))


# -- kinds of data set -------------------------------------------------------------------------------------


def is_a(value: Any, name: str) -> bool:
    """isinstance() by the full name of a class, for classes of packages that need not be installed."""
    return any(full_name(kind) == name for kind in type(value).__mro__)


def full_name(kind: type) -> str:
    """The name of a class with that of its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_subset(dataset: Any) -> bool:
    """Whether a data set is some of the samples of another, `dataset.dataset`: those of `dataset.indices`."""
    return isinstance(dataset, Subset) or is_a(dataset, SUBSET)


def _comes_from(value: Any, package: str) -> bool:
    return any(kind.__module__.split(".")[0] == package for kind in type(value).__mro__)


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated. torch's iterable ones have a __getitem__ too, which always raises."""
    return is_a(dataset, STREAM) or is_a(dataset, HF_STREAM) or not hasattr(dataset, "__getitem__")


def length(dataset: Any) -> int | None:
    """The number of samples, where it is known."""
    if is_stream(dataset) and not (is_a(dataset, STREAM) or is_a(dataset, HF_STREAM)):
        return None  # a loader or a generator: if it has a length, it counts batches
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
