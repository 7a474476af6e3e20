"""Classifiers evaluated during self-supervised training: how well the features separate classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainformer.callbacks.base import EveryNthEvaluation, LinearProbe, TrainerLike
from trainformer.core.errors import BadArgument, DataError, expected


@dataclass
class OnlineKNN(EveryNthEvaluation):
    """At each evaluation, classify the validation data by its nearest neighbours in the training data.

    The protocol of DINO: `k` neighbours by cosine similarity, votes weighted by exp(similarity / `temperature`). Up to
    `max_train` evenly spaced training images are embedded without augmentation. The accuracy is logged as
    ``val/online_knn`` and can be monitored; with several validation sets, each has its own (``val/NAME/online_knn``).
    Needs labelled data and a task that predicts embeddings (`SSL`, `MetricLearning`), on JAX a `predict_step` that
    returns them. `every`: run at every N-th evaluation.
    """

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
            k = min(self.k, len(bank["embedding"]))
            found[_metric(self.name, name)] = trainer.knn_accuracy(queries, bank, k, self.temperature)
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
    labelled data and features of each step: on torch a task that exposes those of its last batch as
    `task.step_features`, as `SSL` does (except MAE, which sees no whole images in training); on JAX a `predict_step`
    with an `embedding` and a `label`, which is then computed for each training batch. A BatchNorm layer normalises the
    features, whose scale changes during training. All ranks train the same classifier on the features of all ranks.
    """

    sets_control = False

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    name: str = "val/online_linear"

    probe: LinearProbe | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise BadArgument(expected("OnlineLinear's lr to be positive", self.lr))

    def attach(self, trainer: TrainerLike) -> None:
        """Prepare the classifier, which is built with the first features."""
        self.probe = trainer.linear_probe(self.lr, self.momentum, self.weight_decay)

    @property
    def classifier(self) -> Any:
        """The classifier, once there is one."""
        return None if self.probe is None else self.probe.classifier

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        assert self.probe is not None
        latest = trainer.step_features()
        if latest is None:
            raise BadArgument(
                "OnlineLinear needs features and labels of each step: a task that exposes them as `step_features` "
                "(SSL does, except for MAE), on JAX a predict_step that returns 'embedding' and 'label', and labelled "
                "data."
            )
        classes = trainer.context.config.get("num_classes")
        if classes is None:
            raise BadArgument(
                "OnlineLinear needs a dataset that declares its number of classes (on JAX: a trainer with the "
                "attribute num_classes), and received one that does not."
            )
        self.probe.train(*latest, int(classes))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that `compute_metrics` returns."""
        return (self.name,)

    def compute_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.classifier is None:
            return found
        assert self.probe is not None
        for name in trainer.evaluated_sets or ("",):
            rows = trainer.embed(f"val/{name}" if name else "val")
            if "label" in rows and (accuracy := self.probe.accuracy(rows["embedding"], rows["label"])) is not None:
                found[_metric(self.name, name)] = accuracy
        return found

    def state_dict(self) -> dict[str, Any]:
        return {} if self.probe is None else self.probe.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.probe is not None
        self.probe.load_state_dict(state)
