"""Resizing and random augmentation of images, by name.

Most augmentations run per sample on the CPU, on PIL images and uint8 tensors. They draw from torch's global generator,
which the loader seeds for each sample. Two can also run on whole batches on the device (`device_transform`), about 20
times as fast; that needs images of one size, i.e. tensors in memory.
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

AugmentSpec = str | Callable[[Any], Any] | None  # a name from NAMES, a function of one image, or no augmentation
NAMES = ("none", "basic", "crop", "randaugment", "trivial")
_SHIFT = 1 / 8  # of a side: 4 of 32 pixels, as is usual on CIFAR


@dataclass(frozen=True)
class Geometry:
    """The model's input size (height, width), and the resize settings the backbone was evaluated with."""

    size: tuple[int, int]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"


def check_augment(augment: AugmentSpec) -> None:
    """Check that `sample_transform` knows an augmentation."""
    if augment is None or callable(augment) or augment in NAMES:
        return
    hint = did_you_mean(str(augment), NAMES)
    raise BadArgument(expected(f"augment to be a function or one of {', '.join(map(repr, NAMES))}", augment, hint))


def is_random(augment: AugmentSpec) -> bool:
    """Whether there is more to do than resizing."""
    return augment not in (None, "none")


def resizes_first(augment: AugmentSpec) -> bool:
    """Whether the pipeline starts with a deterministic resize, which can be done once for the whole dataset."""
    return augment in (None, "none", "crop")


def flips(augment: AugmentSpec) -> bool:
    """Whether images are flipped horizontally."""
    return augment in ("basic", "randaugment", "trivial")


def runs_on_batches(augment: AugmentSpec) -> bool:
    """Whether `device_transform` supports this augmentation."""
    return augment in ("basic", "crop")


def device_transform(
    augment: AugmentSpec, geometry: Geometry, statistics: tuple[Sequence[float], Sequence[float]], erase: float
) -> BatchAugment:
    """Return a module that augments, normalises with (mean, std) and randomly erases a batch."""
    assert runs_on_batches(augment)
    mean, std = statistics
    if augment == "basic":
        return BatchAugment(geometry.size, erase=erase, mean=mean, std=std)
    return BatchAugment(geometry.size, crop=False, shift=_SHIFT, flip=0.0, erase=erase, mean=mean, std=std)


def sample_transform(augment: AugmentSpec, geometry: Geometry, from_files: bool) -> Callable[[Any], Any]:
    """Return the pipeline for one image. Images from files are resized and cropped, tensors only resized."""
    v2 = _v2()
    crops = from_files and geometry.crop_mode != "squash"
    fit: Callable[[Any], Any] = CenterFit(geometry) if crops else _resize(geometry)
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
class CenterFit:
    """Resize an image so that its center crop covers `crop_pct` of it, and crop."""

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


def _resize(geometry: Geometry) -> Callable[[Any], Any]:
    return _v2().Resize(geometry.size, interpolation=_v2().InterpolationMode(geometry.interpolation))


def _shift(size: tuple[int, int]) -> Callable[[Any], Any]:
    """Pad with black and crop at a random position."""
    tall, wide = (max(1, int(side * _SHIFT)) for side in size)
    return _v2().RandomCrop(size, padding=[wide, tall])


def _v2() -> ModuleType:
    return require("torchvision.transforms.v2", "vision", "to resize and augment images")
