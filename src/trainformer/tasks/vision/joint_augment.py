"""Resizing and random augmentation of a picture together with its mask.

The transforms are torchvision's, which draw from torch's global generator: the loader seeds it for each sample. Fill
values are black for pixels (0, i.e. the mean, for normalised images) and `ignore_index` for masks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

JointAugment = str | Callable[[Any, Any], Any] | None  # a name of NAMES, or a function of (image, mask)
NAMES = ("none", "flip", "basic", "strong")
_SCALES = (0.5, 2.0)


def check_joint_augment(augment: JointAugment) -> None:
    """Check that `JointTransform` knows an augmentation."""
    if augment is None or callable(augment) or augment in NAMES:
        return
    what = f"augment to be a function of (image, mask) or one of {', '.join(map(repr, NAMES))}"
    raise BadArgument(expected(what, augment, did_you_mean(str(augment), NAMES)))


def fitted_size(size: tuple[int, ...], room: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same aspect ratio that fits into the room.

    >>> fitted_size((100, 50), (64, 64)), fitted_size((64, 64), (64, 64))
    ((64, 32), (64, 64))
    """
    scale = min(room[0] / size[0], room[1] / size[1])
    return max(1, min(room[0], round(size[0] * scale))), max(1, min(room[1], round(size[1] * scale)))


class JointTransform:
    """Brings a picture to `size`, for training with a random augmentation of picture and mask alike.

    Without augmentation a picture is resized with its aspect ratio and padded at the right and the bottom. A mask for
    evaluation (`train=False`) stays as it is.
    """

    def __init__(self, size: tuple[int, int], augment: JointAugment, *, train: bool, ignore_index: int) -> None:
        self.size, self.augment, self.train, self.ignore_index = size, augment, train, ignore_index
        self._random: Callable[..., Any] | None = None
        if train and augment not in (None, "none"):
            self._random = augment if callable(augment) else self._named(str(augment))

    def __call__(self, image: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.augment == "strong" and self.train and image.is_floating_point():
            raise BadArgument(
                expected(
                    "pixels as uint8 for augment='strong', which changes colours", str(image.dtype), "Use 'basic'."
                )
            )
        if self._random is not None and mask is not None:
            tv = require("torchvision.tv_tensors", "vision", "to augment images with masks")
            pair = self._random(tv.Image(image), tv.Mask(mask))
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise BadArgument(expected("augment to return the image and the mask", type(pair).__name__))
            image, mask = (part.as_subclass(torch.Tensor) for part in pair)
        image = self._fit(image, 0, nearest=False)
        if self.train and mask is not None:
            mask = self._fit(mask.unsqueeze(0), self.ignore_index, nearest=True).squeeze(0)
        return image, mask

    def _fit(self, image: Tensor, fill: int, nearest: bool) -> Tensor:
        if image.shape[-2:] == self.size:
            return image
        functional = _v2().functional
        height, width = fitted_size(tuple(image.shape[-2:]), self.size)
        mode = _v2().InterpolationMode.NEAREST_EXACT if nearest else _v2().InterpolationMode.BILINEAR
        resized = functional.resize(image, [height, width], interpolation=mode)
        return functional.pad(resized, [0, 0, self.size[1] - width, self.size[0] - height], fill=fill)

    def _named(self, name: str) -> Callable[..., Any]:
        v2 = _v2()
        tv = require("torchvision.tv_tensors", "vision", "to augment images with masks")
        flip = v2.RandomHorizontalFlip()
        if name == "flip":
            return flip
        fill = {tv.Image: 0, tv.Mask: self.ignore_index}
        scale = v2.ScaleJitter(self.size, scale_range=_SCALES, antialias=True)
        basic = [scale, v2.RandomCrop(self.size, pad_if_needed=True, fill=fill), flip]
        return v2.Compose(basic if name == "basic" else [*basic, v2.ColorJitter(0.4, 0.4, 0.4, 0.1)])


def _v2() -> ModuleType:
    return require("torchvision.transforms.v2", "vision", "to resize and augment images")
