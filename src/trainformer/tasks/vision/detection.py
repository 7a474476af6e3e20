"""Object detection with torchvision's detectors, FCOS on any timm backbone, or any module with the same interface.

The data are in `data.detection`, the augmentation in `box_augment`, the detectors in `models.detection`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_count, did_you_mean, expected
from trainformer.data.detection import BOX_LAYOUT, PreparedBoxes, load_detection, scan_labels, split_boxes
from trainformer.data.labels import is_stream
from trainformer.data.metadata import DatasetInfo
from trainformer.data.order import preserved_generators
from trainformer.data.sharding import SampleList
from trainformer.eval.detection import average_precision
from trainformer.models.backbones import UnbuiltModel, check_backbone, model_dtype
from trainformer.models.detection import (
    DETECTORS,
    FIXED_SIZES,
    build_detector,
    image_losses,
    label_offset_of,
    set_limits,
)
from trainformer.tasks.export_limits import WeightsOnly
from trainformer.tasks.vision.base import VisionTask, fingerprint, image_size_of
from trainformer.tasks.vision.box_augment import BoxAugment, BoxTransform, check_box_augment
from trainformer.tasks.vision.class_names import ClassNamesInState
from trainformer.tasks.vision.joint_augment import fitted_size

_FILE_SIZE = (640, 640)  # of pictures from files, if nothing else is asked for
_PREDICTED = ("boxes", "scores", "labels")
_TRUE = ("boxes", "labels", "iscrowd", "area")


@dataclass(eq=False)
class ObjectDetection(ClassNamesInState, VisionTask):
    """Find objects as boxes with a class.

    `backbone` is one of torchvision's detectors (`fasterrcnn_resnet50_fpn`, `fasterrcnn_mobilenet_v3_large_320_fpn`,
    `retinanet_resnet50_fpn`, `fcos_resnet50_fpn`, `ssdlite320_mobilenet_v3_large`, ...), the name of a timm model,
    which becomes an FCOS detector with a feature pyramid, or your own module that is called as those of torchvision.
    `num_classes` counts the classes without a background and comes from the data if not given. `image_size` is
    (height, width) or one number for both; by default, pictures from files are brought to 640 x 640, and tensors keep
    their size.

    `augment` is `"basic"` (scaled by 0.6 to 1.4, cropped, flipped), `"strong"` (colours, zoom and crops, as for SSD),
    `"flip"`, `"none"`, or a function of an image and its target. `score_threshold` is the least score of a detection
    and `max_detections` their number per image; None keeps those of the detector. `label_offset` is the label of the
    first class in your own module: 1 if 0 is the background.

    >>> task = ObjectDetection("resnet10t", num_classes=3, pretrained=False, image_size=64)
    >>> _ = task.model.eval()
    >>> sorted(task.predict_step(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)))
    ['boxes', 'labels', 'scores']
    """

    backbone: str | nn.Module = "fasterrcnn_resnet50_fpn"
    num_classes: int | None = None
    pretrained: bool = True
    _: KW_ONLY
    augment: BoxAugment = "basic"
    score_threshold: float | None = None
    max_detections: int | None = None
    label_offset: int | None = None

    class_names: list[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_box_augment(self.augment)
        for name in ("num_classes", "max_detections"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.score_threshold is not None and not 0 <= self.score_threshold <= 1:
            raise BadArgument(expected("score_threshold to be from 0 to 1", self.score_threshold))
        if self.label_offset not in (None, 0, 1):
            raise BadArgument(expected("label_offset to be 0, or 1 if 0 is the background", self.label_offset))
        if self.in_chans not in (None, 3):
            raise BadArgument(expected("in_chans=3, which detectors take", self.in_chans, "Images are converted."))
        if self.drop_path_rate is not None:
            raise BadArgument(expected("no drop_path_rate", self.drop_path_rate, "Pass it in model_kwargs, with timm."))
        self._init_task()
        self._channels = 3
        if isinstance(self.backbone, str) and self.backbone in FIXED_SIZES:
            fixed = FIXED_SIZES[self.backbone]
            if self._size not in (None, fixed):
                raise BadArgument(expected(f"image_size={fixed} with {self.backbone}, or none", self.image_size))
            self._size = fixed
        elif self.backbone == "fasterrcnn_mobilenet_v3_large_320_fpn":
            self._size = self._size or (320, 320)
        if isinstance(self.backbone, nn.Module):
            self.model = self.backbone
            set_limits(self.model, self.score_threshold, self.max_detections)

    # -- the model -----------------------------------------------------------------------------------------

    def _check_backbone_name(self, name: str) -> None:
        if name in DETECTORS:
            return
        try:
            check_backbone(name)
        except BadArgument as error:
            known = f"{did_you_mean(name, DETECTORS, most=1)} Detectors of torchvision: {', '.join(DETECTORS)}."
            raise BadArgument(expected("backbone to be a detector or a timm model", name, known.strip())) from error

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """The metric to monitor: detectors have no loss in evaluation."""
        return {"monitor_metric": "val/map", "monitor_mode": "max"}

    def inspect_dataset(self, dataset: Any) -> None:
        """Find number of classes and input size in the data, if the user did not pass them."""
        with preserved_generators():
            image, target = split_boxes(dataset[0], 0)
        if target is None:
            raise DataError(f"Expected pictures with boxes to train on, received pictures alone. {BOX_LAYOUT}")
        if self.num_classes is None and not getattr(getattr(dataset, "dataset", dataset), "classes", None):
            self.num_classes = scan_labels(dataset)
        if self._size is None:
            is_module = isinstance(self.backbone, nn.Module)
            self._size = image_size_of(image, self._backbone_config, _FILE_SIZE, any_size=is_module)

    def configure(self, info: DatasetInfo) -> None:
        """Build the detector for the classes of the data. A trained one is never rebuilt."""
        found = len(info.class_names) if info.class_names else None
        if self.num_classes is None and found is None and not isinstance(self.backbone, nn.Module):
            raise BadArgument(
                "Expected data that tells the number of classes, received data that does not. Pass num_classes. "
                f"{BOX_LAYOUT}"
            )
        if self.num_classes is not None and found is not None and found > self.num_classes:
            what = f"num_classes to be at least {found}, the number of classes in the data"
            raise BadArgument(expected(what, self.num_classes, "Leave num_classes out to take it from the data."))
        self.num_classes = self.num_classes or found
        self.class_names = info.class_names or self.class_names
        self._build_for(3)

    def _build(self, channels: int) -> None:
        if self.num_classes is None:
            self.model = UnbuiltModel()
            return
        assert isinstance(self.backbone, str)
        self._size = self._size or _FILE_SIZE
        self.model = build_detector(
            self.backbone,
            num_classes=self.num_classes,
            image_size=self._size,
            pretrained=self.pretrained,
            checkpoint=self.checkpoint,
            options=self.model_kwargs,
        )
        set_limits(self.model, self.score_threshold, self.max_detections)
        self._initial_fingerprint = fingerprint(self.model)

    @property
    def _offset(self) -> int:
        return label_offset_of(self.model) if self.label_offset is None else self.label_offset

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        return load_detection(path)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Bring pictures to one size, augmented together with their boxes for training."""
        if is_stream(dataset):
            do = "Pass a dataset with a length, or a DataLoader of (images, targets)."
            raise DataError(expected("data with a length", type(dataset).__name__, do))
        if len(dataset) == 0:
            return dataset
        assert self._size is not None
        transform = BoxTransform(self._size, self.augment if train else None, train=train)
        return PreparedBoxes(dataset, transform, channels=3, num_classes=self.num_classes, needs_boxes=train)

    @staticmethod
    def collate_fn(examples: list[Any]) -> Any:  # type: ignore[override]
        """Stack the pictures; targets stay a list."""
        if not isinstance(examples[0], Mapping) or "target" not in examples[0]:
            return default_collate(examples)
        stacked = default_collate([{key: one[key] for key in ("image", "size")} for one in examples])
        return {**stacked, "target": SampleList(example["target"] for example in examples)}

    def count_samples(self, batch: Any) -> int:
        """Samples in a batch of a user's loader, such as ``tuple(zip(*samples))``."""
        return len(batch["image"] if isinstance(batch, Mapping) else batch[0])

    def get_train_transforms(self) -> None:  # type: ignore[override]
        """Detectors normalise images themselves."""

    def get_eval_transforms(self) -> None:  # type: ignore[override]
        """Detectors normalise images themselves."""

    @staticmethod
    def _pair(batch: Any) -> tuple[Any, Any]:
        """Images and targets of a batch."""
        return split_boxes(batch, 0)

    def _parts(self, batch: Any) -> tuple[list[Tensor], Any, list[tuple[int, int]] | None]:
        """Images from 0 to 1, targets (None if there are none) and the sizes of the pictures before resizing."""
        images, targets = self._pair(batch)
        kind = model_dtype(self.model)
        pixels = [image.to(kind) / 255 if image.dtype == torch.uint8 else image.to(kind) for image in images]
        sizes = batch.get("size") if isinstance(batch, Mapping) else None
        pairs = None if sizes is None else [(int(height), int(width)) for height, width in sizes.tolist()]
        return pixels, targets, pairs

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> Loss:
        """The sum of the losses of all images; its weight is their number."""
        images, targets, _ = self._parts(batch)
        if targets is None:
            raise DataError(f"Expected batches with boxes, received images alone. {BOX_LAYOUT}")
        kind, offset, count = images[0].dtype, self._offset, len(images)
        given = [{"boxes": one["boxes"].to(kind), "labels": one["labels"] + offset} for one in targets]
        is_even = len({image.shape for image in images}) == 1
        each = image_losses(self.model, torch.stack(images), given) if is_even else None
        if each is None:  # a module of the user, or a loader of images of unequal sizes: the mean over its batch
            losses = self.model(images, given)
            if not isinstance(losses, Mapping):
                raise BadArgument(expected("the detector to return a dict of losses", type(losses).__name__))
            sums = {name: value * count for name, value in losses.items()}
        else:
            sums = {name: torch.stack([losses[name] for losses in each]).sum() for name in each[0]}
        total = torch.stack(list(sums.values())).sum()
        parts = {f"{name}_part" if name == "loss" else name: (value.detach(), count) for name, value in sums.items()}
        return Loss(total, count, metrics=parts)

    def _detect(self, batch: Any) -> list[dict[str, Tensor]]:
        """Detections of each picture, in its own pixels."""
        images, _, sizes = self._parts(batch)
        found = self.model(images)
        results = []
        for place, one in enumerate(found):
            boxes = one["boxes"]
            if sizes is not None:
                height, width = sizes[place]
                room = (images[place].shape[-2], images[place].shape[-1])
                tall, wide = fitted_size((height, width), room)
                scale = torch.tensor([width / wide, height / tall] * 2, dtype=boxes.dtype, device=boxes.device)
                limit = torch.tensor([width, height] * 2, dtype=boxes.dtype, device=boxes.device)
                boxes = torch.minimum((boxes * scale).clamp(min=0), limit)
            results.append({"boxes": boxes, "scores": one["scores"], "labels": one["labels"] - self._offset})
        return results

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Detections and targets of each picture, for the metrics of the whole dataset."""
        targets = self._pair(batch)[1]
        if targets is None:
            raise DataError(f"Expected pictures with boxes to evaluate on, received pictures alone. {BOX_LAYOUT}")
        found = self._detect(batch)
        rows = {name: [one[name] for one in found] for name in _PREDICTED}
        known = [name for name in _TRUE if name in targets[0]]
        return rows | {f"true_{name}": [one[name] for one in targets] for name in known}

    def on_eval_end(self, rows: dict[str, Any]) -> dict[str, float]:
        """COCO's average precision and recall, and the precision of each class that occurs."""
        predicted = [
            dict(zip(_PREDICTED, one, strict=True)) for one in zip(*(rows[n] for n in _PREDICTED), strict=True)
        ]
        known = [name for name in _TRUE if f"true_{name}" in rows]
        true = [dict(zip(known, one, strict=True)) for one in zip(*(rows[f"true_{n}"] for n in known), strict=True)]
        largest = max((int(one["labels"].max()) + 1 for one in true if len(one["labels"])), default=0)
        scores = average_precision(predicted, true, self.num_classes or largest)
        each = scores.pop("per_class")
        names = self.class_names or [str(place) for place in range(len(each))]
        scores |= {f"map/{name}": value for name, value in zip(names, each, strict=False)}
        return {name: value for name, value in scores.items() if value == value}

    def predict_step(self, batch: Any) -> dict[str, Any]:
        """Boxes (x1, y1, x2, y2) in the pixels of each picture, with scores and labels."""
        found = self._detect(batch)
        return {name: [one[name] for one in found] for name in _PREDICTED}

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        images, targets = self._pair(batch)
        problems = []
        if isinstance(images, Tensor) and images.is_floating_point() and float(images.max()) > 1.5:
            problems.append("Float images should be from 0 to 1, but their values are larger. Pass pixels as uint8.")
        if targets is not None and not any(len(one["boxes"]) for one in targets):
            problems.append("No image of the batch has a box.")
        return problems

    def export_module(self, model: nn.Module) -> nn.Module:
        return WeightsOnly(model, "a list of images")


def _by_image(columns: dict[str, list[Tensor]]) -> list[dict[str, Tensor]]:
    return [dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)]
