"""Image data sets: whatever holds images in, tensors of one kind out.

Owns the wrapper that makes any source of images and labels yield ``(tensor, label)``, and loading by path or name. The
transforms it is given run once per sample, on the CPU, and draw from torch's global generator, which the loader seeds
for every single sample. Normalising is not done here but on the device, by the task.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainformer.core.errors import DataError, did_you_mean, expected
from trainformer.data.fetch import is_in_memory, tensors_of, unwrap_subsets
from trainformer.data.folder import (
    CorruptImage,
    ImageFiles,
    ImageFolder,
    find_corrupt_images,
    holds_class_folders,
    read_image,
)
from trainformer.data.pixels import ImageTensors, channels_in, image_tensor, tensor_channels, with_channels
from trainformer.data.samples import load_sample, sample_names
from trainformer.data.targets import targets_of

__all__ = [
    "CorruptImage",
    "ImageDataset",
    "ImageFiles",
    "ImageFolder",
    "ImageTensors",
    "find_corrupt_images",
    "images_in_memory",
    "load_images",
    "read_image",
    "split_sample",
]

_IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x", "input")
_LABEL_KEYS = ("label", "labels", "target", "targets", "fine_label", "class", "y")


class ImageDataset(Dataset):
    """Any data set of images as ``(tensor, label)``, or the tensor alone where there is no label.

    Samples of the source may be tuples, dicts or bare images; images may be PIL images, arrays or tensors of any of
    the usual kinds. `transform` is called with a PIL image or a tensor that has `channels` channels already, and
    returns either. The result is a (C, H, W) tensor, uint8 as long as nobody made it float.

    >>> data = ImageDataset([(torch.zeros(8, 8, dtype=torch.uint8), 3)], channels=3)
    >>> image, label = data[0]
    >>> tuple(image.shape), label
    ((3, 8, 8), 3)
    """

    def __init__(self, source: Any, transform: Callable[[Any], Any] | None = None, channels: int | None = None) -> None:
        self.source = source
        self.transform = transform
        self.channels = channels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Any] | Tensor:
        image, label = split_sample(self.source[index])
        image = with_channels(image, self.channels)
        if self.transform is not None:
            image = self.transform(image)
        tensor = image_tensor(image)
        # A batch of Nones cannot be collated; unlabelled images make batches of images.
        return tensor if label is None else (tensor, label)

    @property
    def targets(self) -> Any:
        """Labels of all samples, as the source has them, without reading an image."""
        return self._known("labels")

    @property
    def classes(self) -> list[str]:
        """Names of the classes, as the source has them."""
        return self._known("names")

    @property
    def in_memory(self) -> bool:
        """Whether reading needs no decoding, so that worker processes would not pay."""
        return is_in_memory(self.source)

    def _known(self, what: str) -> Any:
        value = getattr(targets_of(self.source), what)
        if value is None:  # hasattr() is how everybody asks
            raise AttributeError(f"{type(self.source).__name__} does not say its {what}")
        return value


def load_images(path_or_name: str | Path, *, labels: bool | None = None, channels: int | None = 3) -> Dataset:
    """Images from a folder, or a built-in sample by its name (`"digits"`; write `"./digits"` for a folder).

    `labels=True` insists on class folders, `False` takes all images in the order of their names, and `None` decides
    by what is there.
    """
    if isinstance(path_or_name, str) and path_or_name in sample_names():
        return load_sample(path_or_name)
    _refuse_misspelt_sample(path_or_name)
    if labels is None:
        labels = holds_class_folders(path_or_name)
    return ImageFolder(path_or_name, channels) if labels else ImageFiles(path_or_name, channels)


def _refuse_misspelt_sample(name: str | Path) -> None:
    if isinstance(name, str) and os.sep not in name and not os.path.exists(os.path.expanduser(name)):
        close = did_you_mean(name, sample_names())
        if close:
            known = ", ".join(map(repr, sample_names()))
            raise DataError(
                expected("a folder of images or a built-in sample", name, f"{close} Built-in samples: {known}.")
            )


def split_sample(sample: Any) -> tuple[Any, Any]:
    """Image and label of a sample or batch: a tuple, a mapping, or an image alone. What is not there is None.

    >>> split_sample({"img": "pixels", "label": 3})
    ('pixels', 3)
    >>> split_sample(("pixels", 3))
    ('pixels', 3)
    """
    if isinstance(sample, Mapping):
        image = next((key for key in _IMAGE_KEYS if key in sample), None)
        if image is None:
            raise DataError(expected(f"a sample with one of the keys {', '.join(_IMAGE_KEYS)}", list(sample)))
        label = next((key for key in _LABEL_KEYS if key in sample), None)
        return sample[image], None if label is None else sample[label]
    if isinstance(sample, tuple | list):
        if not sample:
            raise DataError(expected("a sample (image, label)", sample))
        return sample[0], sample[1] if len(sample) > 1 else None
    return sample, None


def images_in_memory(dataset: Any, channels: int | None = None) -> ImageTensors | None:
    """The images of a data set that is nothing but uint8 tensors, or a subset of one; None for all others."""
    base, chosen = unwrap_subsets(dataset)
    tensors = tensors_of(base)
    if tensors is None or len(tensors) > 2 or tensors[0].dtype != torch.uint8 or tensors[0].ndim not in (3, 4):
        return None
    images, *labels = tensors if chosen is None else [tensor[torch.from_numpy(chosen)] for tensor in tensors]
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif channels_in(images.shape[1:]) != images.shape[1]:
        images = images.permute(0, 3, 1, 2).contiguous()  # channels last, as arrays have them
    names = targets_of(base).names
    return ImageTensors(tensor_channels(images, channels), labels[0] if labels else None, names)
