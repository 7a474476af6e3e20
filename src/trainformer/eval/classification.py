"""Metrics of classification, tagging and regression, computed once from all predictions and labels of a set.

Everything is computed from counts or in float64, so results do not depend on batch size or world size, and stays on the
device of the inputs. A ratio without cases counts as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import torch

from trainformer.core.errors import BadArgument, check_choice, expected

if TYPE_CHECKING:
    from torch import Tensor

Average = Literal["macro", "micro", "weighted"]


# -- one label per sample ----------------------------------------------------------------------------------


class PrecisionRecallF1(NamedTuple):
    """Three scalars, or three tensors with one value per class."""

    precision: Tensor
    recall: Tensor
    f1: Tensor


def accuracy(predictions: Tensor, labels: Tensor) -> Tensor:
    """Share of correct predictions, given as class indices (N,) or scores (N, classes).

    >>> accuracy(torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2]))
    tensor(0.6667)
    """
    if predictions.ndim == labels.ndim + 1:
        predictions = predictions.argmax(-1)
    _check_lengths(predictions, labels)
    return (predictions == labels).float().mean()


def topk_accuracy(scores: Tensor, labels: Tensor, k: int = 5) -> Tensor:
    """Share of samples whose label is among the `k` highest scores of (N, classes).

    With fewer than `k` classes every sample counts as correct.

    >>> topk_accuracy(torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]), torch.tensor([1, 2]), k=2)
    tensor(0.5000)
    """
    if k < 1:
        raise BadArgument(expected("k to be a positive integer", k))
    _check_lengths(scores, labels)
    return topk_correct(scores, labels, k).float().mean()


def topk_correct(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Per sample, whether its label is among the `k` highest scores."""
    best = scores.topk(min(k, scores.shape[-1]), dim=-1).indices
    return (best == labels.unsqueeze(-1)).any(-1)


def confusion_matrix(predictions: Tensor, labels: Tensor, num_classes: int | None = None) -> Tensor:
    """Counts (classes, classes): rows are true classes, columns predicted classes.

    `num_classes` defaults to the highest index found; pass it, or a class that never occurs has no row.

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), num_classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    _check_lengths(predictions, labels)
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

    `"macro"` is the mean over classes, `"weighted"` the mean weighted by class frequency, and `"micro"` pools all
    decisions (which is the accuracy, with one label per sample). Classes that are neither a label nor predicted are
    left out of the mean: they say nothing about the model.

    >>> precision_recall_f1(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])).f1
    tensor(0.6667)
    """
    if average is not None:
        check_choice("average", average, get_args(Average))
    counts = confusion_matrix(predictions, labels, num_classes).double()
    correct, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    if average == "micro":
        correct, true, predicted = correct.sum(), true.sum(), predicted.sum()
    values = [_ratio(correct, predicted), _ratio(correct, true), _ratio(2 * correct, true + predicted)]
    if average == "macro":
        occurs = (true + predicted) > 0
        values = [_ratio((value * occurs).sum(), occurs.sum()) for value in values]
    elif average == "weighted":
        values = [_ratio((value * true).sum(), true.sum()) for value in values]
    return PrecisionRecallF1(*(value.float() for value in values))


# -- several labels per sample -----------------------------------------------------------------------------


def multilabel_metrics(scores: Tensor, labels: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """Metrics of scores (N, classes) against labels of the same shape, booleans or 0 and 1.

    - ``f1_micro``: F1 over all decisions; a class is predicted if its score is above the threshold;
    - ``f1``: mean F1 of the classes, without classes that are neither a label nor predicted;
    - ``exact_match``: share of samples with every class correct;
    - ``map``: mean average precision of the classes, without classes that never occur.

    >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.6]])
    >>> found = multilabel_metrics(scores, torch.tensor([[1, 0], [0, 1], [0, 1]]))
    >>> {name: round(value, 4) for name, value in found.items()}
    {'f1_micro': 0.8571, 'f1': 0.8333, 'exact_match': 0.6667, 'map': 1.0}
    """
    if scores.ndim != 2 or scores.shape != labels.shape:
        shapes = f"{tuple(scores.shape)} and {tuple(labels.shape)}"
        raise BadArgument(expected("scores and labels of one shape (N, classes)", shapes))
    predicted, true = scores > threshold, labels.bool()
    correct = (predicted & true).sum(0).double()
    either = (predicted.sum(0) + true.sum(0)).double()
    precisions = [average_precision(s, t) for s, t in zip(scores.T, true.T, strict=True) if bool(t.any())]
    return {
        "f1_micro": _ratio(2 * correct.sum(), either.sum()).item(),
        "f1": _ratio(_ratio(2 * correct, either).sum(), (either > 0).sum()).item(),
        "exact_match": (predicted == true).all(1).double().mean().item(),
        "map": torch.stack(precisions).mean().item() if precisions else 0.0,
    }


def average_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """Mean precision at the ranks of the relevant samples, with scores (N,) sorted from high to low.

    >>> average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]))
    tensor(0.8333, dtype=torch.float64)
    """
    order = scores.argsort(descending=True, stable=True)
    hits = relevant[order].double().cumsum(0)
    precision = hits / torch.arange(1, len(scores) + 1, device=scores.device)
    # Ties: all samples of equal score get the precision at the last of them.
    _, counts = scores[order].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0) - 1
    found = hits[ends].diff(prepend=hits.new_zeros(1))
    return (precision[ends] * found).sum() / hits[-1].clamp(min=1)


# -- regression --------------------------------------------------------------------------------------------


def pearson(predictions: Tensor, targets: Tensor) -> Tensor:
    """Pearson correlation of two series (N,), from -1 to 1; 0 if one of them is constant.

    >>> pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    tensor(1.)
    """
    if predictions.ndim != 1 or predictions.shape != targets.shape:
        shapes = f"{tuple(predictions.shape)} and {tuple(targets.shape)}"
        raise BadArgument(expected("two series of one length, of shape (N,)", shapes))
    if len(predictions) == 0 or any(bool((values == values[0]).all()) for values in (predictions, targets)):
        return torch.zeros(())
    first, second = (values.double() - values.double().mean() for values in (predictions, targets))
    # Divide by each norm separately: their product may overflow.
    first, second = (values / values.norm().clamp(min=1e-300) for values in (first, second))
    return (first @ second).clamp(-1, 1).float()


def spearman(predictions: Tensor, targets: Tensor) -> Tensor:
    """Spearman correlation of two series (N,): the Pearson correlation of their ranks. Ties share their mean rank.

    >>> spearman(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.1, 0.2, 0.3]))
    tensor(1.)
    """
    return pearson(_ranks(predictions), _ranks(targets))


def _ranks(values: Tensor) -> Tensor:
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[index]


# -- entities in tagged sequences --------------------------------------------------------------------------

OUTSIDE = "O"
_BEGIN, _END = frozenset("BSU"), frozenset("ESLU")
_PREFIXES = frozenset("BIESLU")


class Entity(NamedTuple):
    """An entity of words `begin` up to, not including, `end`."""

    type: str
    begin: int
    end: int


class EntityScores(NamedTuple):
    """Precision, recall and F1."""

    precision: float
    recall: float
    f1: float


class TagScheme:
    """Reads entities from tags. The scheme (IOB `B-PER I-PER O`, IOBES or BILOU) is inferred from the tags.

    They are read leniently, as conlleval does: an entity also begins where the type changes. Tags without a prefix
    (`PER PER O`) join neighbours of the same type into one entity. `types` is empty if there are no prefixes and no
    `O`: then there are no entities.

    >>> scheme = TagScheme(["O", "B-PER", "I-PER", "B-LOC"])
    >>> scheme.types, scheme.entities(["B-PER", "I-PER", "O", "B-LOC"])
    (['LOC', 'PER'], [Entity(type='PER', begin=0, end=2), Entity(type='LOC', begin=3, end=4)])
    """

    def __init__(self, tags: Sequence[str]) -> None:
        inside = [tag for tag in tags if tag != OUTSIDE]
        prefixed = bool(inside) and all(tag[:1] in _PREFIXES and tag[1:2] in ("-", "_") for tag in inside)
        self._parts = {tag: (tag[0], tag[2:]) if prefixed else ("I", tag) for tag in inside}
        has_entities = prefixed or OUTSIDE in tags
        self.types = sorted({kind for _, kind in self._parts.values()}) if has_entities else []

    def entities(self, tags: Sequence[str]) -> list[Entity]:
        """The entities of a sequence, in order."""
        found: list[Entity] = []
        begin, previous = 0, ("", "")  # an empty prefix means that no entity is open
        for index, tag in enumerate([*tags, OUTSIDE]):
            prefix, kind = self._parts.get(tag, ("", ""))
            continues = prefix not in _BEGIN and previous[0] not in _END and kind == previous[1]
            if previous[0] and not (prefix and continues):
                found.append(Entity(previous[1], begin, index))
                previous = ("", "")
            if prefix and not previous[0]:
                begin = index
            previous = (prefix, kind)
        return found

    def counts(self, predicted: Sequence[str], true: Sequence[str]) -> np.ndarray:
        """Per type the numbers of correct (same words and type), predicted and true entities."""
        row = {kind: number for number, kind in enumerate(self.types)}
        table = np.zeros((len(self.types), 3), dtype=np.int32)
        both = set(self.entities(predicted)), set(self.entities(true))
        for column, entities in enumerate((both[0] & both[1], *both)):
            for entity in entities:
                table[row[entity.type], column] += 1
        return table


def entity_scores(correct: int, predicted: int, true: int) -> EntityScores:
    """Precision, recall and F1 from the counts of `TagScheme.counts`.

    >>> entity_scores(1, 2, 1)
    EntityScores(precision=0.5, recall=1.0, f1=0.6666666666666666)
    """
    return EntityScores(correct / max(predicted, 1), correct / max(true, 1), 2 * correct / max(predicted + true, 1))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), torch.zeros_like(part))


def _check_lengths(predictions: Tensor, labels: Tensor) -> None:
    if labels.ndim != 1 or predictions.shape[:1] != labels.shape:
        shapes = f"predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)}"
        raise BadArgument(expected("one prediction per label, labels of shape (N,)", shapes))
