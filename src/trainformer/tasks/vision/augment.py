"""What is done to images before the model sees them: resizing and random augmentation.

Owns what the names of augmentations mean. Most run per sample on the CPU, on PIL images and on uint8 tensors alike,
with random numbers from torch's global generator, which the loader seeds for every sample, so that no two samples share
a draw. Two of them can run on whole batches on the device as well (`device_transform`), some 20 times as fast, which
takes images of one size: tensors in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.augment.pipeline import BatchAugment

if TYPE_CHECKING:
    from types import ModuleType

Augment = str | Callable[[Any], Any] | None
NAMES = ("none", "basic", "crop", "randaugment", "trivial")
_SHIFT = 1 / 8  # of a side: 4 of 32 pixels, as everybody does on CIFAR


@dataclass(frozen=True)
class Geometry:
    """How images are brought to the size the model takes: (height, width), and how a backbone was evaluated."""

    size: tuple[int, int]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"


def check_augment(augment: Augment) -> None:
    """Refuse what `sample_transform` would not know."""
    if augment is None or callable(augment) or augment in NAMES:
        return
    hint = did_you_mean(str(augment), NAMES)
    raise BadArgument(expected(f"augment to be a function or one of {', '.join(map(repr, NAMES))}", augment, hint))


def is_random(augment: Augment) -> bool:
    """Whether there is anything to do beyond resizing."""
    return augment not in (None, "none")


def resizes_first(augment: Augment) -> bool:
    """Whether the first thing done to an image is the same every time, so that it may be done once for all."""
    return augment in (None, "none", "crop")


def mirrors(augment: Augment) -> bool:
    """Whether images are mirrored, so that a mirrored one means the same."""
    return augment in ("basic", "randaugment", "trivial")


def runs_on_batches(augment: Augment) -> bool:
    """Whether `device_transform` knows this augmentation."""
    return augment in ("basic", "crop")


def device_transform(
    augment: Augment, geometry: Geometry, statistics: tuple[Sequence[float], Sequence[float]], erase: float
) -> BatchAugment:
    """Augmentation, normalising with (mean, std) and erasing of a share of the images, as one module for batches."""
    assert runs_on_batches(augment)
    mean, std = statistics
    if augment == "basic":
        return BatchAugment(geometry.size, erase=erase, mean=mean, std=std)
    return BatchAugment(geometry.size, crop=False, shift=_SHIFT, flip=0.0, erase=erase, mean=mean, std=std)


def sample_transform(augment: Augment, geometry: Geometry, from_files: bool) -> Callable[[Any], Any]:
    """The pipeline for one image. Images from files are cropped to the shape wanted, tensors are resized whole."""
    v2 = _v2()
    fit = _fit(geometry, from_files)
    if not is_random(augment):
        return fit
    if callable(augment):
        return v2.Compose([augment, _resize(geometry)])
    if augment == "crop":
        return v2.Compose([fit, _shift(geometry.size)])
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


@dataclass(frozen=True)
class FitCentre:
    """Shrink an image until it just covers the wanted size (a little more, by `crop_pct`) and cut out the middle."""

    geometry: Geometry

    def __call__(self, image: Any) -> Any:
        functional = _v2().functional
        (height, width), size = functional.get_size(image), self.geometry.size
        tall, wide = (int(side / self.geometry.crop_pct) for side in size)
        if tall * width >= wide * height:
            wide = tall * width // height
        else:
            tall = wide * height // width
        mode = _v2().InterpolationMode(self.geometry.interpolation)
        return functional.center_crop(functional.resize(image, [tall, wide], interpolation=mode), list(size))


def _fit(geometry: Geometry, from_files: bool) -> Callable[[Any], Any]:
    return FitCentre(geometry) if from_files and geometry.crop_mode != "squash" else _resize(geometry)


def _resize(geometry: Geometry) -> Callable[[Any], Any]:
    return _v2().Resize(geometry.size, interpolation=_v2().InterpolationMode(geometry.interpolation))


def _shift(size: tuple[int, int]) -> Callable[[Any], Any]:
    """Move an image by whole pixels, over black."""
    tall, wide = (max(1, int(side * _SHIFT)) for side in size)
    return _v2().RandomCrop(size, padding=[wide, tall])


def _v2() -> ModuleType:
    return require("torchvision.transforms.v2", "vision", "to resize and augment images")
