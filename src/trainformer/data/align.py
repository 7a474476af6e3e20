"""Validation data must number their classes as the training data do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainformer.core.errors import DataError
from trainformer.data.labels import is_subset, targets_of


def numbered_alike(dataset: Any, classes: Sequence[str] | None) -> bool:
    """Whether labels of a data set mean the classes they mean in training, as far as names tell."""
    own = None if dataset is None else targets_of(dataset).names
    return own is None or classes is None or list(own) == list(classes)[: len(own)]


def align_classes(dataset: Any, classes: Sequence[str] | None, open_set: bool = False) -> Any:
    """The data set with labels that mean what they mean in training.

    In an `open_set` (retrieval, for instance) other classes than those of training are allowed: labels then only say
    which samples belong together.

    A folder that lacks some classes would number the others anew, and every label would silently mean another class.
    Folders we read ourselves are renumbered by name; other data sets that disagree are refused.
    """
    base = dataset
    while is_subset(base):
        base = base.dataset
    own = targets_of(base).names  # also of data sets that name their classes elsewhere, as HF's do
    if classes is None or own is None or list(own) == list(classes):
        return dataset
    unknown = [str(name) for name in own if name not in classes]
    if unknown and open_set:
        return dataset
    if unknown:
        raise DataError(
            f"The validation data have classes that the training data do not have: {', '.join(unknown[:8])}. "
            f"Training has: {', '.join(map(str, classes[:20]))}."
        )
    if hasattr(base, "renumber") and base is dataset:
        return base.renumber(classes)
    if open_set:
        return dataset
    agreeing = all(name == classes[index] for index, name in enumerate(own))
    if not agreeing:
        raise DataError(
            "Training and validation data number their classes differently "
            f"({dict(enumerate(own))} against {dict(enumerate(classes))}): the labels would not mean the same. "
            "Give both the same list of classes."
        )
    return dataset
