"""Metrics of regression, and the area under the ROC curve, over a whole dataset, as in scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor


def regression_scores(predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """R², RMSE and MAE; with several targets (N, K) the mean over targets. R² is NaN if a target is constant.

    >>> regression_scores(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    {'r2': 0.5, 'rmse': 0.5773502691896257, 'mae': 0.3333333333333333}
    """
    guesses, values = (part.double().reshape(len(part), -1) for part in (predictions, targets))
    errors = guesses - values
    spread = (values - values.mean(0)).square().sum(0)
    r2 = (1 - errors.square().sum(0) / spread).mean()
    rmse = errors.square().mean(0).sqrt().mean()
    found = {"r2": r2.item(), "rmse": rmse.item(), "mae": errors.abs().mean().item()}
    return found if torch.isfinite(r2) else {**found, "r2": float("nan")}


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve of two classes; equal scores count half. NaN if there is one class only.

    >>> roc_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    positive = labels.bool()
    wins, losses = int(positive.sum()), int((~positive).sum())
    if wins == 0 or losses == 0:
        return float("nan")
    _, inverse, counts = scores.double().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]  # the mean rank of equal scores
    return ((ranks[positive].sum() - wins * (wins + 1) / 2) / (wins * losses)).item()


def macro_auc(probabilities: Tensor, labels: Tensor) -> float:
    """The AUC of two classes, or the mean AUC of each class against the others; NaN if a class does not occur."""
    if probabilities.shape[1] == 2:
        return roc_auc(probabilities[:, 1], labels == 1)
    each = [roc_auc(probabilities[:, place], labels == place) for place in range(probabilities.shape[1])]
    return sum(each) / len(each)
