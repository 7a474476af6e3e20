"""Mean average precision of detections over a whole dataset, as COCO defines it.

The numbers are those of pycocotools (`COCOeval` with `iouType="bbox"`); they are computed here from the rows that an
evaluation has collected, on any number of ranks, without a compiled package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
_AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
_MOST = (1, 10, 100)  # detections per image
_EPSILON = np.spacing(1)


class _Matches(NamedTuple):
    """Detections of one class in one image: scores, whether they match at each threshold, and which do not count."""

    scores: np.ndarray  # (D,)
    hits: np.ndarray  # (T, D)
    ignored: np.ndarray  # (T, D)
    positives: int


def average_precision(
    predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]], num_classes: int
) -> dict[str, Any]:
    """COCO's metrics of predictions (`boxes`, `scores`, `labels`) and targets (`boxes`, `labels`, `iscrowd`, `area`).

    Boxes are (x1, y1, x2, y2). Returns `map` (mean over IoU 0.5 to 0.95), `map_50`, `map_75`, those of small, medium
    and large objects, the recalls `mar_1`, `mar_10`, `mar_100`, and `per_class`, the `map` of each class. What cannot
    be computed, for want of objects, is NaN.

    >>> box = {"boxes": [[0, 0, 10, 10]], "labels": [0]}
    >>> found = average_precision([{**box, "scores": [0.9]}], [box], num_classes=1)
    >>> round(found["map"], 6), found["map_large"]
    (1.0, nan)
    """
    guesses, truths = [_arrays(one) for one in predictions], [_arrays(one) for one in targets]
    precision: dict[str, np.ndarray] = {}
    recall: dict[tuple[str, int], np.ndarray] = {}
    both = list(zip(guesses, truths, strict=True))
    # Of each class, only the images that have it.
    images_of = [
        [pair for pair in both if any((part["labels"] == k).any() for part in pair)] for k in range(num_classes)
    ]
    overlaps = [[_overlaps(*pair, label) for pair in images_of[label]] for label in range(num_classes)]
    for area, limits in _AREAS.items():
        curves = []
        for label in range(num_classes):
            pairs = zip(images_of[label], overlaps[label], strict=True)
            images = [_match(guess, truth, iou, limits) for (guess, truth), iou in pairs]
            curves.append(_curves(images, max(_MOST)))
            for most in _MOST if area == "all" else (max(_MOST),):
                recall.setdefault((area, most), np.zeros((num_classes, len(THRESHOLDS))))
                recall[area, most][label] = _curves(images, most)[1]
        precision[area] = np.stack([curve for curve, _ in curves])  # (classes, thresholds, recalls)
    whole = precision["all"]
    return {
        "map": _mean(whole),
        "map_50": _mean(whole[:, 0]),
        "map_75": _mean(whole[:, 5]),
        **{f"map_{area}": _mean(precision[area]) for area in ("small", "medium", "large")},
        **{f"mar_{most}": _mean(recall["all", most]) for most in _MOST},
        "per_class": [_mean(curve) for curve in whole],
    }


def _arrays(one: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found = {name: np.asarray(values) for name, values in one.items()}
    boxes = found["boxes"].astype(np.float64).reshape(-1, 4)
    sides = boxes[:, 2:] - boxes[:, :2]
    found["boxes"], found["size"] = boxes, sides.prod(1)
    found.setdefault("area", found["size"])
    found.setdefault("iscrowd", np.zeros(len(boxes), bool))
    return found


def _overlaps(guess: dict[str, np.ndarray], truth: dict[str, np.ndarray], label: int) -> tuple[np.ndarray, ...]:
    """Detections of a class by falling score (at most 100), its objects, and the IoU of each pair.

    The overlap with a crowd is the share of the detection that lies in it.
    """
    mine = np.flatnonzero(guess["labels"] == label)
    mine = mine[np.argsort(-guess["scores"][mine], kind="mergesort")][: max(_MOST)]
    theirs = np.flatnonzero(truth["labels"] == label)
    boxes, others = guess["boxes"][mine, None], truth["boxes"][None, theirs]
    sides = np.minimum(boxes[..., 2:], others[..., 2:]) - np.maximum(boxes[..., :2], others[..., :2])
    shared = sides.clip(min=0).prod(-1)
    sizes, other_sizes = guess["size"][mine, None], truth["size"][None, theirs]
    crowd = truth["iscrowd"][None, theirs].astype(bool)
    whole = np.where(crowd, sizes, sizes + other_sizes - shared)
    return mine, theirs, np.divide(shared, whole, out=np.zeros_like(shared), where=whole > 0)


def _match(
    guess: dict[str, np.ndarray],
    truth: dict[str, np.ndarray],
    overlaps: tuple[np.ndarray, ...],
    limits: tuple[float, float],
) -> _Matches:
    """Match detections to objects greedily, by falling score, at each threshold."""
    mine, theirs, iou = overlaps
    crowd, area = truth["iscrowd"][theirs].astype(bool), truth["area"][theirs]
    ignored = crowd | (area < limits[0]) | (area > limits[1])
    order = np.argsort(ignored, kind="mergesort")  # objects that count come first
    ignored, crowd, iou = ignored[order], crowd[order], iou[:, order]
    taken = np.zeros((len(THRESHOLDS), len(theirs)), bool)
    hits = np.zeros((len(THRESHOLDS), len(mine)), bool)
    skipped = np.zeros_like(hits)
    size = guess["size"][mine]
    outside = (size < limits[0]) | (size > limits[1])
    for t, threshold in enumerate(THRESHOLDS):
        for d in range(len(mine)):
            best, found = min(threshold, 1 - 1e-10), -1
            for g in range(len(theirs)):
                if taken[t, g] and not crowd[g]:
                    continue
                if found > -1 and not ignored[found] and ignored[g]:
                    break  # an object that counts was found, and only ignored ones are left
                if iou[d, g] < best:
                    continue
                best, found = iou[d, g], g
            if found > -1:
                taken[t, found] = hits[t, d] = True
                skipped[t, d] = ignored[found]
    skipped |= ~hits & outside[None]
    return _Matches(guess["scores"][mine], hits, skipped, int((~ignored).sum()))


def _curves(images: Sequence[_Matches], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Precision at 101 recalls for each threshold, and the highest recall; -1 if there are no objects."""
    positives = sum(image.positives for image in images)
    precision, recall = -np.ones((len(THRESHOLDS), len(_RECALLS))), -np.ones(len(THRESHOLDS))
    if positives == 0:
        return precision, recall
    scores = np.concatenate([image.scores[:most] for image in images])
    order = np.argsort(-scores, kind="mergesort")
    hits = np.concatenate([image.hits[:, :most] for image in images], axis=1)[:, order]
    ignored = np.concatenate([image.ignored[:, :most] for image in images], axis=1)[:, order]
    right = np.cumsum(hits & ~ignored, axis=1, dtype=np.float64)
    wrong = np.cumsum(~hits & ~ignored, axis=1, dtype=np.float64)
    precision[:], recall[:] = 0.0, 0.0
    if not scores.size:
        return precision, recall
    recalls, shares = right / positives, right / (right + wrong + _EPSILON)
    shares = np.maximum.accumulate(shares[:, ::-1], axis=1)[
        :, ::-1
    ]  # the best precision at this recall or a higher one
    for t in range(len(THRESHOLDS)):
        places = np.searchsorted(recalls[t], _RECALLS, side="left")
        known = places < recalls.shape[1]
        precision[t, known] = shares[t, places[known]]
    return precision, recalls[:, -1]


def _mean(values: np.ndarray) -> float:
    known = values[values > -1]
    return float(known.mean()) if known.size else float("nan")
