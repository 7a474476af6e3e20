"""Classifiers evaluated during self-supervised training: how well the features separate classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.callbacks.base import EveryNthEvaluation, TrainerLike
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.eval.retrieval import knn_accuracy
from trainformer.utils.distributed import gather_row_counts, gather_rows


@dataclass
class OnlineKNN(EveryNthEvaluation):
    """At each evaluation, classify the validation data by its nearest neighbours in the training data.

    The protocol of DINO: `k` neighbours by cosine similarity, votes weighted by exp(similarity / `temperature`). Up to
    `max_train` evenly spaced training images are embedded without augmentation. The accuracy is logged as
    ``val/online_knn`` and can be monitored; with several validation sets, each has its own (``val/NAME/online_knn``).
    Needs labelled data and a task that predicts embeddings (`SSL`, `MetricLearning`). `every`: run at every N-th
    evaluation.
    """

    needs_torch = True

    k: int = 20
    temperature: float = 0.07
    max_train: int | None = 50_000
    every: int = 1
    name: str = "val/online_knn"

    def __post_init__(self) -> None:
        for name in ("k", "every"):
            if getattr(self, name) < 1:
                raise BadArgument(expected(f"OnlineKNN's {name} to be at least 1", getattr(self, name)))
        if not self.temperature > 0:
            raise BadArgument(expected("OnlineKNN's temperature to be positive", self.temperature))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that `compute_metrics` returns."""
        return (self.name,)

    def compute_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        if not self.is_due():
            return {}
        if not trainer.same_classes:
            raise DataError(
                "OnlineKNN votes with the labels of the training data, but the validation data has other classes. "
                "Remove it: the task's own metrics (retrieval, kNN within the validation data) do not need it."
            )
        bank, found = trainer.embed("train", self.max_train), {}
        for name in trainer.evaluated_sets or ("",):
            queries = trainer.embed(f"val/{name}" if name else "val")
            if "label" not in bank or "label" not in queries:
                raise DataError(
                    "OnlineKNN needs labels in the training and validation data, and received data without. Remove it."
                )
            found[_metric(self.name, name)] = knn_accuracy(
                queries["embedding"],
                queries["label"],
                k=min(self.k, len(bank["embedding"])),
                gallery=bank["embedding"],
                gallery_labels=bank["label"],
                weighted=True,
                temperature=self.temperature,
            )
        return found


def _metric(name: str, val_set: str) -> str:
    """The name of a metric of a validation set.

    >>> _metric("val/online_knn", "clean"), _metric("val/online_knn", "")
    ('val/clean/online_knn', 'val/online_knn')
    """
    return f"val/{val_set}/{name.removeprefix('val/')}" if val_set else name


@dataclass
class OnlineLinear:
    """Train a linear classifier on the features of each step, and log its validation accuracy.

    A rising ``val/online_linear`` shows that the features improve, long before you train a proper linear probe. The
    classifier has its own optimizer (SGD with momentum) and does not affect the run: the features are detached. Needs
    labelled data and a task that exposes the features of its last batch as `task.step_features`, as `SSL` does (except
    MAE, which sees no whole images in training). A BatchNorm layer normalises the features, whose scale changes during
    training. All ranks train the same classifier on the features of all ranks.
    """

    needs_torch = True
    sets_control = False

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    name: str = "val/online_linear"

    classifier: nn.Sequential | None = field(init=False, default=None, repr=False)
    _steps: int = field(init=False, default=0, repr=False)
    _optimizer: torch.optim.Optimizer | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise BadArgument(expected("OnlineLinear's lr to be positive", self.lr))

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        latest = getattr(trainer.task, "step_features", None)
        if latest is None:
            raise BadArgument(
                "OnlineLinear needs features and labels of each step: a task that exposes them as `step_features` "
                "(SSL does, except for MAE) and labelled data."
            )
        features, labels = latest.features.detach().float(), latest.labels.long()
        counts = gather_row_counts(features)
        features, labels = gather_rows(features, counts), gather_rows(labels, counts)
        if len(features) < 2:  # too few for batch statistics
            return
        classifier, optimizer = self._get_classifier(trainer, features)
        # A plain mean for the first ten steps, then an exponential one: features differ in scale by orders of
        # magnitude, and running statistics that start at 0 and 1 would be far off for dozens of steps.
        self._steps += 1
        classifier[0].momentum = max(0.1, 1 / self._steps)
        # Steps that the run skips because of a non-finite loss still arrive here and would break the classifier for
        # good. Masking such rows needs no device synchronisation.
        finite = features.isfinite().all(1)
        features = torch.where(finite.unsqueeze(1), features, 0.0)
        with torch.enable_grad(), torch.autocast(features.device.type, enabled=False):
            losses = F.cross_entropy(classifier(features), labels, reduction="none")
            torch.where(finite, losses, 0.0).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that `compute_metrics` returns."""
        return (self.name,)

    @torch.no_grad()
    def compute_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        if self.classifier is None:
            return {}
        device, found = next(self.classifier.parameters()).device, {}
        self.classifier.eval()
        for name in trainer.evaluated_sets or ("",):
            rows = trainer.embed(f"val/{name}" if name else "val")
            if "label" not in rows:
                continue
            correct = sum(
                int((self.classifier(chunk.to(device)).argmax(1).cpu() == labels).sum())
                for chunk, labels in zip(rows["embedding"].split(4096), rows["label"].split(4096), strict=True)
            )
            found[_metric(self.name, name)] = correct / len(rows["label"])
        self.classifier.train()
        return found

    def _get_classifier(self, trainer: TrainerLike, features: Tensor) -> tuple[Any, torch.optim.Optimizer]:
        if self.classifier is None or self._optimizer is None:
            classes = trainer.context.config.get("num_classes")
            if classes is None:
                raise BadArgument(
                    "OnlineLinear needs a dataset that declares its number of classes, and received one that does not."
                )
            self._build(features.shape[1], int(classes), features.device)
        assert self.classifier is not None
        assert self._optimizer is not None
        if next(self.classifier.parameters()).device != features.device:  # restored from a checkpoint
            self.classifier.to(features.device)
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # moves its state to the device
        return self.classifier, self._optimizer

    def _build(self, width: int, classes: int, device: torch.device | str) -> None:
        # Zeros, and `skip_init`: the default init would draw from the run's random state.
        linear = nn.utils.skip_init(nn.Linear, width, classes)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.classifier = nn.Sequential(nn.BatchNorm1d(width, affine=False), linear).to(device)
        self._optimizer = torch.optim.SGD(linear.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay)

    def state_dict(self) -> dict[str, Any]:
        if self.classifier is None or self._optimizer is None:
            return {}
        return {
            "steps": self._steps,
            "classifier": self.classifier.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            self.classifier, self._optimizer, self._steps = None, None, 0
            return
        self._steps = state["steps"]
        weight = state["classifier"]["1.weight"]
        self._build(weight.shape[1], weight.shape[0], weight.device)
        assert self.classifier is not None
        assert self._optimizer is not None
        self.classifier.load_state_dict(state["classifier"])
        self._optimizer.load_state_dict(state["optimizer"])
