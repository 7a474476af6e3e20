"""Image classification: any timm backbone, or any module that gives logits.

Owns the task: when the model is built and how its head is sized, which transforms go where, the loss, the metrics and
the checks. How a model is found is in `backbone`, what is done to one image in `augment`, what to a batch in `batch`.

Images are uint8 until they reach the device; there, and nowhere else, they are normalised. Float images are taken as
ready. So data can be normalised once or not at all, but never twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.folder import LAYOUT
from trainformer.data.image import ImageDataset, images_in_memory, load_images, split_sample
from trainformer.data.info import DatasetInfo
from trainformer.data.order import preserved_generators
from trainformer.data.pixels import ImageTensors, channels_in, is_pil
from trainformer.data.targets import is_stream
from trainformer.eval.classification import confusion_matrix, precision_recall_f1, topk_correct
from trainformer.tasks.base import TaskBase
from trainformer.tasks.vision.arguments import balanced_weights, check_arguments, given_weights, size_pair
from trainformer.tasks.vision.augment import (
    Augment,
    Geometry,
    is_random,
    resizes_first,
    sample_transform,
)
from trainformer.tasks.vision.backbone import (
    Unbuilt,
    build_backbone,
    check_backbone,
    describe,
    outputs_of,
)
from trainformer.tasks.vision.batch import Normalize, RandomErasing, correct, cross_entropy, mix
from trainformer.tasks.vision.checks import image_problems, label_problems

_SMALLEST = 32  # timm's convolutional backbones halve the image five times
_MOST_RESIZED_BYTES = 1 << 30  # a set in memory is resized as a whole, once, if the result is no larger than this


@dataclass(eq=False)
class ImageClassification(TaskBase):
    """Classify images with a timm backbone, or with a module of your own that gives logits.

    The head is sized from the data unless `num_classes` says otherwise; so are the input channels (`in_chans`).
    `image_size` is (height, width) or one number for both. Left out, it is the backbone's own size for images from
    files (and for backbones with a fixed size), and for tensors the size they have, though at least 32 pixels.

    `augment` is `"basic"` (random resized crop and flip), `"crop"` (shifts by up to an eighth, without flips),
    `"randaugment"` or `"trivial"` (basic and one of torchvision's policies), `"none"`, or a function of one image,
    which is a PIL image or a uint8 tensor. `mixup` and `cutmix` are alphas (0: off; one is chosen per batch where both
    are on) and stop with epoch `mixup_off_epoch` if that is not 0. `random_erasing` is the share of images to erase a
    part of. `class_weights` weigh the training loss: a number per class, or `"balanced"` for the inverse of the
    frequencies. `model_kwargs` go to `timm.create_model`.

    >>> task = ImageClassification("resnet10t", num_classes=10, pretrained=False)
    >>> rows = task.predict_step(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    >>> rows["probabilities"].shape
    torch.Size([2, 10])
    """

    backbone: str | nn.Module = "resnet50"
    num_classes: int | None = None
    pretrained: bool = True
    _: KW_ONLY
    image_size: int | tuple[int, int] | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_off_epoch: int = 0
    augment: Augment = "basic"
    random_erasing: float = 0.0
    class_weights: Literal["balanced"] | Sequence[float] | None = None
    drop_rate: float | None = None
    drop_path_rate: float | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    in_chans: int | None = None

    model: nn.Module = field(init=False, repr=False)
    class_names: list[str] | None = field(init=False, default=None)
    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation: rows are labels

    def __post_init__(self) -> None:
        check_arguments(self)
        self._epoch = 0
        self._size = size_pair(self.image_size, self.model_kwargs.get("img_size"))
        self._channels = self.in_chans
        self._weights: Tensor | None = None
        self._as_built: list[tuple[int, int]] = []
        self.model = Unbuilt()
        if isinstance(self.backbone, nn.Module):
            self._adopt(self.backbone)
        else:
            check_backbone(self.backbone)
            if self.num_classes is not None:
                self._build(self.num_classes, self.in_chans or 3)
        self._config = describe(self.model)
        self._normalize = Normalize(self._config.mean, self._config.std)
        if self.num_classes is not None and self.class_weights != "balanced":
            self._weights = given_weights(self.class_weights, self.num_classes)

    # -- the model -----------------------------------------------------------------------------------------

    def configure(self, info: DatasetInfo) -> None:
        """Size the head and the first layer from the data. A model that has been trained is never built again."""
        classes = self._classes_for(info)
        channels = self.in_chans or self._channels_for(info)
        if isinstance(self.backbone, nn.Module):
            self._channels = self._channels or channels
        elif isinstance(self.model, Unbuilt) or (channels not in (None, self._channels) and self._is_untouched()):
            self._build(classes, channels or 3)
            self._config = describe(self.model)
            self._normalize = Normalize(self._config.mean, self._config.std)
        self.num_classes = classes
        self.class_names = info.class_names or self.class_names
        if self.class_weights == "balanced":
            self._weights = balanced_weights(info, classes)
        else:
            self._weights = given_weights(self.class_weights, classes)

    def _classes_for(self, info: DatasetInfo) -> int:
        found = info.num_classes
        if self.num_classes is not None:
            if found is not None and found > self.num_classes:
                raise BadArgument(
                    expected(
                        f"num_classes to be at least {found}, the number of classes in the data",
                        self.num_classes,
                        "Leave num_classes out to take it from the data.",
                    )
                )
            return self.num_classes
        if found is None:
            raise BadArgument(
                "Expected to learn the number of classes from the data, received data that do not say. Pass "
                f"num_classes, or data with labels. For a folder: {LAYOUT}"
            )
        if found < 2:
            raise DataError(
                expected("at least two classes to tell apart", f"{found} in the data", f"For a folder: {LAYOUT}")
            )
        return found

    def _channels_for(self, info: DatasetInfo) -> int | None:
        shape = info.input_shape
        if shape is None or len(shape) in (2, 3):
            return None if shape is None else channels_in(shape)
        if isinstance(self.backbone, nn.Module):  # which may take anything
            return None
        raise DataError(expected("images of shape (C, H, W) or (H, W)", f"inputs of shape {shape}"))

    def _build(self, classes: int, channels: int) -> None:
        assert isinstance(self.backbone, str)
        rates = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        self.model = build_backbone(
            self.backbone,
            num_classes=classes,
            in_chans=channels,
            pretrained=self.pretrained,
            image_size=self._size,
            options={name: rate for name, rate in rates.items() if rate is not None} | self.model_kwargs,
        )
        self._channels = channels
        self._as_built = _fingerprint(self.model)

    def _adopt(self, model: nn.Module) -> None:
        """Take a module that the user brings, as it is."""
        outputs = outputs_of(model)
        if outputs == 0:
            raise BadArgument(
                "Expected backbone to give logits, received a model without a head (num_classes=0). "
                "Build it with the number of classes, or pass its name."
            )
        if outputs is not None and self.num_classes not in (None, outputs):
            raise BadArgument(expected(f"num_classes={outputs}, which backbone was built for", self.num_classes))
        self.model = model
        self.num_classes = self.num_classes or outputs

    def _is_untouched(self) -> bool:
        """Whether the weights are still those of building: neither trained, nor loaded, nor wrapped."""
        return _fingerprint(self.model) == self._as_built

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Dataset:
        """Images from a folder (one folder per class; a plain folder of images to predict), or a built-in sample."""
        return load_images(path, channels=self.in_chans or 3)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Images of one size as uint8 tensors, augmented for training. Float images are left as they are."""
        if is_stream(dataset) or len(dataset) == 0:
            return dataset
        with preserved_generators():
            sample = dataset[0]
        image, label = split_sample(sample)
        if train and label is None:
            raise DataError(f"Expected images with labels to train on, received images alone. For a folder: {LAYOUT}")
        if _is_float(image):
            return dataset if self._is_ready(image) and not isinstance(sample, Mapping) else ImageDataset(dataset)
        augment = self.augment if train else None
        geometry = self._geometry(image)
        tensors = images_in_memory(dataset, self._channels)
        if tensors is not None and resizes_first(augment):
            tensors = _resized(tensors, geometry)
            if not is_random(augment) and tensors.images.shape[-2:] == geometry.size:
                return tensors
        transform = sample_transform(augment, geometry, from_files=is_pil(image))
        return ImageDataset(dataset if tensors is None else tensors, transform, self._channels)

    def _is_ready(self, image: Any) -> bool:
        """Whether a float image can go to the model as it is. What a module of the user's takes is for them to know."""
        fits = image.ndim == 3 or isinstance(self.backbone, nn.Module)
        return fits and isinstance(image, Tensor) and image.dtype == torch.float32

    def get_train_transforms(self) -> nn.Module:
        """Normalising on the device, and random erasing if asked for."""
        if not self.random_erasing:
            return self._normalize
        return nn.Sequential(self._normalize, RandomErasing(self.random_erasing))

    def get_eval_transforms(self) -> nn.Module:
        """Normalising on the device."""
        return self._normalize

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

    # -- steps ---------------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int) -> None:
        """Remember where we are: mixing stops at some epoch."""
        self._epoch = epoch

    def train_step(self, batch: Any) -> Loss:
        """Cross-entropy with smoothing, mixing and class weights, as a sum over the weights of the labels."""
        images, labels = self._images_and_labels(batch)
        mixed = mix(images, self.mixup, self.cutmix) if self._mixes() else None
        logits = self._logits(images if mixed is None else mixed.images)
        weights = self._weights_like(logits)
        loss = cross_entropy(logits, labels, mixed, class_weights=weights, label_smoothing=self.label_smoothing)
        right = correct(logits.detach().argmax(-1), labels, mixed)
        return Loss(loss.sum, loss.weight, metrics={"accuracy": (right, len(labels))})

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Plain cross-entropy and accuracy, and the predictions for the metrics of the whole set."""
        images, labels = self._images_and_labels(batch)
        logits = self._logits(images)
        predictions, count = logits.argmax(-1), len(labels)
        metrics: dict[str, Any] = {
            "loss": (cross_entropy(logits, labels).sum, count),
            "accuracy": (correct(predictions, labels), count),
        }
        if logits.shape[-1] > 5:
            metrics["top5"] = (topk_correct(logits, labels, 5).sum(), count)
        return metrics | {"prediction": predictions, "label": labels}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Macro F1 of the whole set; the confusion matrix is kept as `confusion`."""
        predictions, labels = rows["prediction"], rows["label"]
        self.confusion = confusion_matrix(predictions, labels, self.num_classes)
        return {"f1": precision_recall_f1(predictions, labels, "macro", self.num_classes).f1.item()}

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """Class index, its probability, and the probabilities of all classes. Labels may be there or not."""
        images, _ = split_sample(batch)
        probabilities = self._logits(self._normalize(images)).softmax(-1)
        probability, prediction = probabilities.max(-1)
        return {"prediction": prediction, "probability": probability, "probabilities": probabilities}

    def _images_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = split_sample(batch)
        if labels is None:
            raise DataError("Expected batches of (images, labels), received images alone. Pass data with labels.")
        # Does nothing to what the loader's transforms have normalised; a loop written by hand need not know of them.
        return self._normalize(images), labels.long()

    def _logits(self, images: Tensor) -> Tensor:
        output = self.model(images)
        logits = getattr(output, "logits", output)  # transformers' models return a record
        if logits.ndim != 2 or logits.shape[1] != (self.num_classes or logits.shape[1]):
            raise BadArgument(
                expected(
                    f"logits of shape (batch, {self.num_classes}) from the model, one per class",
                    f"shape {tuple(logits.shape)}",
                    "Give the model a head for these classes, or pass the num_classes it has.",
                )
            )
        # Half precision is too coarse for a softmax; double is left alone.
        return logits if logits.dtype == torch.float64 else logits.float()

    def _mixes(self) -> bool:
        wanted = self.mixup > 0 or self.cutmix > 0
        return wanted and (self.mixup_off_epoch == 0 or self._epoch < self.mixup_off_epoch)

    def _weights_like(self, logits: Tensor) -> Tensor | None:
        if self._weights is None:
            if self.class_weights is not None:
                raise BadArgument(
                    "Expected to know the class counts for class_weights='balanced', received none yet. Call "
                    "configure(info) first (Trainer does), or pass the weights as numbers."
                )
            return None
        if self._weights.device != logits.device or self._weights.dtype != logits.dtype:
            self._weights = self._weights.to(logits)  # once: copying every step would wait for the device
        return self._weights

    # -- records -------------------------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        """What is wrong with the images and labels of a batch, in sentences."""
        images, labels = split_sample(batch)
        return image_problems(images, self._channels) + label_problems(labels, self.num_classes)

    def config_dict(self) -> dict[str, Any]:
        """The arguments, as far as they can be written down, and what was derived from the data."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        for name in ("backbone", "augment"):
            value = arguments[name]
            if not isinstance(value, str | None):
                arguments[name] = getattr(value, "__qualname__", type(value).__qualname__)
        return arguments | {
            "image_size": self._size,
            "in_chans": self._channels,
            "class_names": self.class_names,
            "mean": self._config.mean,
            "std": self._config.std,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run, or one that only predicts, needs beside the weights."""
        return {"epoch": self._epoch, "size": self._size, "class_names": self.class_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._epoch, self.class_names = state["epoch"], state["class_names"]
        if state["size"] is not None and size_pair(self.image_size, self.model_kwargs.get("img_size")) is None:
            self._size = tuple(state["size"])


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


def _resized(tensors: ImageTensors, geometry: Geometry) -> ImageTensors:
    """The whole set at the wanted size, if it is small enough to be kept at that size."""
    count, channels, *size = tensors.images.shape
    height, width = geometry.size
    if tuple(size) == geometry.size or count * channels * height * width > _MOST_RESIZED_BYTES:
        return tensors
    return tensors.with_images(sample_transform(None, geometry, from_files=False)(tensors.images))


def _fingerprint(model: nn.Module) -> list[tuple[int, int]]:
    """Changes whenever a parameter is replaced or written to (torch counts the writes)."""
    return [(id(parameter), parameter._version) for parameter in model.parameters()]
