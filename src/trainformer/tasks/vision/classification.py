"""Image classification: any timm backbone, or any module that gives logits.

Owns the task: when the model is built and how its head is sized, the loss, the metrics and the checks. Images and their
data are in `base`, what is done to one image in `augment`, what to a batch in `batch`, what recipes mean in `recipes`.
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
from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.folder import LAYOUT
from trainformer.data.image import split_sample
from trainformer.data.metadata import DatasetInfo
from trainformer.eval.classification import confusion_matrix, precision_recall_f1, topk_correct
from trainformer.models.backbones import UnbuiltModel, Weights, num_outputs
from trainformer.models.heads import single_sample_batchnorm
from trainformer.tasks.adapter_mixin import AdapterMixin
from trainformer.tasks.confusion import confusion_record
from trainformer.tasks.vision.arguments import (
    balanced_weights,
    check_arguments,
    first_whole_epoch,
    given_weights,
    sides_of,
)
from trainformer.tasks.vision.augment import Augment, mirrors
from trainformer.tasks.vision.base import VisionTask, fingerprint
from trainformer.tasks.vision.batch import (
    ClassLoss,
    Mixed,
    RandomErasing,
    averaged,
    binary_cross_entropy,
    correct,
    cross_entropy,
    mix,
    views,
)
from trainformer.tasks.vision.checks import label_problems
from trainformer.tasks.vision.recipes import recipe_arguments, recipe_settings
from trainformer.tasks.vision.report import calibration_error, confusion_table


@dataclass(eq=False)
class ImageClassification(AdapterMixin, VisionTask):
    """Classify images with a timm backbone, or with a module of your own that gives logits.

    The head is sized from the data unless `num_classes` says otherwise; so are the input channels (`in_chans`).
    `image_size` is (height, width) or one number for both. Left out, it is the backbone's own size for images from
    files (and for backbones with a fixed size), and for tensors the size they have, though at least 32 pixels.

    `augment` is `"basic"` (random resized crop and flip), `"crop"` (shifts by up to an eighth, without flips),
    `"randaugment"` or `"trivial"` (basic and one of torchvision's policies), `"none"`, or a function of one image,
    which is a PIL image or a uint8 tensor. The first two run on the device for images that are tensors in memory.
    `random_erasing` is the share of images to erase a part of.

    `mixup` and `cutmix` are alphas (0: off); each image is mixed with a share of its own, in one of the two ways where
    both are on, and `mixup_prob` of the images at all. They stop with epoch `mixup_off_epoch` if that is not 0, and for
    the last `mixup_off_last` epochs of a run (below 1: that share of them).

    `loss` is `"ce"` or `"bce"`, in which every class is a yes or no; `class_weights` weigh the former: a number per
    class, or `"balanced"` for the inverse of the frequencies. With `freeze_backbone` the classifier alone is trained,
    with `adapter` (a `LoRA`, say) what it adds to the backbone as well; statistics of batch normalisation then stay.
    `tta` averages the probabilities of several views in evaluation and prediction: `"flip"`, or a number of views.
    `model_kwargs` go to `timm.create_model`. `recipe="modern"` sets what was left out, here and in the trainer; see
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
    image_size: int | tuple[int, int] | None = None
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
    augment: Augment = "basic"
    random_erasing: float = 0.0
    drop_rate: float | None = None
    drop_path_rate: float | None = None
    freeze_backbone: bool = False
    adapter: Adapter | None = None
    tta: int | str = 0
    topk: Sequence[int] = (1, 5)
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    in_chans: int | None = None
    checkpoint: Weights | None = None

    class_names: list[str] | None = field(init=False, default=None)
    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation: rows are labels

    def __new__(cls, *args: Any, **kwargs: Any) -> ImageClassification:
        """Remember which arguments were passed: against a recipe, a default passed on purpose counts too."""
        self = super().__new__(cls)
        try:
            self.__dict__["_passed"] = frozenset(inspect.signature(cls.__init__).bind(self, *args, **kwargs).arguments)
        except TypeError:
            self.__dict__["_passed"] = frozenset()  # __init__ is about to say what is wrong
        return self

    def __post_init__(self) -> None:
        check_arguments(self)
        self._check_adapter("vision")
        self._begin()
        self._epoch = 0
        self._run: Any = None  # the settings of the run, which may still grow
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
        """Size the head and the first layer from the data. A model that has been trained is never built again."""
        classes = self._classes_for(info)
        channels = self.in_chans or self._channels_for(info)
        self.num_classes = classes
        self._samples = info.num_samples or None
        self._follow_recipe(self._size or sides_of(info))
        self._build_for(channels)
        self.class_names = info.class_names or self.class_names
        if self.class_weights == "balanced":
            self._weights = balanced_weights(info, classes)
        else:
            self._weights = given_weights(self.class_weights, classes)

    def _follow_recipe(self, size: tuple[int, ...] | None) -> None:
        """Take from the recipe what nobody has chosen: neither when the task was made nor since."""
        for name, value in recipe_arguments(self.recipe, self.backbone, size).items():
            before = self._from_recipe.get(name)
            if name not in self.__dict__["_passed"] and (before is None or getattr(self, name) == before):
                setattr(self, name, value)
                self._from_recipe[name] = value

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Settings of the run that the recipe has."""
        self._run = settings
        if self.adapter is not None and settings.layer_decay is not None:
            raise BadArgument("Expected no layer_decay with an adapter, whose layers it does not know. Leave it out.")
        batch = settings.batch_size * settings.accumulation_steps
        pretrained = self.pretrained or self.checkpoint is not None
        wanted = recipe_settings(self.recipe, self.backbone, pretrained, batch)
        # A way into the library that keeps no average of the weights by itself has no such setting.
        return {name: value for name, value in wanted.items() if hasattr(settings, name)}

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

    def _build(self, channels: int) -> None:
        if self.num_classes is None:
            self.model = UnbuiltModel()
            return
        rates = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        self.model = self._make_backbone(self.num_classes, channels, **rates)
        self._freeze()
        self._adapt()
        self._as_built = fingerprint(self.model)

    def _adopt(self, model: nn.Module) -> None:
        """Take a module that the user brings, as it is."""
        outputs = num_outputs(model)
        if outputs == 0:
            raise BadArgument(
                "Expected backbone to give logits, received a model without a head (num_classes=0). "
                "Build it with the number of classes, or pass its name."
            )
        if outputs is not None and self.num_classes not in (None, outputs):
            raise BadArgument(expected(f"num_classes={outputs}, which backbone was built for", self.num_classes))
        self.model = model
        self.num_classes = self.num_classes or outputs
        self._freeze()
        self._look_at(model)
        self._adapt()

    def _adapt(self) -> None:
        if self.adapter is not None:
            self.model = self.adapter.apply(self.model, kind="vision")

    def _freeze(self) -> None:
        """With `freeze_backbone`, leave the classifier alone to be trained."""
        if self.freeze_backbone:
            trained = {id(p) for part in self._classifier() for p in part.parameters()}
            for parameter in self.model.parameters():
                parameter.requires_grad_(id(parameter) in trained)

    def _classifier(self) -> list[nn.Module]:
        """The last layer (some models have two), by the model's own account."""
        find = getattr(self.model, "get_classifier", None)
        found = find() if callable(find) else None
        several = found if isinstance(found, tuple | list) else [found]
        parts = [part for part in several if isinstance(part, nn.Module)]
        if not any(True for part in parts for _ in part.parameters()):
            raise BadArgument(
                expected(
                    "a model that tells which of its layers is the classifier (timm's do, by get_classifier())",
                    type(self.model).__name__,
                    "Leave freeze_backbone out, and set requires_grad=False on what is not to be trained.",
                )
            )
        return parts

    def set_train_mode(self, train: bool) -> None:
        """Training or evaluation mode. A frozen backbone is always in the latter: no statistics move, nothing drops.

        Under an adapter they do not move either: its checkpoint would not hold them.
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

    def _sample_augment(self, train: bool) -> Augment:
        return self.augment if train else None

    def get_train_transforms(self) -> nn.Module:
        """Normalising on the device, with augmentation where it runs there, and random erasing if asked for."""
        if self._augments_on_device or not self.random_erasing:
            return super().get_train_transforms()
        return RandomErasing(self.random_erasing, self._normalize)

    # -- steps ---------------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int) -> None:
        """Remember where we are: mixing stops at some epoch."""
        self._epoch = epoch

    def train_step(self, batch: Any) -> Loss:
        """The loss with smoothing, mixing and class weights, as a sum over the weights of the labels."""
        images, labels = self._images_and_labels(batch)
        mixed = mix(images, self.mixup, self.cutmix, self.mixup_prob) if self._mixes() else None
        with single_sample_batchnorm(self.model, size=len(images)):
            logits = self._logits(images if mixed is None else mixed.images)
        loss = self._loss(logits, labels, mixed)
        right = correct(logits.detach().argmax(-1), labels, mixed)
        return Loss(loss.sum, loss.weight, metrics={"accuracy": (right, len(labels))})

    def _loss(self, logits: Tensor, labels: Tensor, mixed: Mixed | None) -> ClassLoss:
        if self.loss == "ce":
            weights = self._weights_like(logits)
            return cross_entropy(logits, labels, mixed, class_weights=weights, label_smoothing=self.label_smoothing)
        return binary_cross_entropy(
            logits,
            labels,
            mixed,
            label_smoothing=self.label_smoothing,
            target_threshold=self.bce_target_threshold,
            sum_classes=self.bce_sum,
        )

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Plain loss and accuracy, and the predictions for the metrics of the whole set."""
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
            if 1 < k < scores.shape[-1]:  # the first is the accuracy, and all of them are always right
                metrics[f"top{k}"] = (topk_correct(scores, labels, k).sum(), count)
        return metrics | {"prediction": predictions, "confidence": confidence, "label": labels}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Macro F1 and calibration error of the whole set; the confusion matrix is kept as `confusion`."""
        predictions, labels = rows["prediction"], rows["label"]
        self.confusion = confusion_matrix(predictions, labels, self.num_classes)
        return {
            "f1": precision_recall_f1(predictions, labels, "macro", self.num_classes).f1.item(),
            "ece": calibration_error(rows["confidence"], predictions == labels),
        }

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """The confusion matrix of the latest evaluation, for the records of the run."""
        return confusion_record(self.confusion, self.class_names)

    def confusion_table(self, most: int = 20) -> Table:
        """The confusion matrix of the latest evaluation for printing (``rich.print(task.confusion_table())``).

        With more than `most` classes it lists the commonest mistakes instead.
        """
        if self.confusion is None:
            raise BadArgument("Expected an evaluation to tell of, received none yet. Call trainer.evaluate() first.")
        return confusion_table(self.confusion, self.class_names, most)

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """Class index, its probability, and the probabilities of all classes. Labels may be there or not."""
        images, _ = split_sample(batch)
        probabilities = self._scores(self._normalize(images)).softmax(-1)
        probability, prediction = probabilities.max(-1)
        return {"prediction": prediction, "probability": probability, "probabilities": probabilities}

    def _scores(self, images: Tensor) -> Tensor:
        """Logits, averaged over views where that is asked for."""
        return averaged([self._logits(view) for view in self._views(images)], binary=self.loss == "bce")

    def _views(self, images: Tensor) -> Iterator[Tensor]:
        if self.tta == "flip":
            return views(images, 2, mirror=True)
        assert isinstance(self.tta, int)
        return views(images, max(1, self.tta), mirror=mirrors(self.augment))

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

    def as_pixels(self, images: Tensor) -> Tensor:
        """Images as they are shown: from 0 to 1, normalising undone."""
        if images.dtype == torch.uint8:
            return images.float() / 255
        black, white = (self._normalize(torch.full_like(images[:1], level, dtype=torch.uint8)) for level in (0, 255))
        return (images.float() - black) / (white - black)

    def _mixes(self) -> bool:
        if (self.mixup <= 0 and self.cutmix <= 0) or 0 < self.mixup_off_epoch <= self._epoch:
            return False
        if self.mixup_off_last == 0 or self._run is None:
            return True
        # Asked anew in every step: a run may be given more epochs.
        return self._epoch < first_whole_epoch(self._run, self.mixup_off_last, self._samples)

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
        return super().check_batch(batch) + label_problems(split_sample(batch)[1], self.num_classes)

    def config_dict(self) -> dict[str, Any]:
        """The arguments, as far as they can be written down, and what was derived from the data."""
        return super().config_dict() | {"class_names": self.class_names}

    def __getstate__(self) -> dict[str, Any]:
        """Copies of a task do not belong to its run."""
        return {**self.__dict__, "_run": None}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run, or one that only predicts, needs beside the weights."""
        return super().state_dict() | {"epoch": self._epoch, "class_names": self.class_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        super().load_state_dict(state)
        self._epoch, self.class_names = state["epoch"], state["class_names"]
