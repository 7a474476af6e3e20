"""Colour as one affine map per sample: brightness, contrast, saturation, hue and grey in a single matrix product.

Owns the matrices (on the host, in NumPy) and their application (on the device). In the colour space YIQ, luma is one
axis and hue an angle around it, and each operation is simple there: brightness scales everything, saturation scales
the chroma, hue turns it, grey removes it, contrast scales all about the mean luma of the image. None of the last four
moves the mean luma, so the five commute: there is no order to choose, and random orders, as in torchvision's
ColorJitter, differ only in what is cut off on the way. Here values are cut to [0, 1] once, at the end.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, which sums to 1 (torchvision's 0.2989 leaves white a little grey)

_YIQ = np.array([LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)])
_KEEP_LUMA = np.tile(np.array(LUMA), (3, 1))  # a pixel becomes its luma
_CHROMA = np.eye(3) - _KEEP_LUMA  # what is left of it
# A quarter turn of the chroma. In YIQ red, blue and green follow one another; hue is counted red, green, blue.
_QUARTER = np.linalg.inv(_YIQ) @ np.array([[0, 0, 0], [0, 0, 1], [0, -1, 0]]) @ _YIQ


def colour_maps(
    factors: np.ndarray, hue: np.ndarray, grey: np.ndarray, channels: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (N, C, C) and the weights (N,) of the mean luma that is added, both float32.

    `factors` (N, 3) are those of brightness, contrast and saturation, where 1 changes nothing; `hue` (N,) is in whole
    turns, `grey` (N,) says which samples lose their colour. One channel knows brightness and contrast alone.

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
    """Float images (N, C, H, W) through the maps of `colour_maps`, cut to [0, 1]."""
    pixels = images.flatten(2)
    grey = pixels.mean(-1)
    if images.shape[1] == 3:
        red, green, blue = grey.unbind(1)
        grey = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    offset = (grey.reshape(-1) * luma).reshape(-1, 1, 1)
    # A GPU may be told to multiply matrices in TF32, which would round pixels to 11 bits; adding up the channels
    # is exact and costs it nothing. A CPU is twice as fast with the product.
    mixed = _add_up(pixels, matrices, offset) if images.is_cuda else torch.baddbmm(offset, matrices, pixels)
    return mixed.clamp_(0, 1).reshape(images.shape)


def _add_up(pixels: Tensor, matrices: Tensor, offset: Tensor) -> Tensor:
    """What `torch.baddbmm(offset, matrices, pixels)` is."""
    mixed = torch.addcmul(offset, matrices[:, :, :1], pixels[:, :1])
    for channel in range(1, pixels.shape[1]):
        one = slice(channel, channel + 1)
        mixed.addcmul_(matrices[:, :, one], pixels[:, one])
    return mixed
