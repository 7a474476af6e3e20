"""Semantic segmentation with torchvision's networks, a feature pyramid on any timm backbone, or any module.

The data are in `data.segmentation`, the joint augmentation in `joint_augment`, the networks in `models.segmentation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_choice, check_count, did_you_mean, expected
from trainformer.data.labels import is_stream
from trainformer.data.metadata import DatasetInfo
from trainformer.data.order import preserved_generators
from trainformer.data.pixels import channels_in
from trainformer.data.segmentation import MASK_LAYOUT, PreparedPairs, load_segmentation, scan_classes, split_pair
from trainformer.data.sharding import SampleList
from trainformer.eval.segmentation import pixel_counts, segmentation_scores
from trainformer.losses.numerics import upcast
from trainformer.losses.segmentation import PixelLoss, pixel_loss
from trainformer.models.backbones import UnbuiltModel, check_backbone, num_outputs
from trainformer.models.heads import single_sample_batchnorm
from trainformer.models.segmentation import SEGMENTATION_MODELS, build_segmentation, resize_logits
from trainformer.tasks.vision.base import VisionTask, fingerprint, image_size_of
from trainformer.tasks.vision.checks import given_weights, image_problems
from trainformer.tasks.vision.class_names import ClassNamesInState
from trainformer.tasks.vision.joint_augment import JointAugment, JointTransform, check_joint_augment, fitted_size

_FILE_SIZE = (512, 512)  # of pictures from files, if nothing else is asked for
_LOSSES = {"ce": (1.0, 0.0), "ce+dice": (1.0, 1.0), "dice": (0.0, 1.0)}


@dataclass(eq=False)
class SemanticSegmentation(ClassNamesInState, VisionTask):
    """Assign a class to each pixel.

    `backbone` is one of torchvision's segmentation models (`deeplabv3_resnet50`, `deeplabv3_mobilenet_v3_large`,
    `fcn_resnet50`, `lraspp_mobilenet_v3_large`, ...), the name of a timm model, which gets a feature pyramid, or your
    own module that returns logits (N, classes, h, w), alone, as `["out"]` or as `.logits`. `num_classes` comes from the
    data if not given. `image_size` is (height, width) or one number for both; by default, pictures from
    files are brought to 512 x 512, and tensors keep their size.

    Pixels of the mask with the value `ignore_index` count for nothing. `mask_values` are the pixel values that stand
    for the classes, such as `[0, 255]`, if masks do not hold the indices 0, 1, 2.

    `augment` is `"basic"` (scaled by 0.5 to 2, cropped, flipped), `"strong"` (with changed colours), `"flip"`,
    `"none"`, or a function of an image and its mask, such as a transform of `torchvision.transforms.v2`.

    `loss` is `"ce"` (cross-entropy), `"dice"` or `"ce+dice"`. Its weight are the valid pixels. `class_weights` are
    numbers, one per class. `aux_loss` weights the loss of the auxiliary classifier of DeepLab and FCN (0: it has none).

    >>> task = SemanticSegmentation("resnet10t", num_classes=3, pretrained=False)
    >>> task.predict_step(torch.zeros(2, 3, 32, 48, dtype=torch.uint8))["mask"][0].shape
    torch.Size([32, 48])
    """

    backbone: str | nn.Module = "deeplabv3_resnet50"
    num_classes: int | None = None
    pretrained: bool = True
    _: KW_ONLY
    loss: Literal["ce", "dice", "ce+dice"] = "ce"
    class_weights: Sequence[float] | None = None
    ignore_index: int = 255
    mask_values: Sequence[int] | None = None
    augment: JointAugment = "basic"
    aux_loss: float = 0.0

    class_names: list[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, _LOSSES)
        check_joint_augment(self.augment)
        if self.num_classes is not None:
            check_count("num_classes", self.num_classes, least=2)
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            do = "Pass a value that no class has, such as 255."
            raise BadArgument(expected("ignore_index to be an integer", self.ignore_index, do))
        if not isinstance(self.aux_loss, int | float) or self.aux_loss < 0:
            raise BadArgument(expected("aux_loss to be a weight of at least 0", self.aux_loss))
        if self.aux_loss and self.backbone not in SEGMENTATION_MODELS:
            do = "Leave it out."
            raise BadArgument(expected("aux_loss=0 with other models than DeepLab and FCN", self.aux_loss, do))
        self._check_values()
        self._init_task()
        self._weights: Tensor | None = None
        if isinstance(self.backbone, nn.Module):
            outputs = num_outputs(self.backbone)
            self.model = self.backbone
            self.num_classes = self.num_classes or outputs
            self._read_backbone_config(self.backbone)
        if self.num_classes is not None:
            self._check_classes(self.num_classes)

    def _check_values(self) -> None:
        values = self.mask_values
        if values is None:
            return
        if isinstance(values, str) or len(set(values)) != len(values) or len(values) < 2:
            raise BadArgument(expected("mask_values to be two or more different pixel values", values))
        if self.num_classes not in (None, len(values)):
            raise BadArgument(expected(f"one of the mask_values for each of {self.num_classes} classes", list(values)))
        self.num_classes = len(values)

    def _check_classes(self, classes: int) -> None:
        if 0 <= self.ignore_index < classes:
            do = f"Pass ignore_index={max(255, classes)}, or a negative number."
            raise BadArgument(expected(f"ignore_index to be none of the {classes} classes", self.ignore_index, do))
        self._weights = given_weights(self.class_weights, classes)

    # -- the model -----------------------------------------------------------------------------------------

    def _check_backbone_name(self, name: str) -> None:
        if name in SEGMENTATION_MODELS:
            if self.in_chans not in (None, 3):
                do = "Use a timm backbone, which takes any number of channels."
                raise BadArgument(expected("in_chans=3 with a model of torchvision", self.in_chans, do))
            return
        try:
            check_backbone(name)
        except BadArgument as error:
            hint = did_you_mean(name, SEGMENTATION_MODELS, most=1)
            known = f"{hint} Models of torchvision: {', '.join(SEGMENTATION_MODELS)}."
            raise BadArgument(expected("backbone to be a model of timm or torchvision", name, known.strip())) from error

    def inspect_dataset(self, dataset: Any) -> None:
        """Find the number of classes in the masks, if neither the user nor the data name them."""
        with preserved_generators():
            if len(dataset) and split_pair(dataset[0], 0)[1] is None:
                raise DataError(f"Expected pictures with masks to train on, received pictures alone. {MASK_LAYOUT}")
        if self.num_classes is None and not getattr(dataset, "classes", None):
            base = getattr(dataset, "dataset", dataset)
            if not getattr(base, "classes", None):
                self.num_classes = scan_classes(dataset, self.ignore_index)

    def configure(self, info: DatasetInfo) -> None:
        """Build the model for the classes and channels of the data. A trained model is never rebuilt."""
        if self.num_classes is None and info.num_classes is None:
            raise BadArgument(
                "Expected data that tells the number of classes, received data that does not. Pass num_classes. "
                f"For a folder: {MASK_LAYOUT}"
            )
        self.num_classes = self._classes_for(info)
        self._check_classes(self.num_classes)
        shape = info.input_shape
        channels = 3 if self.backbone in SEGMENTATION_MODELS else self.in_chans
        self._build_for(channels or (channels_in(shape) if shape and len(shape) in (2, 3) else None))
        self.class_names = info.class_names or self.class_names

    def _build(self, channels: int) -> None:
        if self.num_classes is None:
            self.model = UnbuiltModel()
            return
        assert isinstance(self.backbone, str)
        rate = {} if self.drop_path_rate is None else {"drop_path_rate": self.drop_path_rate}
        self.model = build_segmentation(
            self.backbone,
            num_classes=self.num_classes,
            in_chans=channels,
            pretrained=self.pretrained,
            checkpoint=self.checkpoint,
            image_size=self._size,
            aux_loss=self.aux_loss > 0,
            options=rate | self.model_kwargs,
        )
        self._channels = channels
        self._read_backbone_config(self.model)
        self._initial_fingerprint = fingerprint(self.model)

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        return load_segmentation(path, channels=self.in_chans or 3)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Bring pictures to one size, augmented together with their masks for training."""
        if is_stream(dataset):
            do = "Pass a dataset with a length, or a DataLoader of (images, masks)."
            raise DataError(expected("data with a length", type(dataset).__name__, do))
        if len(dataset) == 0:
            return dataset
        with preserved_generators():
            image, _ = split_pair(dataset[0], 0)
        if self._size is None:
            self._size = image_size_of(image, self._config, _FILE_SIZE, isinstance(self.backbone, nn.Module))
        augment = self.augment if train else None
        return PreparedPairs(
            dataset,
            JointTransform(self._size, augment, train=train, ignore_index=self.ignore_index),
            channels=self._channels,
            num_classes=self.num_classes,
            ignore_index=self.ignore_index,
            values=self.mask_values,
            needs_masks=train,
        )

    @staticmethod
    def collate_fn(examples: list[Any]) -> Any:  # type: ignore[override]
        """Stack the samples; masks of unequal sizes stay a list."""
        if not isinstance(examples[0], Mapping) or "mask" not in examples[0]:
            return default_collate(examples)
        masks = SampleList(example["mask"] for example in examples)
        others = default_collate([{k: v for k, v in example.items() if k != "mask"} for example in examples])
        is_even = len({mask.shape for mask in masks}) == 1
        return {**others, "mask": torch.stack(masks) if is_even else masks}

    def _parts(self, batch: Any) -> tuple[Tensor, Any, list[tuple[int, int]] | None]:
        """Normalised images, masks (None if there are none) and the sizes of the pictures before they were resized."""
        images, masks = split_pair(batch, 0)
        sizes = batch.get("size") if isinstance(batch, Mapping) else None
        pairs = None if sizes is None else [(int(height), int(width)) for height, width in sizes.tolist()]
        return self._normalize(images), masks, pairs

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> Loss:
        """The loss over the valid pixels; its weight is their number, or the sum of their class weights."""
        images, masks = split_pair(batch, 0)
        if masks is None:
            raise DataError("Expected batches of (images, masks), received images alone. Pass data with masks.")
        pooled = [part for part in self.model.modules() if type(part).__name__ == "ASPPPooling"]
        with single_sample_batchnorm(*pooled, size=len(images)):
            output = self.model(self._normalize(images))
        logits = resize_logits(self._logits_of(output), masks.shape[-2:])
        loss = self._loss(logits, masks)
        if self.aux_loss:
            second = self._loss(resize_logits(upcast(output["aux"]), masks.shape[-2:]), masks)
            loss = PixelLoss(loss.sum + self.aux_loss * second.sum, loss.weight)
        valid = masks != self.ignore_index
        right = ((logits.detach().argmax(1) == masks) & valid).sum()
        return Loss(loss.sum, loss.weight, metrics={"pixel_accuracy": (right, valid.sum())})

    def _loss(self, logits: Tensor, masks: Tensor, weighted: bool = True) -> PixelLoss:
        ce, dice = _LOSSES[self.loss]
        weights = self._weights if weighted else None
        if weights is not None and weights.device != logits.device:
            self._weights = weights = weights.to(logits.device)  # once: a copy in each step would synchronise
        return pixel_loss(logits, masks, ce=ce, dice=dice, ignore_index=self.ignore_index, class_weights=weights)

    def _logits_of(self, output: Any) -> Tensor:
        if isinstance(output, Mapping) and "out" in output:
            output = output["out"]
        logits = getattr(output, "logits", output)  # transformers models return a ModelOutput
        classes = self.num_classes
        if not isinstance(logits, Tensor) or logits.ndim != 4 or logits.shape[1] != (classes or logits.shape[1]):
            what = f"logits of shape (batch, {classes}, height, width) from the model"
            received = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            do = "Give the model a head for these classes, or pass the num_classes it has."
            raise BadArgument(expected(what, received, do))
        return upcast(logits)

    def _full_logits(self, images: Tensor, sizes: list[tuple[int, int]] | None) -> list[Tensor]:
        """Logits (C, H, W) of each picture in its own size: the padding is cut off, the rest resized."""
        room = (images.shape[-2], images.shape[-1])
        logits = resize_logits(self._logits_of(self.model(images)), room)
        if sizes is None or all(size == room for size in sizes):
            return list(logits)
        result = []
        for one, size in zip(logits, sizes, strict=True):
            height, width = fitted_size(size, room)
            result.append(resize_logits(one[None, :, :height, :width], size)[0])
        return result

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Loss and counts of pixels, in the size of the masks."""
        images, masks, sizes = self._parts(batch)
        if masks is None:
            raise DataError(f"Expected pictures with masks to evaluate on, received pictures alone. {MASK_LAYOUT}")
        losses, counts = [], []
        for logits, mask in zip(self._full_logits(images, sizes), masks, strict=True):
            losses.append(self._loss(logits[None], mask[None], weighted=False))
            counts.append(pixel_counts(logits.argmax(0), mask, logits.shape[0], self.ignore_index))
        total, weight = (torch.stack(part).sum() for part in zip(*losses, strict=True))
        return {"loss": (total, weight), "counts": torch.stack(counts)}

    def on_eval_end(self, rows: dict[str, Any]) -> dict[str, float]:
        """Mean IoU, pixel accuracy, and the IoU of each class that occurs or is predicted."""
        scores = segmentation_scores(rows["counts"])
        names = self.class_names or [str(index) for index in range(len(scores.iou))]
        per_class = {f"iou/{name}": value for name, value in zip(names, scores.iou.tolist(), strict=False)}
        known = {name: value for name, value in per_class.items() if value == value}
        return {"miou": scores.miou, "pixel_accuracy": scores.pixel_accuracy} | known

    def predict_step(self, batch: Any) -> dict[str, Any]:
        """The predicted mask of each picture, in its own size."""
        images, _, sizes = self._parts(batch)
        kind = torch.uint8 if (self.num_classes or 0) <= 256 else torch.int64
        return {"mask": [logits.argmax(0).to(kind) for logits in self._full_logits(images, sizes)]}

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        images, masks = split_pair(batch, 0)
        problems = image_problems(images, self._channels)
        if not isinstance(masks, Tensor) or masks.is_floating_point() or masks.ndim != 3:
            received = f"{masks.dtype} of shape {tuple(masks.shape)}" if isinstance(masks, Tensor) else type(masks)
            return [*problems, f"Masks should be integers of shape (batch, height, width), but are {received}."]
        valid = masks[masks != self.ignore_index]
        if not valid.numel():
            problems.append(f"All pixels of the masks are ignore_index={self.ignore_index}.")
        elif self.num_classes is not None and (int(valid.max()) >= self.num_classes or int(valid.min()) < 0):
            problems.append(
                f"Masks should hold 0 to {self.num_classes - 1} or {self.ignore_index}, but {int(valid.max())} occurs."
            )
        return problems

    def export_module(self, model: nn.Module) -> nn.Module:
        """A module that returns logits in the size of the images."""
        return _Logits(model)


class _Logits(nn.Module):
    """From normalised images to logits, with the state dict of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(images)
        output = output["out"] if isinstance(output, Mapping) else output
        return resize_logits(getattr(output, "logits", output), images.shape[-2:])
