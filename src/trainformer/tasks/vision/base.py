"""Base class of the vision tasks: backbone, image size and channels, dataset preparation, normalisation.

Images stay uint8 until they reach the device and are normalised there. Float images are treated as already normalised.
So data is never normalised twice.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.data.augment.pipeline import BatchAugment
from trainformer.data.folder import LAYOUT
from trainformer.data.image import ImageDataset, images_in_memory, load_images, split_sample
from trainformer.data.labels import is_stream
from trainformer.data.metadata import DatasetInfo
from trainformer.data.mixture.mixture import naming
from trainformer.data.order import preserved_generators
from trainformer.data.pixels import ImageTensors, channels_in, is_pil
from trainformer.data.preprocessing import ImagePreprocessing
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
from trainformer.tasks.vision.augment import ON_BATCHES, SHIFT, AugmentSpec, cover_of, sample_transform
from trainformer.tasks.vision.batch import Normalize
from trainformer.tasks.vision.checks import image_hw, image_problems, size_pair

_SMALLEST = 32  # timm's convolutional backbones halve the image five times
_MOST_RESIZED_BYTES = 1 << 30  # a dataset in memory is resized once as a whole if the result is no larger than this


Built = TypeVar("Built")


@dataclass(eq=False)
class VisionTask(TaskBase):
    """Base class of the vision tasks, with the arguments that they share."""

    _: KW_ONLY
    image_size: int | tuple[int, int] | None = None
    in_chans: int | None = None
    checkpoint: Weights | None = None
    drop_path_rate: float | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    needs_labels: ClassVar[bool] = True
    prediction_name: ClassVar[str | None] = (
        None  # what `prediction_module` returns, if the task has one output per image
    )

    @property
    @abstractmethod
    def backbone(self) -> str | nn.Module:
        """The name of a timm model, or a module."""

    @property
    @abstractmethod
    def pretrained(self) -> bool:
        """Whether to load timm's weights."""

    def _init_task(self) -> None:
        """Validate shared arguments and set the initial state. Call it from `__post_init__`."""
        if not isinstance(self.backbone, nn.Module):
            self._check_backbone_name(self.backbone)
        elif self.checkpoint is not None:
            raise BadArgument(
                "Expected the name of a backbone with checkpoint, received a module. Load the weights into the module."
            )
        self._size = size_pair(self.image_size, self.model_kwargs.get("img_size"))
        self._channels = self.in_chans
        self._model: nn.Module | None = None
        self._augments_on_device = False
        self._may_augment_on_device = True  # not if only some sources of a mixture are in memory
        self._seen_shape: tuple[int, ...] | None = None  # of the data
        self._trained_on: str | None = None  # "files", "pixels" (tensors of uint8) or "floats"
        self._initial_fingerprint: list[tuple[int, int]] = []
        self._read_backbone_config(nn.Identity())

    def _check_backbone_name(self, name: str) -> None:
        """Reject a name that the task cannot build."""
        check_backbone(name)

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The model, built on first access. A trainer accesses it after seeding, so runs are reproducible."""
        if self._model is None:
            self._build(self._channels or 3)
            assert self._model is not None
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    def _build(self, channels: int) -> None:
        """Build `model` for images with so many channels."""
        raise NotImplementedError

    def _build_for(self, channels: int | None) -> None:
        """Build the model if it does not exist yet or has other channels. Never rebuild a trained model."""
        if isinstance(self.backbone, nn.Module):
            self._channels = self._channels or channels
        elif self._model is None or isinstance(self._model, UnbuiltModel):
            self._build(channels or self._channels or 3)
        elif channels not in (None, self._channels) and fingerprint(self._model) == self._initial_fingerprint:
            self._build(channels or 3)

    def _read_backbone_config(self, backbone: nn.Module) -> None:
        """Set input size and normalisation from the backbone's config."""
        self._backbone_config = backbone_config(backbone)
        self._normalizer = Normalize(self._backbone_config.mean, self._backbone_config.std)

    @property
    def _config(self) -> BackboneConfig:
        assert self.model is not None  # building the model sets its config
        return self._backbone_config

    @property
    def _normalize(self) -> Normalize:
        assert self.model is not None
        return self._normalizer

    def _make_backbone(self, num_classes: int, channels: int, **options: Any) -> nn.Module:
        """Build the backbone by name, or take the user's. Options that are None use timm's defaults."""
        backbone = self.backbone
        if not isinstance(backbone, nn.Module):
            backbone = build_backbone(
                backbone,
                num_classes=num_classes,
                in_chans=channels,
                pretrained=self.pretrained,
                checkpoint=self.checkpoint,
                image_size=self._size,
                options={name: value for name, value in options.items() if value is not None} | self.model_kwargs,
            )
            self._channels = channels
        self._read_backbone_config(backbone)
        return backbone

    def _with_image_size(self, build: Callable[..., Built], channels: int) -> Built:
        """Call a function with the `channels` and `size` of an image, which it uses for a dry run.

        A custom module may take only one image size: that of the data if it consists of tensors, otherwise the default
        size that files are resized to.
        """
        shape = self._seen_shape
        if isinstance(self.backbone, nn.Module) and self._size is None and shape and len(shape) == 3:
            with suppress(BadArgument):
                return build(channels=shape[0], size=shape[1:])
        return build(channels=channels, size=self._size or self._backbone_config.size)

    def _classes_for(self, info: DatasetInfo) -> int:
        """The number of classes: `num_classes` if given, else that of the data."""
        given: int | None = getattr(self, "num_classes", None)
        found = info.num_classes
        if given is None and found is None:
            raise BadArgument(
                "Expected data that tells the number of classes, received data that does not. Pass "
                f"num_classes, or data with labels. For a folder: {LAYOUT}"
            )
        if given is not None and found is not None and found > given:
            what = f"num_classes to be at least {found}, the number of classes in the data"
            raise BadArgument(expected(what, given, "Leave num_classes out to take it from the data."))
        if given is None and found is not None and found < 2:
            raise DataError(expected("at least two classes", f"{found} in the data", f"For a folder: {LAYOUT}"))
        return given or found or 0

    def _channels_for(self, info: DatasetInfo) -> int | None:
        shape = info.input_shape
        if shape is None or len(shape) in (2, 3):
            return None if shape is None else channels_in(shape)
        if isinstance(self.backbone, nn.Module):  # a custom module may take anything
            return None
        raise DataError(expected("images of shape (C, H, W) or (H, W)", f"inputs of shape {shape}"))

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Dataset:
        return load_images(path, channels=self.in_chans or 3)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Resize images to one size as uint8 tensors, and augment them for training. Float images stay unchanged."""
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
        if train:
            self._trained_on = "floats" if _is_float(image) else "files" if is_pil(image) else "pixels"
        if _is_float(image):
            # A custom module may take any shape.
            fits = image.ndim == 3 or isinstance(self.backbone, nn.Module)
            ready = fits and isinstance(image, Tensor) and image.dtype == torch.float32
            return dataset if ready and not isinstance(sample, Mapping) else ImageDataset(dataset)
        return self._prepare_pixels(dataset, image, train)

    def prepare_sources(self, sources: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare the training data of a mixture. Augmentation is the same for all: of batches of one size, or not."""
        prepared, batched = {}, set()
        for name, dataset in sources.items():
            with naming(name):
                prepared[name] = self.prepare_dataset(dataset, train=True)
            batched.add(prepared[name].images.shape[1:] if self._augments_on_device else None)
        if len(batched) == 1:
            return prepared
        self._may_augment_on_device = False
        return self.prepare_sources(sources)

    def _prepare_pixels(self, dataset: Any, image: Any, train: bool) -> Any:
        """Prepare a dataset of pixels; `image` is one of them."""
        augment, geometry = self._sample_augment(train), self._geometry(image)
        batched = train and augment in ON_BATCHES and self._may_augment_on_device
        tensors = images_in_memory(dataset, self._channels) if batched else None
        if tensors is None:
            return self._resized_and_augmented(dataset, image, augment, geometry)
        self._augments_on_device = True
        return (augment == "crop" and self._resized(tensors, geometry)) or tensors

    def _prepare_stream(self, dataset: Any, train: bool) -> Any:
        """Prepare a stream: shuffle it for training, resize and augment each image as it is read."""
        first = dataset.first() if hasattr(dataset, "first") else next(iter(dataset), None)
        if first is None:
            return dataset
        image, label = split_sample(first)
        if train and label is None and self.needs_labels:
            raise DataError("Expected images with labels to train on, received a stream of images alone.")
        if train:
            self._trained_on = "floats" if _is_float(image) else "files" if is_pil(image) else "pixels"
        if _is_float(image):
            return dataset
        return MappedStream(dataset, self._pipeline(image, train), channels=self._channels, shuffle=train)

    def _pipeline(self, image: Any, train: bool) -> Callable[[Any], Any]:
        """The per-sample transform for images like this one."""
        return sample_transform(self._sample_augment(train), self._geometry(image), self._crops(image))

    def _sample_augment(self, train: bool) -> AugmentSpec:
        """The random augmentation of single images."""
        return None

    def _resized_and_augmented(self, dataset: Any, image: Any, augment: AugmentSpec, geometry: BackboneConfig) -> Any:
        tensors = images_in_memory(dataset, self._channels)
        transform = sample_transform(augment, geometry, self._crops(image))
        if tensors is not None and augment in (None, "none"):
            small = self._resized(tensors, geometry)
            return small or ImageDataset(tensors, transform, self._channels)
        return ImageDataset(dataset if tensors is None else tensors, transform, self._channels)

    def _resized(self, tensors: ImageTensors, geometry: BackboneConfig) -> ImageTensors | None:
        """Resize a whole dataset once; None if the result is too large to keep in memory."""
        count, channels, *size = tensors.images.shape
        crops = self._crops(tensors.images)
        if tuple(size) == geometry.size and not crops:
            return tensors
        if count * channels * math.prod(geometry.size) > _MOST_RESIZED_BYTES:
            return None
        return tensors.with_images(sample_transform(None, geometry, crops)(tensors.images))

    def _crops(self, image: Any) -> bool:
        """Whether an image like this is cropped after resizing: as those to train on, else files are."""
        crops = {"files": True, "pixels": False}.get(self._trained_on or "", is_pil(image))
        return crops and self._config.crop_mode != "squash"

    def _geometry(self, image: Any) -> BackboneConfig:
        """How to resize images like this one. The first dataset determines the input size."""
        config = self._config
        if self._size is None:
            for_files = self._loader_size or config.size
            self._size = image_size_of(image, config, for_files, isinstance(self.backbone, nn.Module))
        return replace(config, size=self._size)

    @property
    def _loader_size(self) -> tuple[int, int] | None:
        """The size of images of a user's DataLoader, which no dataset has told."""
        shape = self._seen_shape
        if self._trained_on is not None or self._config.fixed_size or shape is None or len(shape) != 3:
            return None
        return image_hw(shape)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape (C, H, W) of the model's input, once the data is known."""
        if self._trained_on != "floats" and self._size is not None:
            return None if self._channels is None else (self._channels, *self._size)
        shape = self._seen_shape  # float images keep their size
        if shape is None or len(shape) not in (2, 3) or (len(shape) == 2 and isinstance(self.backbone, nn.Module)):
            return shape
        return (channels_in(shape), *image_hw(shape))

    @property
    def preprocessing(self) -> ImagePreprocessing | None:
        """What happens to pixels before the model; None if it is unknown: before training, or for float images."""
        if self.prediction_name is None or self._trained_on == "floats" or self._channels is None:
            return None
        config, channels = self._config, self._channels
        crops = self._trained_on != "pixels" and config.crop_mode != "squash"
        geometry = replace(config, size=self._size or self._loader_size or config.size)
        mean, std = (
            values if len(values) == channels == 3 else (sum(values) / len(values),) * channels
            for values in (config.mean, config.std)
        )
        cover = cover_of(geometry) if crops else None
        return ImagePreprocessing(geometry.size, cover, config.interpolation, mean, std)

    def prediction_module(self, model: nn.Module) -> nn.Module:
        """Return a module from normalised images to predictions, given the (possibly averaged) model."""
        return self.export_module(model)

    def get_train_transforms(self) -> nn.Module:
        """Normalise on the device, and augment if the augmentation runs there."""
        if not self._augments_on_device:
            return self._normalize
        assert self._size is not None  # set by prepare_dataset
        options: dict[str, Any] = {"mean": self._config.mean, "std": self._config.std}
        if self._sample_augment(train=True) == "crop":
            options |= {"crop": False, "shift": SHIFT, "flip": 0.0}
        return BatchAugment(self._size, erase=getattr(self, "random_erasing", 0.0), **options)

    def get_eval_transforms(self) -> nn.Module:
        return self._normalize

    def _images_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = split_sample(batch)
        if labels is None:
            raise DataError("Expected batches of (images, labels), received images alone. Pass data with labels.")
        if not isinstance(labels, Tensor) or labels.ndim != 1:
            shape = f"of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else f"as {type(labels).__name__}"
            do = "Map names to integers, and one-hot rows with y.argmax(-1)."
            raise DataError(expected("labels as one integer per image", f"labels {shape}", do))
        # A no-op on images that the device transform has normalised; needed in a hand-written loop.
        return self._normalize(images), labels.long()

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        return image_problems(split_sample(batch)[0], self._channels)

    def config_dict(self) -> dict[str, Any]:
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        return {name: _describe(value) for name, value in arguments.items()} | {
            "image_size": self._size,
            "in_chans": self._channels,
            "mean": self._config.mean,
            "std": self._config.std,
        }

    def learned(self) -> dict[str, Any]:
        """The kind, size and channels of the images."""
        shape = None if self._seen_shape is None else list(self._seen_shape)
        size = self._size or self._loader_size
        return {"trained_on": self._trained_on, "size": size and list(size), "channels": self._channels, "shape": shape}

    def use_learned(self, learned: Mapping[str, Any]) -> None:
        self._trained_on = learned["trained_on"]
        self._size = None if learned["size"] is None else size_pair(tuple(learned["size"]), None)
        self._channels = learned["channels"]
        self._seen_shape = None if learned["shape"] is None else tuple(learned["shape"])

    def state_dict(self) -> dict[str, Any]:
        return {"size": self._size, "trained_on": self._trained_on}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained_on = state.get("trained_on") or self._trained_on
        if state["size"] is not None and size_pair(self.image_size, self.model_kwargs.get("img_size")) is None:
            self._size = tuple(state["size"])


def fingerprint(model: nn.Module) -> list[tuple[int, int]]:
    """Identify the current weights: it changes when a parameter is replaced or written to (torch counts writes)."""
    return [(id(parameter), parameter._version) for parameter in model.parameters()]


def _describe(value: Any) -> Any:
    """Describe an argument for the config: modules and functions by name, weights by their number."""
    if isinstance(value, Mapping) and any(isinstance(part, Tensor) for part in value.values()):
        return f"{len(value)} tensors"
    if isinstance(value, nn.Module) or (isinstance(value, Callable) and not isinstance(value, type)):  # type: ignore[arg-type]
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value


def _is_float(image: Any) -> bool:
    if isinstance(image, Tensor):
        return image.is_floating_point()
    return isinstance(image, np.ndarray) and image.dtype.kind == "f"


def _at_least(size: tuple[int, int], smallest: int = _SMALLEST) -> tuple[int, int]:
    """Scale a size up, keeping its aspect ratio, until both sides are large enough.

    >>> _at_least((8, 16)), _at_least((48, 40))
    ((32, 64), (48, 40))
    """
    factor = max(1.0, smallest / min(size))
    return round(size[0] * factor), round(size[1] * factor)


def image_size_of(
    image: Any, config: BackboneConfig, for_files: tuple[int, int], any_size: bool = False
) -> tuple[int, int]:
    """The input size for images like this one: tensors keep theirs, if the backbone allows it."""
    if is_pil(image):
        return config.size if config.fixed_size else for_files
    if config.fixed_size:
        return config.size
    size = image_hw(tuple(image.shape))
    return size if any_size else _at_least(size)
