"""Resizing and random augmentation of a picture together with its boxes, with torchvision's transforms.

They draw from torch's global generator, which the loader seeds for each sample. Boxes of less than a pixel are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.tasks.vision.joint_augment import NAMES, _v2, fitted_size

BoxAugment = str | Callable[[Any, Any], Any] | None  # a name of NAMES, or a function of (image, target)
_SCALES = (0.6, 1.4)


def check_box_augment(augment: BoxAugment) -> None:
    """Check that `BoxTransform` knows an augmentation."""
    if augment is None or callable(augment) or augment in NAMES:
        return
    what = f"augment to be a function of (image, target) or one of {', '.join(map(repr, NAMES))}"
    raise BadArgument(expected(what, augment, did_you_mean(str(augment), NAMES)))


class BoxTransform:
    """Brings a picture to `size`, for training with a random augmentation of picture and boxes alike.

    A picture is resized with its aspect ratio and padded at the right and the bottom. Boxes for evaluation
    (`train=False`) stay as they are.
    """

    def __init__(self, size: tuple[int, int], augment: BoxAugment, *, train: bool) -> None:
        self.size, self.augment, self.train = size, augment, train
        self._random: Callable[..., Any] | None = None
        if train and augment not in (None, "none"):
            self._random = augment if callable(augment) else self._named(str(augment))

    def __call__(self, image: Tensor, target: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.train and target is not None:
            kept = ~target["iscrowd"]  # crowds are for evaluation only
            target = {name: target[name][kept] for name in ("boxes", "labels")}
            if self._random is not None:
                image, target = self._augmented(image, target)
        height, width = fitted_size(tuple(image.shape[-2:]), self.size)
        scale = torch.tensor([width / image.shape[-1], height / image.shape[-2]] * 2)
        if tuple(image.shape[-2:]) != self.size:
            functional = _v2().functional
            image = functional.resize(image, [height, width], interpolation=_v2().InterpolationMode.BILINEAR)
            image = functional.pad(image, [0, 0, self.size[1] - width, self.size[0] - height], fill=0)
        if self.train and target is not None:
            target = {**target, "boxes": target["boxes"] * scale}
        return image, target

    def _augmented(self, image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tv = require("torchvision.tv_tensors", "vision", "to augment images with boxes")
        boxes = tv.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=tuple(image.shape[-2:]))
        assert self._random is not None
        pair = self._random(tv.Image(image), {**target, "boxes": boxes})
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], dict):
            raise BadArgument(expected("augment to return the image and the target", type(pair).__name__))
        image, target = _v2().SanitizeBoundingBoxes(min_size=1)(*pair)
        return image.as_subclass(torch.Tensor), {name: part.as_subclass(torch.Tensor) for name, part in target.items()}

    def _named(self, name: str) -> Callable[..., Any]:
        v2 = _v2()
        flip = v2.RandomHorizontalFlip()
        if name == "flip":
            return flip
        if name == "basic":
            return v2.Compose([v2.ScaleJitter(self.size, _SCALES), v2.RandomCrop(self.size, pad_if_needed=True), flip])
        parts = [v2.RandomPhotometricDistort(), v2.RandomZoomOut(side_range=(1.0, 2.0)), v2.RandomIoUCrop(), flip]
        return v2.Compose(parts)
