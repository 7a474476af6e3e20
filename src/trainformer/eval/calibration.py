"""Calibration of probabilities: reliability, expected calibration error, proper scores, and temperature scaling.

All functions take the probabilities (N, classes) and labels (N,) of a whole set, and compute in float64. The prediction
is the most probable class, its confidence the probability of that class.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, check_count, expected

logger = logging.getLogger(__name__)

# Returned if no finite temperature is optimal: all predictions correct, or worse than chance.
_COLDEST, _HOTTEST = 0.01, 100.0


@dataclass(frozen=True)
class Reliability:
    """Per bin of confidence: mean confidence, accuracy, and number of samples. Empty bins have 0."""

    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """The reliability diagram: bins of equal width, each open at its lower and closed at its upper edge.

    >>> reliability(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]), bins=2)
    Reliability(confidence=tensor([0.0000, 0.8000]), accuracy=tensor([0.0000, 0.5000]), count=tensor([0, 2]))
    """
    probabilities, labels = _checked(probabilities, labels)
    check_count("bins", bins, do="Pass bins=15.")
    confidence, predictions = probabilities.max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)[1:-1]
    index = torch.bucketize(confidence, edges)
    count = torch.bincount(index, minlength=bins)
    sums = torch.zeros(2, bins, dtype=confidence.dtype, device=confidence.device)
    sums.index_add_(1, index, torch.stack((confidence, (predictions == labels).to(confidence))))
    means = (sums / count.clamp(min=1)).float()
    return Reliability(means[0], means[1], count)


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """ECE (Guo et al., 2017): the gap between confidence and accuracy per bin, averaged over samples.

    >>> round(expected_calibration_error(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0])), 4)
    0.4
    """
    found = reliability(probabilities, labels, bins)
    gaps = (found.confidence - found.accuracy).abs() * found.count
    return gaps.sum().item() / len(labels)


def brier_score(probabilities: Tensor, labels: Tensor) -> float:
    """Mean squared distance between the probabilities and the one-hot label: 0 is perfect, 2 the worst.

    >>> round(brier_score(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0])), 4)
    0.5
    """
    probabilities, labels = _checked(probabilities, labels)
    right = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
    # |p - e|^2 = |p|^2 - 2 p_label + 1, without the one-hot matrix.
    return (probabilities.square().sum(1) - 2 * right + 1).mean().item()


def negative_log_likelihood(probabilities: Tensor, labels: Tensor) -> float:
    """Mean negative log probability of the label. A probability of 0 counts as the smallest float: 87, not infinity.

    >>> round(negative_log_likelihood(torch.tensor([[0.5, 0.5]]), torch.tensor([1])), 4)
    0.6931
    """
    probabilities, labels = _checked(probabilities, labels)
    right = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
    return -right.clamp(min=torch.finfo(torch.float32).tiny).log().mean().item()


@torch.no_grad()
def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature T that minimises the negative log likelihood of ``softmax(logits / T)`` (Guo et al., 2017).

    Fit it on validation data and divide the logits of new data by it; predictions do not change. If no finite
    temperature is optimal (all predictions correct, or worse than chance), returns 0.01 or 100 with a warning.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 1, 1])), 3)  # 3 of 4 correct: a gap of log(3)
    3.641
    """
    scores, labels = _checked_scores(logits, labels, "logits")
    scores = scores - scores.gather(1, labels.unsqueeze(1))  # relative to the label: the loss is logsumexp
    # The loss is convex in 1 / T, so its slope has one root: bracketed Newton finds it in about 6 passes over the data.
    low, high, inverse = 1 / _HOTTEST, 1 / _COLDEST, 1.0
    if _slope(scores, low)[0] >= 0 or _slope(scores, high)[0] <= 0:
        best = _HOTTEST if _slope(scores, low)[0] >= 0 else _COLDEST
        logger.warning("No finite temperature is optimal for these %d logits: using %g.", len(labels), best)
        return best
    for _ in range(100):
        slope, curve = _slope(scores, inverse)
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        step = inverse - slope / curve if curve > 0 else low
        # The bracket spans four decades, so bisect geometrically.
        following = step if low < step < high else (low * high) ** 0.5
        if abs(following - inverse) <= 1e-9 * inverse:
            break
        inverse = following
    return 1 / inverse


def _slope(scores: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean loss with respect to 1 / T."""
    weights = (scores * inverse).softmax(1)
    mean = (weights * scores).sum(1)
    variance = (weights * (scores - mean.unsqueeze(1)).square()).sum(1)
    return mean.mean().item(), variance.mean().item()


def _checked(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    probabilities, labels = _checked_scores(probabilities, labels, "probabilities")
    # bf16 probabilities of 1,000 classes sum to 1 within 1 %.
    total = probabilities.sum(1)
    if bool((probabilities < 0).any()) or bool(((total - 1).abs() > 0.02).any()):
        worst = total[(total - 1).abs().argmax()].item()
        received = f"values from {probabilities.min().item():.4g}, and a sum of {worst:.4g}"
        what = "probabilities: not negative, and a sum of 1 for each sample"
        raise BadArgument(expected(what, received, "Pass logits.softmax(-1)."))
    return probabilities, labels


def _checked_scores(scores: Tensor, labels: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if scores.ndim != 2 or labels.ndim != 1 or len(scores) != len(labels) or labels.is_floating_point():
        shapes = f"{name} {tuple(scores.shape)} and labels {tuple(labels.shape)} of {labels.dtype}"
        raise BadArgument(expected(f"{name} (N, classes) and labels (N,) that are class indices", shapes))
    if len(scores) == 0:
        raise DataError(expected("at least 1 sample", 0))
    scores = scores.detach()
    scores = scores.float() if scores.device.type == "mps" else scores.double()
    bad = int((~torch.isfinite(scores).all(1)).sum())
    if bad:
        raise DataError(f"Expected {name} to be finite, received NaN or infinity in {bad} of {len(scores)} rows.")
    labels = labels.to(scores.device).long()
    lowest, highest = (int(v) for v in labels.aminmax())
    if lowest < 0 or highest >= scores.shape[1]:
        wrong = lowest if lowest < 0 else highest
        raise BadArgument(expected(f"labels from 0 to {scores.shape[1] - 1}", wrong))
    return scores, labels
