"""Intersection over union and pixel accuracy of a whole dataset, from counts of pixels per image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SegmentationScores(NamedTuple):
    """Scores over all pixels. `iou` has one value per class, NaN where a class neither occurs nor is predicted."""

    miou: float
    pixel_accuracy: float
    iou: Tensor


def pixel_counts(predicted: Tensor, mask: Tensor, num_classes: int, ignore_index: int = 255) -> Tensor:
    """Pixels of each class in one image: correct ones, predicted ones and those of the mask, as (3, classes).

    Counts of several images are added.

    >>> pixel_counts(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 255]]), num_classes=2).tolist()
    [[1, 1], [1, 1], [1, 1]]
    """
    labels = mask.long()
    # An additional class takes the pixels that do not count: indexing by a mask would sync with the device.
    invalid = labels == ignore_index
    labels = labels.masked_fill(invalid, num_classes)
    guesses = predicted.long().masked_fill(invalid, num_classes)
    hits = torch.where(guesses == labels, labels, num_classes)
    return torch.stack([_histogram(part, num_classes) for part in (hits, guesses, labels)])


def _histogram(values: Tensor, bins: int) -> Tensor:
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=values.device)
    flat = values.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:bins]


def segmentation_scores(counts: Tensor) -> SegmentationScores:
    """Scores from the counts of all images (N, 3, classes). The mean is over classes that occur or are predicted.

    >>> segmentation_scores(torch.tensor([[[1, 1], [2, 1], [1, 2]]])).miou
    0.5
    """
    hits, guesses, labels = counts.sum(0).double()
    union = guesses + labels - hits
    iou = hits / union  # 0 / 0 is NaN
    present = union > 0
    valid = labels.sum()
    return SegmentationScores(
        miou=iou[present].mean().item() if bool(present.any()) else float("nan"),
        pixel_accuracy=(hits.sum() / valid).item() if valid > 0 else float("nan"),
        iou=iou,
    )
