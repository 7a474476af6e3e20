"""What is done to some samples of a batch: Gaussian blur, solarising, erasing.

Owns the three operations, on all images they are given. Which samples are chosen is known to the host, which hands
over those alone (`change_rows`): a blur at p = 0.1 costs a tenth, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL = 128  # pixels: up to here a CPU blurs faster by matrix products than by convolution


def change_rows(images: Tensor, rows: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The images with `change` applied to those at `rows` (None: to all), in place where there are rows."""
    if rows is None:
        return change(images)
    return images.index_copy_(0, rows, change(images.index_select(0, rows)))


def blur_size(side: int) -> int:
    """Width of the Gaussian kernel for images of this (shorter) side: a tenth of it, odd, at least 3.

    >>> [blur_size(side) for side in (8, 32, 96, 224)]
    [3, 3, 9, 23]
    """
    return max(3, side // 10 // 2 * 2 + 1)


def gaussian_kernels(sigma: np.ndarray, size: int) -> np.ndarray:
    """Kernels (N, size) that sum to 1, float32, from standard deviations (N,) in pixels.

    >>> gaussian_kernels(np.array([1e-3]), 3).tolist()
    [[0.0, 1.0, 0.0]]
    """
    places = np.arange(size) - size // 2
    weights = np.exp(-0.5 * (places / sigma.astype(np.float64)[:, None]) ** 2)
    # Float32 would not notice such a weight, but a CPU does: it is far slower on denormals.
    weights[weights < 1e-10] = 0
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def gaussian_blur(images: Tensor, kernels: Tensor) -> Tensor:
    """Images (N, C, H, W), each convolved with its own kernel (N, size) along both sides; edges are mirrored."""
    # As products with banded matrices, small images take a quarter (32 pixels) or half (96) of the time on a CPU,
    # where every new number of samples also costs a convolution some 1 ms. A GPU might round the products to TF32.
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
    """Matrices (N, side, side): row `i` has the kernel around place `i`, what lies beyond the edges mirrored."""
    count, size = kernels.shape
    places = torch.arange(side, device=kernels.device).unsqueeze(1)
    places = (places + torch.arange(size, device=kernels.device) - size // 2).abs()
    places = side - 1 - (side - 1 - places).abs()
    matrices = kernels.new_zeros(count, side, side)
    return matrices.scatter_add_(2, places.expand(count, -1, -1), kernels.unsqueeze(1).expand(-1, side, -1))


def solarise(images: Tensor, threshold: float) -> Tensor:
    """Values from the threshold upwards are inverted.

    >>> solarise(torch.tensor([0.25, 0.5, 1.0]), 0.5).tolist()
    [0.25, 0.5, 0.0]
    """
    return torch.where(images >= threshold, 1 - images, images)


def erase_boxes(
    draws: np.ndarray, image: tuple[int, int], area: tuple[float, float] = (0.02, 1 / 3), aspect: float = 0.3
) -> np.ndarray:
    """Rectangles (N, 4), as top, bottom, left, right in float32, from draws (N, 4).

    The share of the image is uniform within `area`, height over width is uniform in logarithm from `aspect` to its
    inverse; what would be longer than the image is cut to it.
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
    """Images with a rectangle each set to 0: the mean, once they are normalised."""
    top, bottom, left, right = boxes.unsqueeze(-1).unbind(1)
    y = torch.arange(images.shape[-2], device=images.device)
    x = torch.arange(images.shape[-1], device=images.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    return images.masked_fill((rows.unsqueeze(-1) & columns.unsqueeze(-2)).unsqueeze(1), 0)
