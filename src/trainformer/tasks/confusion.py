"""The confusion matrix of an evaluation as a record of the run, for tasks with classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_MOST_CLASSES = 100  # a matrix of more can neither be looked at nor printed
_CHOSEN = 50


def confusion_record(counts: Tensor | None, names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """What a task's `evaluation_records` tells of counts (classes, classes) whose rows are the true classes.

    Of more than 100 classes it has the 50 that are most often mistaken, as label or as prediction, in their order;
    `classes` says how many there are, and `totals`, `predicted` and `accuracy` are those over all of them.

    >>> import torch
    >>> confusion_record(torch.tensor([[3, 1], [0, 2]]), ["cat", "dog"])["confusion_matrix"]
    {'key': 'val', 'labels': ['cat', 'dog'], 'matrix': [[3, 1], [0, 2]]}
    """
    if counts is None:
        return {}
    labels = None if names is None else [names[i] if i < len(names) else str(i) for i in range(len(counts))]
    record: dict[str, Any] = {"key": "val"}
    if len(counts) > _MOST_CLASSES:
        wrong = counts.clone().fill_diagonal_(0)
        mistaken = (wrong.sum(0) + wrong.sum(1)).argsort(descending=True, stable=True)
        chosen = mistaken[:_CHOSEN].sort().values
        record["classes"] = len(counts)
        record["totals"], record["predicted"] = counts.sum(1)[chosen].tolist(), counts.sum(0)[chosen].tolist()
        record["accuracy"] = float(counts.diagonal().sum() / counts.sum().clamp(min=1))
        labels = [str(i) if labels is None else labels[i] for i in chosen.tolist()]
        counts = counts[chosen][:, chosen]
    return {"confusion_matrix": {**record, "labels": labels, "matrix": counts.tolist()}}
