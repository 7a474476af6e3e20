"""Metrics where a sample may have any number of labels, as functions of all scores and labels of a set."""

from __future__ import annotations

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, expected


def multilabel_metrics(scores: Tensor, labels: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """What (N, classes) scores are worth against labels of true and false, or 1 and 0.

    - ``f1_micro``: F1 of all decisions together, a class being predicted where its score is above the threshold;
    - ``f1``: the mean of the classes' F1, without classes that are neither a label nor predicted anywhere;
    - ``exact_match``: share of samples of which every class is decided right;
    - ``map``: the mean of the classes' average precision, without classes that no sample has.

    >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.6]])
    >>> found = multilabel_metrics(scores, torch.tensor([[1, 0], [0, 1], [0, 1]]))
    >>> {name: round(value, 4) for name, value in found.items()}
    {'f1_micro': 0.8571, 'f1': 0.8333, 'exact_match': 0.6667, 'map': 1.0}
    """
    if scores.ndim != 2 or scores.shape != labels.shape:
        shapes = f"{tuple(scores.shape)} and {tuple(labels.shape)}"
        raise BadArgument(expected("scores and labels of one shape (N, classes)", shapes))
    chosen, wanted = scores > threshold, labels.bool()
    right = (chosen & wanted).sum(0).double()
    either = (chosen.sum(0) + wanted.sum(0)).double()
    occurs = either > 0
    per_class = torch.where(occurs, 2 * right / either.clamp(min=1), 0.0)
    precisions = [average_precision(s, w) for s, w in zip(scores.T, wanted.T, strict=True) if bool(w.any())]
    return {
        "f1_micro": (2 * right.sum() / either.sum().clamp(min=1)).item(),
        "f1": (per_class.sum() / occurs.sum().clamp(min=1)).item(),
        "exact_match": (chosen == wanted).all(1).double().mean().item(),
        "map": torch.stack(precisions).mean().item() if precisions else 0.0,
    }


def average_precision(scores: Tensor, wanted: Tensor) -> Tensor:
    """The mean precision at the places of the wanted ones, of scores (N,) from high to low. Equal scores count at once.

    >>> average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]))
    tensor(0.8333, dtype=torch.float64)
    """
    order = scores.argsort(descending=True, stable=True)
    hits = wanted[order].double().cumsum(0)
    precision = hits / torch.arange(1, len(scores) + 1, device=scores.device)
    # Of equal scores none comes before another: all have the precision at the last of them.
    _, counts = scores[order].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0) - 1
    found = hits[ends].diff(prepend=hits.new_zeros(1))
    return (precision[ends] * found).sum() / hits[-1].clamp(min=1)
