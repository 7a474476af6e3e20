"""How well predicted numbers follow the wanted ones: Pearson's and Spearman's correlation, of a whole set."""

from __future__ import annotations

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, expected


def pearson(predictions: Tensor, targets: Tensor) -> Tensor:
    """Linear correlation of two series (N,), from -1 to 1; 0 where one of them never changes.

    >>> pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    tensor(1.)
    """
    if predictions.ndim != 1 or predictions.shape != targets.shape:
        shapes = f"{tuple(predictions.shape)} and {tuple(targets.shape)}"
        raise BadArgument(expected("two series of one length, of shape (N,)", shapes))
    if len(predictions) == 0:
        return torch.zeros(())
    first, second = (values.double() - values.double().mean() for values in (predictions, targets))
    # Each length by itself: their product may be beyond the numbers there are.
    lengths = first.norm().clamp(min=1e-300), second.norm().clamp(min=1e-300)
    constant = any(bool((values == values[0]).all()) for values in (predictions, targets))
    return torch.zeros(()) if constant else ((first / lengths[0]) @ (second / lengths[1])).clamp(-1, 1).float()


def spearman(predictions: Tensor, targets: Tensor) -> Tensor:
    """Correlation of the ranks of two series (N,): 1 where they are in one order. Equal values share their mean rank.

    >>> spearman(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.1, 0.2, 0.3]))
    tensor(1.)
    """
    return pearson(ranks(predictions), ranks(targets))


def ranks(values: Tensor) -> Tensor:
    """The rank of each value (N,), from 1; equal values have the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[place]
