"""What tasks on images share: the backbone's images, their data, and how they reach the model.

Owns the size, channels and normalisation of images, loading and preparing data sets, and the checks of a batch. What
the model is, and what is learned, is for the tasks.

Images are uint8 until they reach the device; there, and nowhere else, they are normalised. Float images are taken as
ready. So data can be normalised once or not at all, but never twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.data.folder import LAYOUT
from trainformer.data.image import ImageDataset, images_in_memory, load_images, split_sample
from trainformer.data.labels import is_stream
from trainformer.data.metadata import DatasetInfo
from trainformer.data.order import preserved_generators
from trainformer.data.pixels import ImageTensors, channels_in, is_pil
from trainformer.data.webdataset import MappedStream
from trainformer.models.backbones import (
    BackboneConfig,
    UnbuiltModel,
    Weights,
    backbone_config,
    build_backbone,
    check_backbone,
)
from trainformer.tasks.base import TaskBase
from trainformer.tasks.vision.arguments import size_pair
from trainformer.tasks.vision.augment import (
    Augment,
    Geometry,
    device_transform,
    is_random,
    resizes_first,
    runs_on_batches,
    sample_transform,
)
from trainformer.tasks.vision.batch import Normalize
from trainformer.tasks.vision.checks import image_problems

_SMALLEST = 32  # timm's convolutional backbones halve the image five times
_MOST_RESIZED_BYTES = 1 << 30  # a set in memory is resized as a whole, once, if the result is no larger than this


class VisionTask(TaskBase):
    """Base of the tasks on images. A subclass is a dataclass with the fields annotated here."""

    backbone: str | nn.Module
    pretrained: bool
    image_size: int | tuple[int, int] | None
    in_chans: int | None
    checkpoint: Weights | None
    model_kwargs: dict[str, Any]

    needs_labels = True

    def _begin(self) -> None:
        """Set what belongs to images, before any data have been seen. For `__post_init__`."""
        if not isinstance(self.backbone, nn.Module):
            check_backbone(self.backbone)
        elif self.checkpoint is not None:
            raise BadArgument(
                "Expected the name of a backbone with checkpoint, received a module. Load the weights into the module."
            )
        self._size = size_pair(self.image_size, self.model_kwargs.get("img_size"))
        self._channels = self.in_chans
        self._model: nn.Module | None = None
        self._augments_on_device = False
        self._as_built: list[tuple[int, int]] = []
        self._look_at(nn.Identity())

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The model, built when it is first asked for: by a trainer that is after seeding, so that runs repeat."""
        if self._model is None:
            self._build(self._channels or 3)
            assert self._model is not None
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    def _build(self, channels: int) -> None:
        """Set `model`, built by name for images with so many channels."""
        raise NotImplementedError

    def _build_for(self, channels: int | None) -> None:
        """Build what is not built, or built for other channels. A model that has been trained is never built again."""
        if isinstance(self.backbone, nn.Module):
            self._channels = self._channels or channels
        elif self._model is None or isinstance(self._model, UnbuiltModel):
            self._build(channels or self._channels or 3)
        elif channels not in (None, self._channels) and self._is_untouched():
            self._build(channels or 3)

    def _look_at(self, backbone: nn.Module) -> None:
        """Learn from a backbone which images it was made for."""
        self._described = backbone_config(backbone)
        self._normalizer = Normalize(self._described.mean, self._described.std)

    @property
    def _config(self) -> BackboneConfig:
        assert self.model is not None  # which describes itself when it is built
        return self._described

    @property
    def _normalize(self) -> Normalize:
        assert self.model is not None
        return self._normalizer

    def _make_backbone(self, num_classes: int, channels: int, **options: Any) -> nn.Module:
        """The backbone by its name; options that are None are left to timm."""
        assert isinstance(self.backbone, str)
        backbone = build_backbone(
            self.backbone,
            num_classes=num_classes,
            in_chans=channels,
            pretrained=self.pretrained,
            checkpoint=self.checkpoint,
            image_size=self._size,
            options={name: value for name, value in options.items() if value is not None} | self.model_kwargs,
        )
        self._channels = channels
        self._look_at(backbone)
        return backbone

    def _is_untouched(self) -> bool:
        """Whether the weights are still those of building: neither trained, nor loaded, nor wrapped."""
        return self._model is not None and fingerprint(self._model) == self._as_built

    def _channels_for(self, info: DatasetInfo) -> int | None:
        shape = info.input_shape
        if shape is None or len(shape) in (2, 3):
            return None if shape is None else channels_in(shape)
        if isinstance(self.backbone, nn.Module):  # which may take anything
            return None
        raise DataError(expected("images of shape (C, H, W) or (H, W)", f"inputs of shape {shape}"))

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Dataset:
        """Images by path or name: a folder, a list of files, shards, a set by name; see `data.load_images`."""
        return load_images(path, channels=self.in_chans or 3)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Images of one size as uint8 tensors, augmented for training. Float images are left as they are."""
        if train:
            self._augments_on_device = False
        if is_stream(dataset):
            return self._prepare_stream(dataset, train)
        if len(dataset) == 0:
            return dataset
        with preserved_generators():
            sample = dataset[0]
        image, label = split_sample(sample)
        if train and label is None and self.needs_labels:
            raise DataError(f"Expected images with labels to train on, received images alone. For a folder: {LAYOUT}")
        if _is_float(image):
            return dataset if self._is_ready(image) and not isinstance(sample, Mapping) else ImageDataset(dataset)
        return self._prepare_pixels(dataset, image, train)

    def _prepare_pixels(self, dataset: Any, image: Any, train: bool) -> Any:
        """A data set of pixels, of which `image` is one, as the model wants it."""
        augment, geometry = self._sample_augment(train), self._geometry(image)
        tensors = images_in_memory(dataset, self._channels) if train and runs_on_batches(augment) else None
        if tensors is None:
            return self._resized_and_augmented(dataset, image, augment, geometry)
        self._augments_on_device = True
        return resized(tensors, geometry) if augment == "crop" else tensors

    def _prepare_stream(self, dataset: Any, train: bool) -> Any:
        """The same for a stream: shuffled for training, each image brought to size and augmented as it comes."""
        first = dataset.first() if hasattr(dataset, "first") else next(iter(dataset), None)
        if first is None:
            return dataset
        image, label = split_sample(first)
        if train and label is None and self.needs_labels:
            raise DataError("Expected images with labels to train on, received a stream of images alone.")
        if _is_float(image):
            return dataset
        return MappedStream(dataset, self._pipeline(image, train), channels=self._channels, shuffle=train)

    def _pipeline(self, image: Any, train: bool) -> Callable[[Any], Any]:
        """What is done to single images like this one where they are read."""
        return sample_transform(self._sample_augment(train), self._geometry(image), from_files=is_pil(image))

    def _sample_augment(self, train: bool) -> Augment:
        """What is done at random to single images where they are read."""
        return None

    def _resized_and_augmented(self, dataset: Any, image: Any, augment: Augment, geometry: Geometry) -> Any:
        tensors = images_in_memory(dataset, self._channels)
        if tensors is not None and resizes_first(augment):
            tensors = resized(tensors, geometry)
            if not is_random(augment) and tensors.images.shape[-2:] == geometry.size:
                return tensors
        transform = sample_transform(augment, geometry, from_files=is_pil(image))
        return ImageDataset(dataset if tensors is None else tensors, transform, self._channels)

    def _is_ready(self, image: Any) -> bool:
        """Whether a float image can go to the model as it is. What a module of the user's takes is for them to know."""
        fits = image.ndim == 3 or isinstance(self.backbone, nn.Module)
        return fits and isinstance(image, Tensor) and image.dtype == torch.float32

    def _geometry(self, image: Any) -> Geometry:
        """How to bring images like this one to the model's size, which the first data set settles."""
        config = self._config
        if self._size is None:
            self._size = config.size
            if not is_pil(image) and not config.fixed_size:
                self._size = _size_of(image) if isinstance(self.backbone, nn.Module) else _at_least(_size_of(image))
        return Geometry(self._size, config.interpolation, config.crop_pct, config.crop_mode)

    @property
    def input_shape(self) -> tuple[int, int, int] | None:
        """Shape of one image as the model gets it, once the data are known."""
        if self._size is None or self._channels is None:
            return None
        return (self._channels, *self._size)

    def get_train_transforms(self) -> nn.Module:
        """Normalising on the device, with augmentation where it runs there."""
        if not self._augments_on_device:
            return self._normalize
        assert self._size is not None  # which preparing the data has settled
        statistics, erase = (self._config.mean, self._config.std), getattr(self, "random_erasing", 0.0)
        return device_transform(self._sample_augment(train=True), Geometry(self._size), statistics, erase)

    def get_eval_transforms(self) -> nn.Module:
        """Normalising on the device."""
        return self._normalize

    def _images_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = split_sample(batch)
        if labels is None:
            raise DataError("Expected batches of (images, labels), received images alone. Pass data with labels.")
        # Does nothing to what the loader's transforms have normalised; a loop written by hand need not know of them.
        return self._normalize(images), labels.long()

    # -- records -------------------------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        """What is wrong with the images of a batch, in sentences."""
        return image_problems(split_sample(batch)[0], self._channels)

    def config_dict(self) -> dict[str, Any]:
        """The arguments, as far as they can be written down, and what was derived from the data."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        written = {name: _in_writing(value) for name, value in arguments.items()}
        return written | {
            "image_size": self._size,
            "in_chans": self._channels,
            "mean": self._config.mean,
            "std": self._config.std,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run, or one that only predicts, needs beside the weights."""
        return {"size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if state["size"] is not None and size_pair(self.image_size, self.model_kwargs.get("img_size")) is None:
            self._size = tuple(state["size"])


def check_counts(task: Any, *names: str) -> None:
    """Refuse arguments that must be whole numbers from 1 on, or None, and are not."""
    for name in names:
        value = getattr(task, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadArgument(expected(f"{name} to be a whole number of at least 1", value))


def resized(tensors: ImageTensors, geometry: Geometry) -> ImageTensors:
    """The whole set at the wanted size, if it is small enough to be kept at that size."""
    count, channels, *size = tensors.images.shape
    height, width = geometry.size
    if tuple(size) == geometry.size or count * channels * height * width > _MOST_RESIZED_BYTES:
        return tensors
    return tensors.with_images(sample_transform(None, geometry, from_files=False)(tensors.images))


def fingerprint(model: nn.Module) -> list[tuple[int, int]]:
    """Changes whenever a parameter is replaced or written to (torch counts the writes)."""
    return [(id(parameter), parameter._version) for parameter in model.parameters()]


def _in_writing(value: Any) -> Any:
    """A module or a function by its name; weights not at all."""
    if isinstance(value, Mapping) and any(isinstance(part, Tensor) for part in value.values()):
        return f"{len(value)} tensors"
    if isinstance(value, nn.Module) or (isinstance(value, Callable) and not isinstance(value, type)):  # type: ignore[arg-type]
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value


def _is_float(image: Any) -> bool:
    if isinstance(image, Tensor):
        return image.is_floating_point()
    return isinstance(image, np.ndarray) and image.dtype.kind == "f"


def _size_of(image: Any) -> tuple[int, int]:
    shape = tuple(image.shape)
    last = len(shape) == 3 and channels_in(shape) != shape[0]
    return (shape[0], shape[1]) if last else (shape[-2], shape[-1])


def _at_least(size: tuple[int, int], smallest: int = _SMALLEST) -> tuple[int, int]:
    """The size, enlarged evenly until both sides suffice.

    >>> _at_least((8, 16)), _at_least((48, 40))
    ((32, 64), (48, 40))
    """
    factor = max(1.0, smallest / min(size))
    return round(size[0] * factor), round(size[1] * factor)
