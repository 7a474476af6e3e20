"""Resizing pixels, and the preprocessing of a trained image model: as a description, as a function, and as a graph.

All three give the same pixels, bit by bit, because all follow Pillow's integer arithmetic: resizing sums with
coefficients of 22 bits and rounds to 8 bits after each direction. torch's own resizing of uint8 images depends on the
CPU, and ONNX's on the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.pixels import image_tensor, is_pil, with_channels

INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "box", "hamming", "nearest")
_PRECISION = 22  # bits of Pillow's coefficients
_MODES = {1: "L", 3: "RGB"}
_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0, "box": 0.5, "hamming": 1.0}


@dataclass(frozen=True)
class ImagePreprocessing:
    """How pixels become the input of a model.

    An image is resized to cover `cover` (height, width) with its aspect ratio kept, and its center is cropped to
    `size`; without `cover` it is stretched to `size`. Then ``(pixel / 255 - mean) / std``, with one mean and std per
    channel.

    >>> import numpy as np
    >>> gray = ImagePreprocessing((32, 32), (36, 36), "bicubic", (0.5,), (0.25,))
    >>> gray(np.full((50, 70), 255, np.uint8)).unique()
    tensor([2.])
    """

    size: tuple[int, int]
    cover: tuple[int, int] | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return len(self.mean)

    def __call__(self, image: Any) -> Tensor:
        """The input of the model for one image: a PIL image, or uint8 pixels as an array or a tensor."""
        pixels = image_tensor(fitted(with_channels(image, self.channels), self.size, self.cover, self.interpolation))
        if pixels.dtype != torch.uint8:
            raise DataError(expected("uint8 pixels from 0 to 255", f"an image of {pixels.dtype}"))
        return Normalization(self.mean, self.std)(pixels)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        resize = {"size": self.cover or self.size, "mode": "stretch" if self.cover is None else "cover"}
        return {
            "channels": self.channels,
            "color": _MODES.get(self.channels),
            "apply_exif_orientation": True,
            "resize": {**resize, "interpolation": self.interpolation, "antialias": True, "like": "Pillow"},
            "crop": None if self.cover is None else {"size": self.size, "mode": "center"},
            "rescale": 1 / 255,
            "mean": self.mean,
            "std": self.std,
            "input_size": self.size,
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ImagePreprocessing:
        """Read the result of `as_dict`, which may come from anybody."""
        try:
            resize = given["resize"]
            cover = None if resize["mode"] == "stretch" else _pair(resize["size"])
            mean, std = (tuple(float(value) for value in given[name]) for name in ("mean", "std"))
            known = cls(_pair(given["input_size"]), cover, str(resize["interpolation"]), mean, std)
            if resize["mode"] not in ("stretch", "cover") or known.interpolation not in INTERPOLATIONS:
                raise ValueError("an unknown mode or interpolation")
            if len(mean) != len(std) or len(mean) != given["channels"] or not all(std):
                raise ValueError("not one mean and one std per channel")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"Expected a description of the preprocessing, received something else ({error})."
            ) from None
        return known

    def module(self) -> nn.Module:
        """A module that does the same to a batch (N, C, H, W) of uint8 images of any size, to be exported."""
        do = "Export without it, and prepare the images as preprocessing.json says."
        if self.channels not in _MODES:
            raise BadArgument(expected("images with 1 or 3 channels to put the preprocessing in", self.channels, do))
        if self.interpolation not in _FILTERS:
            raise BadArgument(expected(f"an interpolation among {', '.join(_FILTERS)}", self.interpolation, do))
        return _GraphPreprocessing(self)


def _pair(value: Any) -> tuple[int, int]:
    height, width = value
    if not all(isinstance(side, int) and 0 < side <= 1 << 16 for side in (height, width)):
        raise ValueError(f"a size of {value}")
    return height, width


# -- single images -----------------------------------------------------------------------------------------


def fitted(image: Any, size: tuple[int, int], cover: tuple[int, int] | None, interpolation: str) -> Any:
    """A PIL image or uint8 tensor resized to cover `cover` and cropped to `size`, or stretched to `size`."""
    height, width = (image.height, image.width) if is_pil(image) else image.shape[-2:]
    if not height or not width:
        raise DataError(expected("an image with pixels", f"one of {height} x {width}"))
    if cover is None:
        return resized(image, size, interpolation)
    tall, wide = max(cover[0], cover[1] * height // width), max(cover[1], cover[0] * width // height)
    top, left = round((tall - size[0]) / 2), round((wide - size[1]) / 2)
    image = resized(image, (tall, wide), interpolation)
    if is_pil(image):
        return image.crop((left, top, left + size[1], top + size[0]))
    return image[..., top : top + size[0], left : left + size[1]].contiguous()


def resized(image: Any, size: tuple[int, int], interpolation: str) -> Any:
    """A PIL image or a uint8 tensor (..., C, H, W) in another size, with the same pixels for both."""
    pil = require("PIL.Image", "vision", "to resize images")
    method = getattr(pil.Resampling, interpolation.upper())
    if is_pil(image):
        return _resized_pil(image, size, method)
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    channels = image.shape[-3] if image.ndim > 2 and image.shape[-3] in _MODES else 1
    # Channels are resampled independently, so any number of them can be resized as gray images.
    planes = image.reshape(-1, channels, *image.shape[-2:]).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    made = np.empty((len(planes), *size, channels), np.uint8)
    for number, plane in enumerate(planes):
        small = _resized_pil(pil.fromarray(plane[..., 0] if channels == 1 else plane), size, method)
        made[number] = np.asarray(small).reshape(*size, channels)
    return torch.from_numpy(made).permute(0, 3, 1, 2).reshape(*image.shape[:-2], *size).contiguous()


def _resized_pil(image: Any, size: tuple[int, int], method: Any) -> Any:
    # One direction at a time: Pillow 13 chooses the order by its cost, and rounds after each.
    return image.resize((size[1], image.height), method).resize((size[1], size[0]), method)


class Normalization(nn.Module):
    """``(pixel / 255 - mean) / std`` of uint8 pixels (..., C, H, W), as one multiply-add."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        scale = torch.tensor([1 / (255 * s) for s in std]).reshape(-1, 1, 1)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).reshape(-1, 1, 1)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise pixels."""
        return pixels.float() * self.scale + self.shift


# -- graphs ------------------------------------------------------------------------------------------------


class _GraphPreprocessing(nn.Module):
    """Resize, crop and normalise with tensor operations alone, for graphs in which height and width are unknown.

    Each direction is a product with a matrix of Pillow's integer coefficients, in float64, which holds them exactly.
    Only the rows and columns of the crop are computed.
    """

    def __init__(self, spec: ImagePreprocessing) -> None:
        super().__init__()
        self.size, self.cover, self.interpolation = spec.size, spec.cover, spec.interpolation
        self.normalize = Normalization(spec.mean, spec.std)

    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 (N, C, H, W) to float32 (N, C, *size)."""
        height, width = pixels.shape[-2], pixels.shape[-1]
        # Tensors, not numbers: a comparison of symbolic sizes would fix them in the graph.
        old = [torch.full((), side, dtype=torch.float64, device=pixels.device) for side in (height, width)]
        if self.cover is None:
            new = [torch.full((), side, dtype=torch.float64, device=pixels.device) for side in self.size]
        else:
            tall, wide = self.cover
            new = [
                torch.clamp(torch.floor(wide * old[0] / old[1]), min=float(tall)),
                torch.clamp(torch.floor(tall * old[1] / old[0]), min=float(wide)),
            ]
        rows = self._coefficients(old[0], new[0], height, self.size[0])
        columns = self._coefficients(old[1], new[1], width, self.size[1])
        image = _rounded(torch.matmul(pixels.double(), columns.mT))
        return self.normalize(_rounded(torch.matmul(rows, image)))

    def _coefficients(self, old: Tensor, new: Tensor, length: int, kept: int) -> Tensor:
        """The matrix (kept, length) that resizes from `old` to `new` pixels and keeps those of the center."""
        scale = old / new
        first = torch.round((new - kept) / 2)  # half to even, as Python's round
        place = torch.arange(kept, dtype=torch.float64, device=old.device) + first
        center = ((place + 0.5) * scale)[:, None]
        index = torch.arange(length, device=old.device).double()[None]
        stretch = torch.clamp(scale, min=1.0)
        support = _SUPPORT[self.interpolation] * stretch
        low = torch.clamp(torch.floor(center - support + 0.5), min=0.0)
        high = torch.minimum(torch.floor(center + support + 0.5), old)
        weight = _FILTERS[self.interpolation]((index - center + 0.5) * (1 / stretch))
        weight = torch.where((index >= low) & (index < high), weight, torch.zeros_like(weight))
        weight = weight / weight.sum(1, keepdim=True) * (1 << _PRECISION)
        return torch.where(weight < 0, torch.ceil(weight - 0.5), torch.floor(weight + 0.5))


def _rounded(sums: Tensor) -> Tensor:
    return torch.clamp(torch.floor((sums + (1 << (_PRECISION - 1))) / (1 << _PRECISION)), 0.0, 255.0)


def _bilinear(x: Tensor) -> Tensor:
    return torch.clamp(1 - x.abs(), min=0.0)


def _bicubic(x: Tensor) -> Tensor:
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _sinc(x: Tensor) -> Tensor:
    angle = torch.where(x == 0, torch.ones_like(x), x * math.pi)
    return torch.where(x == 0, torch.ones_like(x), torch.sin(angle) / angle)


def _lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, _sinc(x) * _sinc(x / 3), torch.zeros_like(x))


def _box(x: Tensor) -> Tensor:
    return ((x > -0.5) & (x <= 0.5)).double()


def _hamming(x: Tensor) -> Tensor:
    x = x.abs()
    return torch.where(x < 1, _sinc(x) * (0.54 + 0.46 * torch.cos(x * math.pi)), torch.zeros_like(x))


_FILTERS = {"bilinear": _bilinear, "bicubic": _bicubic, "lanczos": _lanczos, "box": _box, "hamming": _hamming}
