"""Resizing and random augmentation of images, by name.

Most augmentations run per sample on the CPU, on PIL images and uint8 tensors. They draw from torch's global generator,
which the loader seeds for each sample. Two can also run on whole batches on the device (`BatchAugment`), about 20 times
as fast; that needs images of one size, i.e. tensors in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.models.backbones import BackboneConfig

if TYPE_CHECKING:
    from types import ModuleType

AugmentSpec = str | Callable[[Any], Any] | None  # a name from NAMES, a function of one image, or no augmentation
NAMES = ("none", "basic", "crop", "randaugment", "trivial")
ON_BATCHES = ("basic", "crop")  # those that can run on whole batches on the device
RESIZE_FIRST = (None, "none", "crop")  # those that start with a deterministic resize, which can be done once
FLIPPING = ("basic", "randaugment", "trivial")
SHIFT = 1 / 8  # of a side: 4 of 32 pixels, as is usual on CIFAR


def check_augment(augment: AugmentSpec) -> None:
    """Check that `sample_transform` knows an augmentation."""
    if augment is None or callable(augment) or augment in NAMES:
        return
    hint = did_you_mean(str(augment), NAMES)
    raise BadArgument(expected(f"augment to be a function or one of {', '.join(map(repr, NAMES))}", augment, hint))


def sample_transform(augment: AugmentSpec, geometry: BackboneConfig, from_files: bool) -> Callable[[Any], Any]:
    """Return the pipeline for one image. Images from files are resized and cropped, tensors only resized."""
    v2 = _v2()
    crops = from_files and geometry.crop_mode != "squash"
    fit: Callable[[Any], Any] = partial(_center_fit, geometry) if crops else _resize(geometry)
    if augment in (None, "none"):
        return fit
    if callable(augment):
        return v2.Compose([augment, _resize(geometry)])
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


def _center_fit(geometry: BackboneConfig, image: Any) -> Any:
    """Resize an image so that its center crop covers `crop_pct` of it, and crop."""
    functional = _v2().functional
    height, width = functional.get_size(image)
    tall, wide = (int(side / geometry.crop_pct) for side in geometry.size)
    if tall * width >= wide * height:
        wide = tall * width // height
    else:
        tall = wide * height // width
    mode = _v2().InterpolationMode(geometry.interpolation)
    return functional.center_crop(functional.resize(image, [tall, wide], interpolation=mode), list(geometry.size))


def _resize(geometry: BackboneConfig) -> Callable[[Any], Any]:
    return _v2().Resize(geometry.size, interpolation=_v2().InterpolationMode(geometry.interpolation))


def _v2() -> ModuleType:
    return require("torchvision.transforms.v2", "vision", "to resize and augment images")
