"""Where the pixels of a view come from: random boxes, mirrored or shifted, read with one `grid_sample`.

Two halves. On the host, in NumPy: boxes from draws, and from boxes a `Placement`, the few numbers per sample that say
where each pixel of the view lies in the image. On the device: `resample`, which reads them. Boxes are rows of (top,
left, height, width) in whole pixels.

Reading is bilinear and never leaves the box, so that a view equals torchvision's `resized_crop` (antialias=False) on
the same box. Where a box is shrunk by a factor of 2 or more, bilinear reading would skip pixels: such samples are first
averaged over cells of a power of 2, chosen per sample by its own box, so that no sample depends on its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TRIES = 10  # boxes that are tried before the middle of the image is taken, as in torchvision
CROP_DRAWS = 2 * TRIES + 2


def crop_boxes(
    draws: np.ndarray, image: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """Boxes (N, 4) by the rules of torchvision's RandomResizedCrop, from draws (N, `CROP_DRAWS`).

    The area is uniform between the two shares of the image, width over height is uniform in logarithm. Of ten tries
    the first that fits is taken; where none does, the largest box in the middle whose shape is allowed.

    >>> boxes = crop_boxes(np.full((1, CROP_DRAWS), 0.5), (40, 40), scale=(0.25, 0.25), ratio=(1.0, 1.0))
    >>> boxes.tolist()
    [[10.0, 10.0, 20.0, 20.0]]
    """
    height, width = image
    draws = draws.astype(np.float64)
    area = height * width * (scale[0] + draws[:, :TRIES] * (scale[1] - scale[0]))
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + draws[:, TRIES : 2 * TRIES] * (high - low))
    wide, tall = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
    first, rows = fits.argmax(1), np.arange(len(draws))
    found = fits[rows, first]
    middle_tall, middle_wide = _middle(height, width, ratio)
    tall = np.where(found, tall[rows, first], middle_tall)
    wide = np.where(found, wide[rows, first], middle_wide)
    y, x = draws[:, 2 * TRIES], draws[:, 2 * TRIES + 1]
    top = np.where(found, np.floor(y * (height - tall + 1)), (height - middle_tall) // 2)
    left = np.where(found, np.floor(x * (width - wide + 1)), (width - middle_wide) // 2)
    return np.stack([top, left, tall, wide], axis=1)


def whole_boxes(samples: int, image: tuple[int, int]) -> np.ndarray:
    """Boxes (N, 4) that hold everything."""
    return np.tile(np.array([0.0, 0.0, *image]), (samples, 1))


def shifts(draws: np.ndarray, size: tuple[int, int], share: float) -> np.ndarray:
    """Whole pixels (N, 2) down and right, from draws (N, 2): at most this share of the side, at least one pixel.

    >>> shifts(np.array([[0.0, 0.999]]), (32, 32), 1 / 8).tolist()
    [[-4.0, 4.0]]
    """
    most = np.array([max(1, int(side * share)) for side in size])
    return np.floor(draws.astype(np.float64) * (2 * most + 1)) - most


@dataclass(frozen=True)
class Placement:
    """Where the pixels of a batch of views lie in their images.

    `table` (N, 2, 5), float32, has for the rows and for the columns of a view, in the coordinates of `grid_sample`: the
    first pixel, the step to the next, the lowest and the highest place that may be read, and how far beyond them is
    still inside the box. `cells` are the cells (height, width) over which samples are averaged first: one pair for
    all, or several; then `order` has the samples sorted by their cells, and `counts` says how many there are of each.
    """

    table: np.ndarray
    cells: list[tuple[int, int]]
    counts: list[int]
    order: np.ndarray | None


def place(
    boxes: np.ndarray,
    image: tuple[int, int],
    size: tuple[int, int],
    *,
    flips: np.ndarray | None = None,
    moves: np.ndarray | None = None,
) -> Placement:
    """Views of this size from these boxes; `flips` (N, 2) mirror top-bottom and left-right, `moves` are `shifts`."""
    flips = np.zeros((len(boxes), 2), dtype=bool) if flips is None else flips
    moves = np.zeros((len(boxes), 2)) if moves is None else moves
    axes, cells = [], []
    for axis in (0, 1):
        start, length = boxes[:, axis], boxes[:, axis + 2]
        step = length / size[axis]
        cell = np.exp2(np.floor(np.log2(np.maximum(step, 1))))
        # Averaging leaves whole cells: the last one may reach beyond the image, and counts as if it were full.
        extent = np.ceil(image[axis] / cell) * cell
        flip = flips[:, axis]
        first = start + np.where(flip, length - step / 2, step / 2) - moves[:, axis] * np.where(flip, -step, step)
        edges = np.stack([first, start + cell / 2, start + length - cell / 2])
        base, low, high = 2 * edges / extent - 1
        axes.append(np.stack([base, 2 * np.where(flip, -step, step) / extent, low, high, cell / extent], axis=1))
        cells.append(cell)
    table = np.stack(axes, axis=1).astype(np.float32)
    both = np.stack(cells, axis=1)
    if (both == both[0]).all():  # nearly always, and sorting would cost a tenth of the planning
        return Placement(table, [(int(both[0, 0]), int(both[0, 1]))], [len(boxes)], None)
    pairs, which, counts = np.unique(both, axis=0, return_inverse=True, return_counts=True)
    found = [(int(tall), int(wide)) for tall, wide in pairs]
    return Placement(table, found, counts.tolist(), np.argsort(which.reshape(-1), kind="stable"))


def resample(
    images: Tensor,
    table: Tensor,
    size: tuple[int, int],
    placement: Placement,
    *,
    order: Tensor | None = None,
    moved: bool = False,
) -> Tensor:
    """Views (N, C, *size) of float images. `table` and `order` are the placement's, on the device of the images.

    With `moved`, what lies outside the box is black; without, nothing does.
    """
    if order is None:
        return _read(_averaged(images, placement.cells[0]), table, size, moved)
    out = images.new_empty(len(images), images.shape[1], *size)
    for rows, cell in zip(order.split(placement.counts), placement.cells, strict=True):
        part = _averaged(images.index_select(0, rows), cell)
        out.index_copy_(0, rows, _read(part, table.index_select(0, rows), size, moved))
    return out


def _averaged(images: Tensor, cell: tuple[int, int]) -> Tensor:
    if cell == (1, 1):
        return images
    return F.avg_pool2d(images, cell, ceil_mode=True, count_include_pad=False)


def _read(images: Tensor, table: Tensor, size: tuple[int, int], moved: bool) -> Tensor:
    rows, columns = (_line(table[:, axis], size[axis], moved) for axis in (0, 1))
    # Rows and columns are independent: a third of the time of `affine_grid`, and each can be kept within its box.
    shape = len(images), *size
    grid = torch.stack([columns.unsqueeze(1).expand(shape), rows.unsqueeze(2).expand(shape)], dim=-1)
    return F.grid_sample(images, grid, padding_mode="zeros" if moved else "border", align_corners=False)


def _line(axis: Tensor, length: int, moved: bool) -> Tensor:
    """Places (N, length) along one axis, in the coordinates of `grid_sample`."""
    base, step, low, high, reach = axis.unsqueeze(1).unbind(-1)
    places = torch.addcmul(base, step, torch.arange(length, device=axis.device, dtype=axis.dtype))
    inside = torch.minimum(torch.maximum(places, low), high)
    if not moved:
        return inside
    return inside.masked_fill((places - inside).abs() > reach, -3)  # -3 is beyond any pixel that could be blended in


def _middle(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    """Height and width of the largest box of an allowed shape."""
    if width / height < ratio[0]:
        return min(height, round(width / ratio[0])), width
    if width / height > ratio[1]:
        return height, min(width, round(height * ratio[1]))
    return height, width
