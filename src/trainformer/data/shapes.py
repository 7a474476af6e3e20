"""The sample `shapes`: generated pictures of circles, squares and triangles, with masks and boxes.

For segmentation and detection without a download. A picture is a pure function of its number, so the data are the same
everywhere.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected

#: Names of the sample and the numbers of their pictures.
SHAPES = {"shapes": range(512), "shapes:test": range(1_000_000, 1_000_128)}
SHAPE_CLASSES = ("circle", "square", "triangle")
_SIZE = 64
_MOST = 3  # shapes per picture
_VISIBLE = 0.5  # the share of a shape that must be visible for it to have a box


class Picture(NamedTuple):
    """A picture with its mask (0: background, then the classes) and its shapes as boxes (x1, y1, x2, y2)."""

    image: np.ndarray  # (H, W, 3), uint8
    mask: np.ndarray  # (H, W), uint8
    boxes: np.ndarray  # (N, 4), float32
    labels: np.ndarray  # (N,), int64, from 0


def draw_shapes(number: int, size: int = _SIZE) -> Picture:
    """Draw a picture: one to three shapes on a noisy background. A shape that is hidden for the most part is left out.

    >>> picture = draw_shapes(0)
    >>> picture.image.shape, picture.mask.shape, len(picture.boxes) == len(picture.labels) > 0
    ((64, 64, 3), (64, 64), True)
    """
    rng = np.random.Generator(np.random.PCG64([0x5A4E, number]))
    y, x = np.mgrid[:size, :size] + 0.5
    image = np.broadcast_to(rng.uniform(0, 110, 3), (size, size, 3)).copy()
    owner = np.full((size, size), -1)
    labels, whole = [], []
    for place in range(rng.integers(1, _MOST + 1)):
        kind, radius = int(rng.integers(len(SHAPE_CLASSES))), rng.uniform(0.12, 0.26) * size
        center = rng.uniform(radius, size - radius, 2)
        inside = _inside(kind, (x - center[0]) / radius, (y - center[1]) / radius)
        image[inside] = rng.uniform(130, 255, 3)
        owner[inside] = place
        labels.append(kind)
        whole.append(int(inside.sum()))
    image += rng.normal(0, 12, image.shape)
    mask, boxes, kept = np.zeros((size, size), np.uint8), [], []
    for place, kind in enumerate(labels):
        visible = owner == place
        mask[visible] = kind + 1
        if visible.sum() >= _VISIBLE * whole[place]:
            rows, columns = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
            boxes.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
            kept.append(kind)
    pixels = np.clip(np.round(image), 0, 255).astype(np.uint8)
    return Picture(pixels, mask, np.array(boxes, np.float32).reshape(-1, 4), np.array(kept, np.int64))


def shape_pictures(name: str) -> list[Picture]:
    """All pictures of the sample `"shapes"` (512) or `"shapes:test"` (128)."""
    if name not in SHAPES:
        raise BadArgument(expected("the name of a sample", name, did_you_mean(name, SHAPES)))
    return [draw_shapes(number) for number in SHAPES[name]]


def is_shapes(name: Any) -> bool:
    """Whether this is the name of the sample; write `"./shapes"` for a folder. A misspelt name is an error."""
    if not isinstance(name, str) or name in SHAPES:
        return isinstance(name, str)
    hint = did_you_mean(name, SHAPES, most=1)
    if hint and os.sep not in name and not os.path.exists(os.path.expanduser(name)):
        raise DataError(expected("a path, or the name of the sample", name, hint))
    return False


def _inside(kind: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which points are inside of a shape of radius 1 around the origin."""
    if kind == 0:
        return x**2 + y**2 <= 1
    if kind == 1:
        return np.maximum(abs(x), abs(y)) <= 0.85
    return (y <= 0.8) & (abs(x) <= (y + 1) * 0.55)
