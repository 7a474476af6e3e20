"""The operations of `BatchAugment`: geometry, colour, blur, solarise, erase.

Each has two halves. On the host, in NumPy: parameters from random numbers. On the device: applying them to a batch.

**Geometry.** Boxes are rows of (top, left, height, width) in whole pixels. A `Placement` says where each pixel of a
view lies in the image, and `resample` reads it with one `grid_sample`, bilinearly and never outside the box: a view
equals torchvision's `resized_crop` (antialias=False) of the same box. Where a box shrinks by a factor of 2 or more,
bilinear reading would skip pixels, so those samples are first averaged over cells of a power of 2, chosen per sample.

**Colour.** Brightness, contrast, saturation, hue and grey are one matrix product per sample. In YIQ, luma is one axis
and hue an angle around it: brightness scales everything, saturation scales the chroma, hue rotates it, grey removes it,
contrast scales about the mean luma. None of the last four moves the mean luma, so the five commute, and the random
order of torchvision's ColorJitter only changes what gets clipped on the way. Values are clipped to [0, 1] once, at the
end.

**Filters** (blur, solarise, erase) apply to the chosen samples only (`change_rows`): a blur at p = 0.1 costs a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TRIES = 10  # boxes tried before falling back to the centre, as in torchvision
CROP_DRAWS = 2 * TRIES + 2


def crop_boxes(
    draws: np.ndarray, image: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """Boxes (N, 4) by the rules of torchvision's RandomResizedCrop, from draws (N, `CROP_DRAWS`).

    The area is uniform in `scale`, the aspect ratio log-uniform in `ratio`. The first of ten tries that fits is used,
    else the largest centred box with an allowed ratio.

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
    """Boxes (N, 4) of the whole image."""
    return np.tile(np.array([0.0, 0.0, *image]), (samples, 1))


def shifts(draws: np.ndarray, size: tuple[int, int], share: float) -> np.ndarray:
    """Shifts (N, 2) in pixels, down and right, from draws (N, 2): up to this share of the side, at least one pixel.

    >>> shifts(np.array([[0.0, 0.999]]), (32, 32), 1 / 8).tolist()
    [[-4.0, 4.0]]
    """
    most = np.array([max(1, int(side * share)) for side in size])
    return np.floor(draws.astype(np.float64) * (2 * most + 1)) - most


@dataclass(frozen=True)
class Placement:
    """Where the pixels of a batch of views lie in their images.

    `table` (N, 2, 5), float32, has for rows and columns, in `grid_sample` coordinates: the first pixel, the step, the
    lowest and highest position that may be read, and how far beyond them is still inside the box. `cells` are the
    (height, width) of the averaging cells; if there are several, `order` sorts the samples by cell and `counts` has the
    number of samples of each.
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
    """The placement of views of this size; `flips` (N, 2) mirror vertically and horizontally, `moves` are `shifts`."""
    flips = np.zeros((len(boxes), 2), dtype=bool) if flips is None else flips
    moves = np.zeros((len(boxes), 2)) if moves is None else moves
    axes, cells = [], []
    for axis in (0, 1):
        start, length = boxes[:, axis], boxes[:, axis + 2]
        step = length / size[axis]
        cell = np.exp2(np.floor(np.log2(np.maximum(step, 1))))
        # Averaging works on whole cells: the last one may reach beyond the image, and counts as full.
        extent = np.ceil(image[axis] / cell) * cell
        flip = flips[:, axis]
        first = start + np.where(flip, length - step / 2, step / 2) - moves[:, axis] * np.where(flip, -step, step)
        edges = np.stack([first, start + cell / 2, start + length - cell / 2])
        base, low, high = 2 * edges / extent - 1
        axes.append(np.stack([base, 2 * np.where(flip, -step, step) / extent, low, high, cell / extent], axis=1))
        cells.append(cell)
    table = np.stack(axes, axis=1).astype(np.float32)
    both = np.stack(cells, axis=1)
    if (both == both[0]).all():  # the usual case; sorting would cost a tenth of the planning
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

    With `moved`, pixels outside the box are black.
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
    # Separate rows and columns take a third of the time of `affine_grid`, and can be clamped to the box.
    shape = len(images), *size
    grid = torch.stack([columns.unsqueeze(1).expand(shape), rows.unsqueeze(2).expand(shape)], dim=-1)
    return F.grid_sample(images, grid, padding_mode="zeros" if moved else "border", align_corners=False)


def _line(axis: Tensor, length: int, moved: bool) -> Tensor:
    """Positions (N, length) along one axis, in `grid_sample` coordinates."""
    base, step, low, high, reach = axis.unsqueeze(1).unbind(-1)
    places = torch.addcmul(base, step, torch.arange(length, device=axis.device, dtype=axis.dtype))
    inside = torch.minimum(torch.maximum(places, low), high)
    if not moved:
        return inside
    return inside.masked_fill((places - inside).abs() > reach, -3)  # -3 is beyond any pixel that could be interpolated


def _middle(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    """Height and width of the largest box with an allowed aspect ratio."""
    if width / height < ratio[0]:
        return min(height, round(width / ratio[0])), width
    if width / height > ratio[1]:
        return height, min(width, round(height * ratio[1]))
    return height, width


LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, which sums to 1 (torchvision's 0.2989 leaves white a little grey)

_YIQ = np.array([LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)])
_KEEP_LUMA = np.tile(np.array(LUMA), (3, 1))  # maps a pixel to its luma
_CHROMA = np.eye(3) - _KEEP_LUMA  # and to the rest
# A quarter turn of the chroma. In YIQ the order is red, blue, green; hue counts red, green, blue.
_QUARTER = np.linalg.inv(_YIQ) @ np.array([[0, 0, 0], [0, 0, 1], [0, -1, 0]]) @ _YIQ


def colour_maps(
    factors: np.ndarray, hue: np.ndarray, grey: np.ndarray, channels: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (N, C, C) and the weights (N,) of the mean luma to add, both float32.

    `factors` (N, 3) are brightness, contrast and saturation (1: unchanged), `hue` (N,) is in turns, `grey` (N,) selects
    the samples to decolour. With one channel only brightness and contrast apply.

    >>> matrix, luma = colour_maps(np.array([[0.5, 1.0, 1.0]]), np.zeros(1), np.zeros(1, dtype=bool))
    >>> (matrix[0] @ [0.2, 0.4, 0.6]).round(6).tolist(), luma.tolist()
    ([0.1, 0.2, 0.3], [0.0])
    """
    brightness, contrast, saturation = factors.astype(np.float64).T
    gain, luma = brightness * contrast, brightness * (1 - contrast)
    if channels == 1:
        return gain.reshape(-1, 1, 1).astype(np.float32), luma.astype(np.float32)
    chroma, angle = np.where(grey, 0.0, saturation), 2 * np.pi * hue.astype(np.float64)
    parts = np.stack([np.ones_like(gain), chroma * np.cos(angle), chroma * np.sin(angle)], axis=1)
    matrices = np.tensordot(gain[:, None] * parts, np.stack([_KEEP_LUMA, _CHROMA, _QUARTER]), axes=1)
    return matrices.astype(np.float32), luma.astype(np.float32)


def recolour(images: Tensor, matrices: Tensor, luma: Tensor) -> Tensor:
    """Apply the maps of `colour_maps` to float images (N, C, H, W), and clip to [0, 1]."""
    pixels = images.flatten(2)
    grey = pixels.mean(-1)
    if images.shape[1] == 3:
        red, green, blue = grey.unbind(1)
        grey = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    offset = (grey.reshape(-1) * luma).reshape(-1, 1, 1)
    # A GPU may use TF32 for matrix products, which rounds pixels to 11 bits; summing the channels is exact and
    # costs nothing there. A CPU is twice as fast with the product.
    mixed = _sum_channels(pixels, matrices, offset) if images.is_cuda else torch.baddbmm(offset, matrices, pixels)
    return mixed.clamp_(0, 1).reshape(images.shape)


def _sum_channels(pixels: Tensor, matrices: Tensor, offset: Tensor) -> Tensor:
    """`torch.baddbmm(offset, matrices, pixels)` without a matrix product."""
    mixed = torch.addcmul(offset, matrices[:, :, :1], pixels[:, :1])
    for channel in range(1, pixels.shape[1]):
        one = slice(channel, channel + 1)
        mixed.addcmul_(matrices[:, :, one], pixels[:, one])
    return mixed


_SMALL = 128  # pixels: up to this side a CPU blurs faster with matrix products than with convolutions


def change_rows(images: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to the images at `rows`, in place unless these are all of them."""
    if len(rows) == len(images):
        return change(images)
    return images.index_copy_(0, rows, change(images.index_select(0, rows)))


def blur_size(side: int) -> int:
    """Kernel size for images of this (shorter) side: a tenth of it, odd, at least 3.

    >>> [blur_size(side) for side in (8, 32, 96, 224)]
    [3, 3, 9, 23]
    """
    return max(3, side // 10 // 2 * 2 + 1)


def gaussian_kernels(sigma: np.ndarray, size: int) -> np.ndarray:
    """Normalised Gaussian kernels (N, size), float32, from standard deviations (N,) in pixels.

    >>> gaussian_kernels(np.array([1e-3]), 3).tolist()
    [[0.0, 1.0, 0.0]]
    """
    places = np.arange(size) - size // 2
    weights = np.exp(-0.5 * (places / sigma.astype(np.float64)[:, None]) ** 2)
    # Too small to matter in float32, but denormals are far slower on a CPU.
    weights[weights < 1e-10] = 0
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def gaussian_blur(images: Tensor, kernels: Tensor) -> Tensor:
    """Convolve each image with its own kernel (N, size) along both axes; edges are reflected."""
    # On a CPU, products with banded matrices take a quarter (32 pixels) or half (96) of the time of a convolution,
    # which also pays 1 ms for every new number of samples. A GPU might round the products to TF32.
    if images.device.type == "cpu" and max(images.shape[2:]) <= _SMALL:
        return _blur_by_matrices(images, kernels)
    return _blur_by_convolution(images, kernels)


def _blur_by_convolution(images: Tensor, kernels: Tensor) -> Tensor:
    count, channels, height, _ = images.shape
    size = kernels.shape[1]
    weights = kernels.repeat_interleave(channels, dim=0)
    padded = F.pad(images, [size // 2] * 4, mode="reflect").reshape(1, count * channels, height + size - 1, -1)
    across = F.conv2d(padded, weights.reshape(-1, 1, 1, size), groups=count * channels)
    return F.conv2d(across, weights.reshape(-1, 1, size, 1), groups=count * channels).reshape(images.shape)


def _blur_by_matrices(images: Tensor, kernels: Tensor) -> Tensor:
    count, channels, height, width = images.shape
    down = _blur_matrices(kernels, height)
    across = down if height == width else _blur_matrices(kernels, width)
    rows = torch.bmm(images.reshape(count, channels * height, width), across.mT)
    return torch.matmul(down.unsqueeze(1), rows.reshape(images.shape))


def _blur_matrices(kernels: Tensor, side: int) -> Tensor:
    """Matrices (N, side, side): row `i` has the kernel centred at `i`, reflected at the edges."""
    count, size = kernels.shape
    places = torch.arange(side, device=kernels.device).unsqueeze(1)
    places = (places + torch.arange(size, device=kernels.device) - size // 2).abs()
    places = side - 1 - (side - 1 - places).abs()
    matrices = kernels.new_zeros(count, side, side)
    return matrices.scatter_add_(2, places.expand(count, -1, -1), kernels.unsqueeze(1).expand(-1, side, -1))


def solarise(images: Tensor, threshold: float) -> Tensor:
    """Invert values from the threshold on.

    >>> solarise(torch.tensor([0.25, 0.5, 1.0]), 0.5).tolist()
    [0.25, 0.5, 0.0]
    """
    return torch.where(images >= threshold, 1 - images, images)


def erase_boxes(
    draws: np.ndarray, image: tuple[int, int], area: tuple[float, float] = (0.02, 1 / 3), aspect: float = 0.3
) -> np.ndarray:
    """Rectangles (N, 4) as top, bottom, left, right in float32, from draws (N, 4).

    The share of the image is uniform in `area`, the aspect ratio log-uniform from `aspect` to its inverse; both are
    clipped to the image.
    """
    height, width = image
    size, shape, y, x = draws.astype(np.float64).T
    pixels = (area[0] + size * (area[1] - area[0])) * height * width
    ratio = aspect ** (2 * shape - 1)
    tall = np.rint(np.sqrt(pixels * ratio)).clip(1, height)
    wide = np.rint(np.sqrt(pixels / ratio)).clip(1, width)
    top, left = np.floor(y * (height - tall + 1)), np.floor(x * (width - wide + 1))
    return np.stack([top, top + tall, left, left + wide], axis=1).astype(np.float32)


def erase(images: Tensor, boxes: Tensor) -> Tensor:
    """Set one rectangle of each image to 0, which is the mean after normalisation."""
    top, bottom, left, right = boxes.unsqueeze(-1).unbind(1)
    y = torch.arange(images.shape[-2], device=images.device)
    x = torch.arange(images.shape[-1], device=images.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    return images.masked_fill((rows.unsqueeze(-1) & columns.unsqueeze(-2)).unsqueeze(1), 0)
