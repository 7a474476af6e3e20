"""Image classification: any timm backbone, or any module that gives logits.

Owns the task: when the model is built and how its head is sized, the loss, the metrics and the checks. Images and their
data are in `base`, what is done to one image in `augment`, what to a batch in `batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.folder import LAYOUT
from trainformer.data.image import split_sample
from trainformer.data.info import DatasetInfo
from trainformer.eval.classification import confusion_matrix, precision_recall_f1, topk_correct
from trainformer.models.backbones import Unbuilt, outputs_of
from trainformer.tasks.vision.arguments import balanced_weights, check_arguments, given_weights
from trainformer.tasks.vision.augment import Augment
from trainformer.tasks.vision.base import VisionTask, fingerprint
from trainformer.tasks.vision.batch import RandomErasing, correct, cross_entropy, mix
from trainformer.tasks.vision.checks import label_problems


@dataclass(eq=False)
class ImageClassification(VisionTask):
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
    checkpoint: str | Path | None = None

    model: nn.Module = field(init=False, repr=False)
    class_names: list[str] | None = field(init=False, default=None)
    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation: rows are labels

    def __post_init__(self) -> None:
        check_arguments(self)
        self._begin()
        self._epoch = 0
        self._weights: Tensor | None = None
        self.model = Unbuilt()
        if isinstance(self.backbone, nn.Module):
            self._adopt(self.backbone)
        elif self.num_classes is not None:
            self._build(self.num_classes, self.in_chans or 3)
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

    def _build(self, classes: int, channels: int) -> None:
        rates = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        self.model = self._make_backbone(classes, channels, **rates)
        self._as_built = fingerprint(self.model)

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
        self._look_at(model)

    # -- data ----------------------------------------------------------------------------------------------

    def _sample_augment(self, train: bool) -> Augment:
        return self.augment if train else None

    def get_train_transforms(self) -> nn.Module:
        """Normalising on the device, and random erasing if asked for."""
        if not self.random_erasing:
            return self._normalize
        return nn.Sequential(self._normalize, RandomErasing(self.random_erasing))

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
        return super().check_batch(batch) + label_problems(split_sample(batch)[1], self.num_classes)

    def config_dict(self) -> dict[str, Any]:
        """The arguments, as far as they can be written down, and what was derived from the data."""
        return super().config_dict() | {"class_names": self.class_names}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run, or one that only predicts, needs beside the weights."""
        return super().state_dict() | {"epoch": self._epoch, "class_names": self.class_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        super().load_state_dict(state)
        self._epoch, self.class_names = state["epoch"], state["class_names"]
