"""Metrics of classification, as functions of all predictions and labels of a set.

Owns the arithmetic alone: which predictions, and when, is the task's business. Everything is computed from counts,
in whole numbers as long as possible, and stays on the device of its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from trainformer.core.errors import BadArgument, did_you_mean, expected

if TYPE_CHECKING:
    from torch import Tensor

Average = Literal["macro", "micro", "weighted"]


class PrecisionRecallF1(NamedTuple):
    """Three scalars, or three tensors with one value per class."""

    precision: Tensor
    recall: Tensor
    f1: Tensor


def accuracy(predictions: Tensor, labels: Tensor) -> Tensor:
    """Share of right predictions. `predictions` are class indices (N,) or scores (N, classes).

    >>> accuracy(torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2]))
    tensor(0.6667)
    """
    if predictions.ndim == labels.ndim + 1:
        predictions = predictions.argmax(-1)
    _same_length(predictions, labels)
    return (predictions == labels).float().mean()


def topk_accuracy(scores: Tensor, labels: Tensor, k: int = 5) -> Tensor:
    """Share of samples whose label is among the `k` highest scores of (N, classes).

    With fewer than `k` classes every sample counts as right.

    >>> topk_accuracy(torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]), torch.tensor([1, 2]), k=2)
    tensor(0.5000)
    """
    if k < 1:
        raise BadArgument(expected("k to be a positive integer", k))
    _same_length(scores, labels)
    return topk_correct(scores, labels, k).float().mean()


def topk_correct(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Per sample, whether its label is among the `k` highest scores."""
    best = scores.topk(min(k, scores.shape[-1]), dim=-1).indices
    return (best == labels.unsqueeze(-1)).any(-1)


def confusion_matrix(predictions: Tensor, labels: Tensor, num_classes: int | None = None) -> Tensor:
    """Counts (classes, classes): rows are the true classes, columns the predicted ones.

    `num_classes` is found from the values when not given; give it, or a class that never occurs has no row.

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), num_classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    _same_length(predictions, labels)
    if predictions.numel() == 0:
        size = num_classes or 0
        return torch.zeros(size, size, dtype=torch.int64, device=labels.device)
    lowest = int(torch.minimum(predictions.min(), labels.min()))
    highest = int(torch.maximum(predictions.max(), labels.max()))
    size = highest + 1 if num_classes is None else num_classes
    if lowest < 0 or highest >= size:
        wrong = lowest if lowest < 0 else highest
        raise BadArgument(expected(f"class indices from 0 to {size - 1}", wrong))
    cells = labels.long() * size + predictions.long()
    return torch.bincount(cells, minlength=size * size).reshape(size, size)


def precision_recall_f1(
    predictions: Tensor, labels: Tensor, average: Average | None = "macro", num_classes: int | None = None
) -> PrecisionRecallF1:
    """Precision, recall and F1: one number each, or one per class with ``average=None``.

    `"macro"` is the plain mean over classes, `"weighted"` the mean weighted by how often a class is the label, and
    `"micro"` pools all decisions (for one label per sample that is the accuracy). A ratio without cases counts as 0,
    and a class that is neither a label nor ever predicted is left out of the mean: it says nothing about the model.

    >>> precision_recall_f1(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])).f1
    tensor(0.6667)
    """
    if average is not None and average not in get_args(Average):
        hint = did_you_mean(str(average), get_args(Average))
        raise BadArgument(expected("average to be 'macro', 'micro', 'weighted' or None", average, hint))
    counts = confusion_matrix(predictions, labels, num_classes).double()
    right, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    if average == "micro":
        right, true, predicted = right.sum(), true.sum(), predicted.sum()

    per_class = (_ratio(right, predicted), _ratio(right, true), _ratio(2 * right, true + predicted))
    if average == "macro":
        occurs = (true + predicted) > 0
        values = [_ratio((value * occurs).sum(), occurs.sum()) for value in per_class]
    elif average == "weighted":
        values = [_ratio((value * true).sum(), true.sum()) for value in per_class]
    else:
        values = list(per_class)
    return PrecisionRecallF1(*(value.float() for value in values))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where there is no whole."""
    return torch.where(whole > 0, part / whole.clamp(min=1), torch.zeros_like(part))


def _same_length(predictions: Tensor, labels: Tensor) -> None:
    if labels.ndim != 1 or predictions.shape[:1] != labels.shape:
        raise BadArgument(
            expected(
                "one prediction per label, labels of shape (N,)",
                f"predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)}",
            )
        )
