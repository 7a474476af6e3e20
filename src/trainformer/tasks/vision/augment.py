"""Resizing and random augmentation of images, by name.

Most augmentations run per sample on the CPU, on PIL images and uint8 tensors. They draw from torch's global generator,
which the loader seeds for each sample. Two can also run on whole batches on the device (`BatchAugment`), about 20 times
as fast; that needs images of one size, i.e. tensors in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.preprocessing import fitted
from trainformer.models.backbones import BackboneConfig

if TYPE_CHECKING:
    from types import ModuleType

AugmentSpec = str | Callable[[Any], Any] | None  # a name from NAMES, a function of one image, or no augmentation
NAMES = ("none", "basic", "crop", "randaugment", "trivial")
ON_BATCHES = ("basic", "crop")  # those that can run on whole batches on the device
FLIPPING = ("basic", "randaugment", "trivial")
SHIFT = 1 / 8  # of a side: 4 of 32 pixels, as is usual on CIFAR


def check_augment(augment: AugmentSpec) -> None:
    """Check that `sample_transform` knows an augmentation."""
    if augment is None or callable(augment) or augment in NAMES:
        return
    hint = did_you_mean(str(augment), NAMES)
    raise BadArgument(expected(f"augment to be a function or one of {', '.join(map(repr, NAMES))}", augment, hint))


def sample_transform(augment: AugmentSpec, geometry: BackboneConfig, crops: bool) -> Callable[[Any], Any]:
    """Return the pipeline for one image. With `crops`, images are resized and cropped, otherwise only resized."""
    fit = partial(_fitted, geometry, cover_of(geometry) if crops else None)
    if augment in (None, "none"):
        return fit
    v2 = _v2()
    if callable(augment):
        return v2.Compose([augment, partial(_fitted, geometry, None)])
    if augment == "crop":
        tall, wide = (max(1, int(side * SHIFT)) for side in geometry.size)
        return v2.Compose([fit, v2.RandomCrop(geometry.size, padding=[wide, tall])])  # padded with black
    assert isinstance(augment, str)
    interpolation = v2.InterpolationMode(geometry.interpolation)
    basic = [v2.RandomResizedCrop(geometry.size, interpolation=interpolation), v2.RandomHorizontalFlip()]
    bilinear = v2.InterpolationMode.BILINEAR
    policy = {
        "basic": [],
        "randaugment": [v2.RandAugment(interpolation=bilinear)],
        "trivial": [v2.TrivialAugmentWide(interpolation=bilinear)],
    }
    return v2.Compose([*basic, *policy[augment]])


def cover_of(geometry: BackboneConfig) -> tuple[int, int]:
    """The size that a resized image covers, so that its center crop shows `crop_pct` of it."""
    height, width = (int(side / geometry.crop_pct) for side in geometry.size)
    return height, width


def _fitted(geometry: BackboneConfig, cover: tuple[int, int] | None, image: Any) -> Any:
    if getattr(image, "dtype", None) in (None, torch.uint8):  # a PIL image, or pixels
        return fitted(image, geometry.size, cover, geometry.interpolation)
    v2 = _v2()  # what a function of the user has made
    return v2.functional.resize(image, geometry.size, interpolation=v2.InterpolationMode(geometry.interpolation))


def _v2() -> ModuleType:
    return require("torchvision.transforms.v2", "vision", "to resize and augment images")
