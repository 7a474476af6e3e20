"""Image classification with any timm backbone, or any module that returns logits.

Dataset preparation is in `base`, per-sample augmentation in `augment`, batch operations and losses in `batch`, recipes
in `recipes`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from trainformer.adapters.base import Adapter
from trainformer.core import BadArgument, Loss
from trainformer.core.errors import expected
from trainformer.data.image import split_sample
from trainformer.data.metadata import DatasetInfo
from trainformer.eval.classification import confusion_matrix, precision_recall_f1, topk_correct
from trainformer.losses.numerics import upcast
from trainformer.models.backbones import UnbuiltModel, num_outputs
from trainformer.models.heads import single_sample_batchnorm
from trainformer.tasks.adapter_mixin import AdapterMixin
from trainformer.tasks.classification_report import calibration_error, confusion_record, confusion_table
from trainformer.tasks.vision.augment import FLIPPING, AugmentSpec
from trainformer.tasks.vision.base import VisionTask, fingerprint
from trainformer.tasks.vision.batch import (
    ClassLoss,
    Mixed,
    RandomErasing,
    average_logits,
    binary_cross_entropy,
    correct,
    cross_entropy,
    mix,
    tta_views,
)
from trainformer.tasks.vision.checks import (
    balanced_weights,
    check_arguments,
    first_unmixed_epoch,
    given_weights,
    image_hw,
    label_problems,
)
from trainformer.tasks.vision.recipes import recipe_arguments, recipe_settings


@dataclass(eq=False)
class ImageClassification(AdapterMixin, VisionTask):
    """Classify images with a timm backbone, or with your own module that returns logits.

    `num_classes` and `in_chans` are inferred from the data if not given. `image_size` is (height, width) or one number
    for both. By default, images from files are resized to the backbone's input size; tensors keep their size (at least
    32 pixels), unless the backbone has a fixed input size.

    `augment` is `"basic"` (random resized crop and flip), `"crop"` (shifts by up to an eighth, no flips),
    `"randaugment"` or `"trivial"` (basic plus a torchvision policy), `"none"`, or a function of one image (a PIL image
    or a uint8 tensor). `"basic"` and `"crop"` run on the device if the images are tensors in memory.
    `random_erasing` is the probability of erasing a part of an image.

    `mixup` and `cutmix` are alphas (0: off), drawn per image; if both are on, each image uses one of them.
    `mixup_prob` is the fraction of images that are mixed. Mixing stops at epoch `mixup_off_epoch` (if not 0), and for
    the last `mixup_off_last` epochs of the run (below 1: that fraction of the epochs).

    `loss` is `"ce"`, or `"bce"` for one binary problem per class. `class_weights` weight `"ce"`: one number per class,
    or `"balanced"` for inverse frequencies. `freeze_backbone` trains only the classifier; `adapter` (e.g. a `LoRA`)
    also trains what it adds to the backbone. Both keep BatchNorm statistics fixed. `tta` averages the probabilities of
    several views in evaluation and prediction: `"flip"`, or a number of views. `model_kwargs` are passed to
    `timm.create_model`. `recipe="modern"` sets the arguments and trainer settings that you did not pass; see
    `trainformer.tasks.vision.recipes`.

    >>> task = ImageClassification("resnet10t", num_classes=10, pretrained=False)
    >>> rows = task.predict_step(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    >>> rows["probabilities"].shape
    torch.Size([2, 10])
    """

    backbone: str | nn.Module = "resnet50"
    num_classes: int | None = None
    pretrained: bool = True
    _: KW_ONLY
    recipe: str | None = None
    loss: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.0
    bce_target_threshold: float | None = None
    bce_sum: bool = False
    class_weights: Literal["balanced"] | Sequence[float] | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_off_epoch: int = 0
    mixup_off_last: float = 0
    augment: AugmentSpec = "basic"
    random_erasing: float = 0.0
    drop_rate: float | None = None
    freeze_backbone: bool = False
    adapter: Adapter | None = None
    tta: int | str = 0
    topk: Sequence[int] = (1, 5)

    prediction_name = "probabilities"

    class_names: list[str] | None = field(init=False, default=None)
    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation, labels as rows

    def __new__(cls, *args: Any, **kwargs: Any) -> ImageClassification:
        """Record which arguments were passed: a recipe must not override a default that was passed explicitly."""
        self = super().__new__(cls)
        try:
            self.__dict__["_passed"] = frozenset(inspect.signature(cls.__init__).bind(self, *args, **kwargs).arguments)
        except TypeError:
            self.__dict__["_passed"] = frozenset()  # __init__ is about to raise the error
        return self

    def __post_init__(self) -> None:
        check_arguments(self)
        self._check_adapter("vision")
        self._init_task()
        self._epoch = 0
        self._run: Any = None  # the settings of the run; more epochs may be added later
        self._samples: int | None = None
        self._weights: Tensor | None = None
        self._from_recipe: dict[str, Any] = {}
        self._follow_recipe(self._size)
        if isinstance(self.backbone, nn.Module):
            self._adopt(self.backbone)
        if self.num_classes is not None and self.class_weights != "balanced":
            self._weights = given_weights(self.class_weights, self.num_classes)

    # -- the model -----------------------------------------------------------------------------------------

    def configure(self, info: DatasetInfo) -> None:
        """Build head and first layer for the data. A trained model is never rebuilt."""
        classes = self._classes_for(info)
        channels = self.in_chans or self._channels_for(info)
        self.num_classes = classes
        self._seen_shape = info.input_shape
        self._samples = info.num_samples or None
        shape = info.input_shape
        data_size = image_hw(shape) if shape is not None and len(shape) in (2, 3) else None
        self._follow_recipe(self._size or data_size)
        self._build_for(channels)
        self.class_names = info.class_names or self.class_names
        if self.class_weights == "balanced":
            self._weights = balanced_weights(info, classes)
        else:
            self._weights = given_weights(self.class_weights, classes)

    def _follow_recipe(self, size: tuple[int, ...] | None) -> None:
        """Set the recipe's arguments, except those that were passed or changed since."""
        for name, value in recipe_arguments(self.recipe, self.backbone, size).items():
            before = self._from_recipe.get(name)
            if name not in self.__dict__["_passed"] and (before is None or getattr(self, name) == before):
                setattr(self, name, value)
                self._from_recipe[name] = value

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """The trainer settings of the recipe."""
        self._run = settings
        if self.adapter is not None and settings.layer_decay is not None:
            raise BadArgument("Expected no layer_decay with an adapter, which has no layer order. Leave it out.")
        batch = settings.batch_size * settings.accumulation_steps
        pretrained = self.pretrained or self.checkpoint is not None
        wanted = recipe_settings(self.recipe, self.backbone, pretrained, batch)
        # Some entry points have no such setting (`ema`).
        return {name: value for name, value in wanted.items() if hasattr(settings, name)}

    def _build(self, channels: int) -> None:
        if self.num_classes is None:
            self.model = UnbuiltModel()
            return
        rates = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        self.model = self._make_backbone(self.num_classes, channels, **rates)
        self._freeze_and_adapt()
        self._initial_fingerprint = fingerprint(self.model)

    def _adopt(self, model: nn.Module) -> None:
        """Use the user's module."""
        outputs = num_outputs(model)
        if outputs == 0:
            raise BadArgument(
                "Expected backbone to return logits, received a model without a head (num_classes=0). "
                "Build it with the number of classes, or pass its name."
            )
        if outputs is not None and self.num_classes not in (None, outputs):
            raise BadArgument(expected(f"num_classes={outputs}, which backbone was built for", self.num_classes))
        self.model = model
        self.num_classes = self.num_classes or outputs
        self._read_backbone_config(model)
        self._freeze_and_adapt()

    def _freeze_and_adapt(self) -> None:
        if self.freeze_backbone:
            trained = {id(p) for part in self._classifier() for p in part.parameters()}
            for parameter in self.model.parameters():
                parameter.requires_grad_(id(parameter) in trained)
        if self.adapter is not None:
            self.model = self.adapter.apply(self.model, kind="vision")

    def _classifier(self) -> list[nn.Module]:
        """The classification layers, from `get_classifier()`; some models have two."""
        find = getattr(self.model, "get_classifier", None)
        found = find() if callable(find) else None
        several = found if isinstance(found, tuple | list) else [found]
        parts = [part for part in several if isinstance(part, nn.Module)]
        if not any(True for part in parts for _ in part.parameters()):
            do = "Leave freeze_backbone out, and set requires_grad=False on what should not be trained."
            raise BadArgument(expected("a model with get_classifier(), as timm's have", type(self.model).__name__, do))
        return parts

    def set_train_mode(self, train: bool) -> None:
        """Keep a frozen backbone in eval mode: BatchNorm statistics stay fixed and nothing is dropped.

        With an adapter, BatchNorm also stays in eval mode: the adapter's checkpoint does not contain its statistics.
        """
        if not self.freeze_backbone:
            self.model.train(train)
            for part in self.model.modules() if self.adapter is not None else ():
                if isinstance(part, nn.modules.batchnorm._BatchNorm):
                    part.eval()
            return
        self.model.eval()
        for part in self._classifier():
            part.train(train)

    # -- data ----------------------------------------------------------------------------------------------

    def _sample_augment(self, train: bool) -> AugmentSpec:
        return self.augment if train else None

    def get_train_transforms(self) -> nn.Module:
        """Normalise on the device, with augmentation and random erasing if they run there."""
        if self._augments_on_device or not self.random_erasing:
            return super().get_train_transforms()
        return RandomErasing(self.random_erasing, self._normalize)

    # -- steps ---------------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int) -> None:
        self._epoch = epoch

    def train_step(self, batch: Any) -> Loss:
        """Loss with label smoothing, mixing and class weights; the weight is the sum of the class weights."""
        images, labels = self._images_and_labels(batch)
        mixed = mix(images, self.mixup, self.cutmix, self.mixup_prob) if self._mixes() else None
        with single_sample_batchnorm(self.model, size=len(images)):
            logits = self._logits(images if mixed is None else mixed.images)
        loss = self._loss(logits, labels, mixed)
        right = correct(logits.detach().argmax(-1), labels, mixed)
        rows = None
        if self.per_sample_losses:
            rows = tuple(self._loss(logits.detach(), labels, mixed, reduction="none"))
        return Loss(loss.sum, loss.weight, metrics={"accuracy": (right, len(labels))}, per_sample=rows)

    def _loss(self, logits: Tensor, labels: Tensor, mixed: Mixed | None, reduction: str = "sum") -> ClassLoss:
        if self.loss == "ce":
            options: Any = {"class_weights": self._weights_like(logits), "label_smoothing": self.label_smoothing}
            return cross_entropy(logits, labels, mixed, **options, reduction=reduction)
        return binary_cross_entropy(
            logits,
            labels,
            mixed,
            label_smoothing=self.label_smoothing,
            target_threshold=self.bce_target_threshold,
            sum_classes=self.bce_sum,
            reduction=reduction,
        )

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Loss without regularisation, accuracy, and predictions for the dataset-level metrics."""
        images, labels = self._images_and_labels(batch)
        scores = self._scores(images)
        confidence, predictions = scores.softmax(-1).max(-1)
        count = len(labels)
        if self.loss == "bce":
            loss = binary_cross_entropy(scores, labels, sum_classes=self.bce_sum)
        else:
            loss = cross_entropy(scores, labels)
        metrics: dict[str, Any] = {"loss": (loss.sum, count), "accuracy": (correct(predictions, labels), count)}
        for k in self.topk:
            if 1 < k < scores.shape[-1]:  # top1 is the accuracy, and the top of all classes is always 1
                metrics[f"top{k}"] = (topk_correct(scores, labels, k).sum(), count)
        return metrics | {"prediction": predictions, "confidence": confidence, "label": labels}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Macro F1 and calibration error. Keeps the confusion matrix as `confusion`."""
        predictions, labels = rows["prediction"], rows["label"]
        self.confusion = confusion_matrix(predictions, labels, self.num_classes)
        return {
            "f1": precision_recall_f1(predictions, labels, "macro", self.num_classes).f1.item(),
            "ece": calibration_error(rows["confidence"], predictions == labels),
        }

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        return confusion_record(self.confusion, self.class_names)

    def confusion_table(self, most: int = 20) -> Table:
        """Return the confusion matrix of the latest evaluation as a table (``rich.print(task.confusion_table())``).

        With more than `most` classes it lists the most frequent errors instead.
        """
        if self.confusion is None:
            raise BadArgument("Expected an evaluation before this call, received none. Call trainer.evaluate() first.")
        return confusion_table(self.confusion, self.class_names, most)

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """Class index, its probability, and the probabilities of all classes. Labels are optional."""
        images, _ = split_sample(batch)
        probabilities = self._scores(self._normalize(images)).softmax(-1)
        probability, prediction = probabilities.max(-1)
        return {"prediction": prediction, "probability": probability, "probabilities": probabilities}

    def _scores(self, images: Tensor) -> Tensor:
        """Logits, averaged over the TTA views."""
        return average_logits([self._logits(view) for view in self._views(images)], binary=self.loss == "bce")

    def _views(self, images: Tensor) -> Iterator[Tensor]:
        return tta_views(images, *self._view_options())

    def _view_options(self) -> tuple[int, bool]:
        """Number of TTA views, and whether they are flipped."""
        return (2, True) if isinstance(self.tta, str) else (max(1, self.tta), self.augment in FLIPPING)

    def prediction_module(self, model: nn.Module) -> nn.Module:
        """From normalised images to probabilities, over the TTA views."""
        return _Probabilities(self.export_module(model), *self._view_options(), binary=self.loss == "bce")

    def _logits(self, images: Tensor) -> Tensor:
        output = self.model(images)
        logits = getattr(output, "logits", output)  # transformers models return a ModelOutput
        if logits.ndim != 2 or logits.shape[1] != (self.num_classes or logits.shape[1]):
            what = f"logits of shape (batch, {self.num_classes}) from the model, one per class"
            do = "Give the model a head for these classes, or pass the num_classes it has."
            raise BadArgument(expected(what, f"shape {tuple(logits.shape)}", do))
        return upcast(logits)  # half precision is too coarse for a softmax

    def as_pixels(self, images: Tensor) -> Tensor:
        """Undo the normalisation: images from 0 to 1, for display."""
        if images.dtype == torch.uint8:
            return images.float() / 255
        black, white = (self._normalize(torch.full_like(images[:1], level, dtype=torch.uint8)) for level in (0, 255))
        return (images.float() - black) / (white - black)

    def _mixes(self) -> bool:
        if (self.mixup <= 0 and self.cutmix <= 0) or 0 < self.mixup_off_epoch <= self._epoch:
            return False
        if self.mixup_off_last == 0 or self._run is None:
            return True
        # Computed in each step, since a run can be extended.
        return self._epoch < first_unmixed_epoch(self._run, self.mixup_off_last, self._samples)

    def _weights_like(self, logits: Tensor) -> Tensor | None:
        if self._weights is None:
            if self.class_weights is not None:
                raise BadArgument(
                    "Expected class counts for class_weights='balanced', received none yet. Call "
                    "configure(info) first (Trainer does), or pass the weights as numbers."
                )
            return None
        if self._weights.device != logits.device or self._weights.dtype != logits.dtype:
            self._weights = self._weights.to(logits)  # once: a copy in each step would synchronise
        return self._weights

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        return super().check_batch(batch) + label_problems(split_sample(batch)[1], self.num_classes)

    def config_dict(self) -> dict[str, Any]:
        return super().config_dict() | {"class_names": self.class_names}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}  # a copy does not belong to the run

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"epoch": self._epoch, "class_names": self.class_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._epoch, self.class_names = state["epoch"], state["class_names"]


class _Probabilities(nn.Module):
    """From normalised images to probabilities, as `ImageClassification.predict_step` computes them."""

    def __init__(self, model: nn.Module, views: int, flip: bool, binary: bool) -> None:
        super().__init__()
        self.model, self.views, self.flip, self.binary = model, views, flip, binary

    def forward(self, images: Tensor) -> Tensor:
        outputs = [self.model(view) for view in tta_views(images, self.views, self.flip)]
        logits = [upcast(getattr(output, "logits", output)) for output in outputs]
        return average_logits(logits, binary=self.binary).softmax(-1)
