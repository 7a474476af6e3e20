"""The labels of a dataset, found without loading its samples, and class indices that agree between datasets.

This module knows where datasets keep labels and class names: torchvision's attributes, the samples of an ImageFolder,
tensors, columns of HF `datasets`, and subsets and concatenations of all of these. It recognises packages by the names
of their classes, so it imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from trainformer.core.errors import DataError
from trainformer.data.dataset import ArrayDataset, Concatenation, Subset

SUBSET = "torch.utils.data.dataset.Subset"
CONCATENATION = "torch.utils.data.dataset.ConcatDataset"
TENSORS = "torch.utils.data.dataset.TensorDataset"
STREAM = "torch.utils.data.dataset.IterableDataset"
HF_DATASET = "datasets.arrow_dataset.Dataset"
HF_STREAM = "datasets.iterable_dataset.IterableDataset"

_LABEL_ATTRIBUTES = ("targets", "labels", "y", "_labels")  # the last is torchvision's Food101, Flowers102 and others
_SAMPLE_ATTRIBUTES = ("samples", "imgs", "_samples")  # lists of (path, label): ImageFolder; torchvision's GTSRB
LABEL_KEYS_OF_RECORDS = ("label", "labels", "target", "targets", "fine_label", "class", "y")
_MAX_CLASSES = 10_000_000  # larger integers are identifiers; counting them would take 80 MB and more


def labels_of(dataset: Any) -> np.ndarray | None:
    """The class label of every sample, as int64, without loading samples; None if there are none.

    Negative labels and labels that are not integers are not classes.

    >>> labels_of([("a", 1), ("b", 0)])
    array([1, 0])
    """
    return targets_of(dataset).labels


@dataclass(frozen=True)
class Targets:
    """The targets of all samples: class labels, continuous values for regression, or neither."""

    labels: np.ndarray | None = None
    continuous: np.ndarray | None = None
    names: list[str] | None = None
    num_classes: int | None = None


def targets_of(dataset: Any) -> Targets:
    """All a dataset knows about its targets; `labels_of` and `extract_info` are the public functions."""
    if is_subset(dataset):  # which has all classes of the whole dataset, even without samples of them
        whole, indices = targets_of(dataset.dataset), np.asarray(dataset.indices, dtype=np.int64)
        labels = None if whole.labels is None else whole.labels[indices]
        continuous = None if whole.continuous is None else whole.continuous[indices]
        return replace(whole, labels=labels, continuous=continuous)
    if is_concatenation(dataset):
        return _concatenate([targets_of(part) for part in dataset.datasets])
    labels, continuous, names = None, None, _class_names(dataset)
    if is_stream(dataset):
        pass  # only reading it would tell
    elif is_instance_of(dataset, HF_DATASET):
        column = label_column(dataset.features)
        if column is not None:
            # Selecting the column first leaves images and texts unread; "arrow" bypasses a transform of the user.
            values = dataset.select_columns([column]).with_format("arrow")[:].column(column)
            labels = None if values.null_count else _as_labels(values.to_numpy(), len(dataset))
    else:
        stored = _stored_labels(dataset)
        if stored is not None:
            labels = _after_target_transform(dataset, stored)
            names = names if np.array_equal(labels, stored) else None  # names of the untransformed labels
        elif is_instance_of(dataset, TENSORS):
            labels, continuous = _array_targets(dataset.tensors)
        elif isinstance(dataset, ArrayDataset):
            labels, continuous = _array_targets(dataset.arrays)
    return Targets(labels, continuous, names, _number_of_classes(dataset, labels, names))


def _concatenate(parts: Sequence[Targets]) -> Targets:
    names = [part.names for part in parts]
    known = [part.num_classes for part in parts if part.num_classes is not None]
    return Targets(
        labels=concatenated([part.labels for part in parts]),
        continuous=concatenated([part.continuous for part in parts]),
        names=names[0] if all(other == names[0] for other in names) else None,  # otherwise one label has several names
        num_classes=max(known) if len(known) == len(parts) else None,
    )


def concatenated(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """All arrays as one, if none is missing and their rows have one shape."""
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
    if labels is None or not labels.size or labels.max() >= _MAX_CLASSES:
        return None
    return int(labels.max()) + 1


def _class_names(dataset: Any) -> list[str] | None:
    is_hf = any(kind.__module__.split(".")[0] == "datasets" for kind in type(dataset).__mro__)
    features = getattr(dataset, "features", None) if is_hf else None
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
    """The labels a map-style dataset keeps in an attribute, or in samples that are in memory."""
    size = length(dataset)
    if size is None:
        return None
    stored = (getattr(dataset, name, None) for name in _LABEL_ATTRIBUTES)
    listed = (_labels_in(getattr(dataset, name, None)) for name in _SAMPLE_ATTRIBUTES)
    for values in chain(stored, listed):
        labels = _as_labels(values, size)
        if labels is not None:
            return labels
    return _as_labels(_labels_in(dataset), size)


def _labels_in(samples: Any) -> list[Any] | None:
    """The second item of every pair, or the label of every record, of samples in memory."""
    if not (isinstance(samples, list | tuple) or _holds_objects(samples)):
        return None
    found = []
    for sample in samples:
        if (isinstance(sample, tuple | list) or _holds_objects(sample)) and len(sample) == 2:
            found.append(sample[1])
        elif isinstance(sample, Mapping) and any(name in sample for name in LABEL_KEYS_OF_RECORDS):
            found.append(next(sample[name] for name in LABEL_KEYS_OF_RECORDS if name in sample))
        else:
            return None
    return found


def _holds_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object and value.ndim > 0


def _after_target_transform(dataset: Any, labels: np.ndarray) -> np.ndarray:
    """The labels after `target_transform`, if it returns labels (and not, say, one-hot rows)."""
    transform: Callable[[int], Any] | None = getattr(dataset, "target_transform", None)
    if transform is None:
        return labels
    from trainformer.data.order import preserved_generators

    unique, inverse = np.unique(labels, return_inverse=True)
    with preserved_generators():
        try:
            results = [transform(int(label)) for label in unique]
        except Exception:  # it expects something other than a plain label
            return labels
    shown = _as_labels(results, len(unique))
    return labels if shown is None else shown[inverse]


def _array_targets(arrays: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Labels or continuous targets among arrays or tensors: the one with a common label name, or the last of several.

    A boolean mask of queries may follow it.
    """
    target = None
    if isinstance(arrays, Mapping):
        target = next((arrays[name] for name in LABEL_KEYS_OF_RECORDS if name in arrays), None)
    elif isinstance(arrays, tuple) and len(arrays) > 1:
        is_marked = len(arrays) == 3 and str(arrays[-1].dtype) in ("torch.bool", "bool")
        target = arrays[-2] if is_marked else arrays[-1]
    array = _as_array(target)
    if array is None:
        return None, None
    if array.dtype.kind == "f" and array.ndim in (1, 2):
        return None, array.astype(np.float64)
    return _as_labels(array, len(array)), None


def _as_labels(values: Any, size: int) -> np.ndarray | None:
    """One integer from 0 per sample, or None."""
    array = _as_array(values)
    if array is None or array.shape != (size,) or array.dtype.kind not in "iub":
        return None
    labels = array.astype(np.int64)
    return None if size and labels.min() < 0 else labels


def _as_array(values: Any) -> np.ndarray | None:
    if callable(values) or isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        return None
    if is_instance_of(values, "torch.Tensor"):
        values = values.detach().cpu()
        return (values.float() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16
    try:
        if isinstance(values, list | tuple):  # of numbers or of scalar tensors
            values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
        array = np.asarray(values)
        return np.asarray(array.tolist()) if array.dtype == object else array
    except (ValueError, TypeError, RuntimeError):  # ragged rows, or something else entirely
        return None


def label_column(features: Mapping[str, Any]) -> str | None:
    """An integer column with a common label name, else the only column with class names."""
    for name in LABEL_KEYS_OF_RECORDS:
        if str(getattr(features.get(name), "dtype", "")).startswith(("int", "uint", "bool")):
            return name
    named = [name for name, feature in features.items() if getattr(feature, "names", None)]
    return named[0] if len(named) == 1 else None


# -- kinds of dataset --------------------------------------------------------------------------------------


def is_instance_of(value: Any, name: str) -> bool:
    """isinstance() by the qualified name of a class, for packages that may not be installed."""
    return any(qualified_name(kind) == name for kind in type(value).__mro__)


def qualified_name(kind: type) -> str:
    """Module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_subset(dataset: Any) -> bool:
    """Whether a dataset is a `Subset`, ours or torch's, or a subclass."""
    return isinstance(dataset, Subset) or is_instance_of(dataset, SUBSET)


def is_concatenation(dataset: Any) -> bool:
    """Whether a dataset is a `Concatenation`, or torch's `ConcatDataset`."""
    return isinstance(dataset, Concatenation) or is_instance_of(dataset, CONCATENATION)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated. torch's IterableDataset has a __getitem__ too, which always raises."""
    return is_instance_of(dataset, STREAM) or is_instance_of(dataset, HF_STREAM) or not hasattr(dataset, "__getitem__")


def length(dataset: Any) -> int | None:
    """The number of samples, or None if it is unknown."""
    if is_stream(dataset) and not (is_instance_of(dataset, STREAM) or is_instance_of(dataset, HF_STREAM)):
        return None  # a loader or a generator: its length, if any, counts batches
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def same_class_indices(dataset: Any, classes: Sequence[str] | None) -> bool:
    """Whether a dataset numbers its classes as the training data does, as far as class names tell."""
    own = None if dataset is None else targets_of(dataset).names
    return own is None or classes is None or list(own) == list(classes)[: len(own)]


def align_classes(dataset: Any, classes: Sequence[str] | None, open_set: bool = False) -> Any:
    """A validation dataset whose labels mean the same classes as in training.

    A folder that lacks some classes numbers the others differently, so its labels would silently mean other classes.
    Datasets with `remap_classes` (our folders and lists) are remapped by name; others that disagree are an error. In an
    `open_set` (retrieval, for instance) classes unknown to training are allowed: labels only group samples.
    """
    base = dataset
    while is_subset(base):
        base = base.dataset
    own = targets_of(base).names  # also finds the names in HF datasets
    if classes is None or own is None or list(own) == list(classes):
        return dataset
    unknown = [str(name) for name in own if name not in classes]
    if unknown and open_set:
        return dataset
    if unknown:
        raise DataError(
            f"Expected validation classes that the training data has, received others: {', '.join(unknown[:8])}. "
            f"Training has: {', '.join(map(str, classes[:20]))}."
        )
    if hasattr(base, "remap_classes") and base is dataset:
        return base.remap_classes(classes)
    if open_set:
        return dataset
    if any(name != classes[index] for index, name in enumerate(own)):
        raise DataError(
            f"Expected validation data that numbers classes as the training data does ({dict(enumerate(classes))}), "
            f"received {dict(enumerate(own))}: labels would mean other classes. Give both one list of classes."
        )
    return dataset
