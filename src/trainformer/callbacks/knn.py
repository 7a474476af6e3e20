"""Nearest neighbours during training: how well the embeddings separate classes, without training a classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.eval.retrieval import knn_accuracy


@dataclass
class OnlineKNN:
    """With each evaluation, classify the validation data by their nearest neighbours in the training data.

    The protocol of DINO and its predecessors: `k` neighbours by cosine, each vote weighted by exp(similarity /
    `temperature`). Training images are embedded as they are, without augmentation, at most `max_train` of them, evenly
    chosen. The result is logged as ``val/online_knn`` and can be monitored. It asks for data with labels and a task
    that predicts embeddings (`SSL`, `MetricLearning`). `every`: with each so-many-th evaluation only.
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
        self._evaluations = 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that `compute_metrics` gives."""
        return (self.name,)

    def compute_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        """The accuracy, as a further metric of an evaluation."""
        self._evaluations += 1
        if self._evaluations % self.every:
            return {}
        if not trainer.same_classes:
            raise DataError(
                "OnlineKNN votes with the labels of the training data, but the validation data have other classes. "
                "Leave it out: the metrics of the task itself (retrieval, kNN among the validation data) go without."
            )
        bank, queries = trainer.embed("train", self.max_train), trainer.embed("val")
        if "label" not in bank or "label" not in queries:
            raise DataError("OnlineKNN needs training and validation data with labels, and received some without.")
        accuracy = knn_accuracy(
            queries["embedding"],
            queries["label"],
            k=min(self.k, len(bank["embedding"])),
            gallery=bank["embedding"],
            gallery_labels=bank["label"],
            weighted=True,
            temperature=self.temperature,
        )
        return {self.name: accuracy}

    def state_dict(self) -> dict[str, Any]:
        """How many evaluations there were."""
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._evaluations = state["evaluations"]
