"""Converting PIL images, arrays and tensors to (C, H, W) tensors: channels, bit depth, order of dimensions.

Pixels stay uint8. A float image counts as normalised already, and its values are never changed: that makes it
impossible to normalise twice later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # 16 bits per pixel, which PIL's conversions may clip at 255
_GRAY_MODES = ("1", "L", "LA", "La", *_DEEP_MODES)
_MODE_OF_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}
_PLAUSIBLE_CHANNELS = (1, 3, 4)
_RED, _GREEN, _BLUE = 19595, 38470, 7471  # ITU-R 601 luma in 1/65536, as in PIL


class ImageTensors(TensorDataset):
    """Images in memory, (N, C, H, W), with optional labels and class names. Batches take one index operation."""

    classes: list[str]
    targets: Tensor

    def __init__(self, images: Tensor, labels: Tensor | None = None, classes: Sequence[str] | None = None) -> None:
        super().__init__(*((images,) if labels is None else (images, labels)))
        # Absent rather than None, so that hasattr() works as with torchvision's datasets.
        if labels is not None:
            self.targets = labels
        if classes is not None:
            self.classes = list(classes)

    @property
    def images(self) -> Tensor:
        return self.tensors[0]

    def with_images(self, images: Tensor) -> ImageTensors:
        """A copy with other images."""
        return ImageTensors(images, getattr(self, "targets", None), getattr(self, "classes", None))


def is_pil(image: Any) -> bool:
    """Whether something is a PIL image, without importing PIL."""
    return any(kind.__module__ == "PIL.Image" and kind.__qualname__ == "Image" for kind in type(image).__mro__)


def with_channels(image: Any, channels: int | None = None) -> Image.Image | Tensor:
    """Convert to this number of channels: PIL images stay PIL (8 bits), anything else becomes a (C, H, W) tensor.

    ``None`` keeps the channels of the image, except for an alpha channel of a PIL image.
    """
    if is_pil(image):
        return _convert_pil(image, channels)
    return tensor_channels(image_tensor(image), channels)


def image_tensor(image: Any) -> Tensor:
    """An image as a (C, H, W) tensor: uint8 for pixels, float32 for real values.

    >>> image_tensor(np.zeros((5, 7, 3), dtype=np.uint8)).shape
    torch.Size([3, 5, 7])
    """
    if is_pil(image):
        image = _convert_pil(image, None) if image.mode not in ("L", "RGB", "RGBA") else image
        array = np.array(image)  # a copy: PIL's buffer is read-only
        return _channels_first(torch.from_numpy(array), last_preferred=True)
    if isinstance(image, np.ndarray):
        # NumPy has strides and dtypes that torch refuses.
        tensor = torch.from_numpy(np.ascontiguousarray(image))
        return _channels_first(_eight_bits(tensor), last_preferred=True)
    if isinstance(image, torch.Tensor):
        return _channels_first(_eight_bits(image), last_preferred=False)
    do = "Return (image, label), a dict with 'image' and 'label', or the image alone from the dataset."
    raise DataError(expected("an image to be a PIL image, a tensor or a NumPy array", type(image).__name__, do))


def channels_in(shape: Sequence[int]) -> int:
    """Number of channels of an image of this shape, channels first or last.

    >>> channels_in((3, 32, 32)), channels_in((32, 32, 3)), channels_in((28, 28))
    (3, 3, 1)
    """
    if len(shape) == 2:
        return 1
    return shape[2] if _is_channels_last(shape, last_preferred=False) else shape[0]


def tensor_channels(image: Tensor, channels: int | None) -> Tensor:
    """A (..., C, H, W) tensor with another number of channels: gray is repeated, colour becomes luma (bitwise as in
    PIL), alpha is dropped.
    """
    have = image.shape[-3]
    if channels is None or channels == have:
        return image
    if have == 1:
        return image.expand(*image.shape[:-3], channels, *image.shape[-2:]).contiguous()
    if have in (2, 4) and channels in (have - 1, 1, 3):
        return tensor_channels(image[..., : have - 1, :, :], channels)
    if have == 3 and channels == 1:
        red, green, blue = (image[..., i : i + 1, :, :] for i in range(3))
        if image.is_floating_point():
            return (red * _RED + green * _GREEN + blue * _BLUE) / 65536
        total = red.int() * _RED + green.int() * _GREEN + blue.int() * _BLUE
        return ((total + 32768) >> 16).to(torch.uint8)
    what = f"images with {channels} channels"
    raise DataError(expected(what, f"images with {have}", f"Pass in_chans={have}, or convert the images."))


def _eight_bits(tensor: Tensor) -> Tensor:
    """uint8 for pixels of any depth, float32 for real values."""
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.is_floating_point():
        return tensor.float()
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8) * 255
    if tensor.dtype == torch.uint16:
        return _from_sixteen_bits(tensor)
    what = "pixels as uint8 (0 to 255), uint16 or bool, or a float image that is normalised already"
    do = "If the values are 0 to 255, convert them with .to(torch.uint8) (NumPy: .astype('uint8'))."
    raise DataError(expected(what, str(tensor.dtype), do))


def _from_sixteen_bits(tensor: Tensor) -> Tensor:
    return ((tensor.int().clamp(0, 65535) + 128) // 257).to(torch.uint8)  # 65535 / 257 is 255 exactly


def _channels_first(image: Tensor, last_preferred: bool) -> Tensor:
    if image.ndim == 2:
        return image.unsqueeze(0)
    if image.ndim != 3:
        raise DataError(
            expected("an image of shape (C, H, W), (H, W, C) or (H, W)", f"one of shape {tuple(image.shape)}")
        )
    if _is_channels_last(image.shape, last_preferred):
        return image.permute(2, 0, 1).contiguous()
    return image


def _is_channels_last(shape: Sequence[int], last_preferred: bool) -> bool:
    """Arrays are usually channels-last and tensors channels-first; the other order applies if only that fits."""
    first, last = shape[0] in _PLAUSIBLE_CHANNELS, shape[-1] in _PLAUSIBLE_CHANNELS
    return last and (last_preferred or not first)


def _convert_pil(image: Image.Image, channels: int | None) -> Image.Image:
    if image.mode == "F":
        raise DataError(
            expected("an image with whole-number pixels", "one of 32-bit floats (PIL mode 'F')", "Save it with 8 bits.")
        )
    if image.mode in _DEEP_MODES:
        pil = require("PIL.Image", "vision", "to read images")
        deep = torch.from_numpy(np.asarray(image).astype(np.int32))
        image = pil.fromarray(_from_sixteen_bits(deep).numpy())
    if channels is None:
        channels = 1 if image.mode in _GRAY_MODES else 3
    if channels not in _MODE_OF_CHANNELS:
        what = "in_chans to be 1, 3 or 4 for images from files"
        raise DataError(expected(what, channels, "Images with other channels can be given as tensors."))
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")  # otherwise PIL warns that the palette's transparency is lost
    mode = _MODE_OF_CHANNELS[channels]
    return image if image.mode == mode else image.convert(mode)
