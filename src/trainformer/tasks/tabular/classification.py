"""Predicting a class from the columns of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.metadata import DatasetInfo
from trainformer.data.tabular.encoder import categories_of
from trainformer.data.tabular.table import Table
from trainformer.eval.classification import confusion_matrix, precision_recall_f1
from trainformer.eval.tabular import macro_auc
from trainformer.tasks.classification_report import confusion_record
from trainformer.tasks.tabular.base import TARGET_NAMES, TabularTask, rows_of
from trainformer.tasks.vision.checks import balanced_weights, given_weights


@dataclass(eq=False)
class TabularClassification(TabularTask):
    """Predict a class from the columns of a table.

    Arguments are those of `TabularRegression`; `target` is one column, whose distinct values are the classes.
    `class_weights` weight the training loss: a number per class, or `"balanced"` for inverse frequencies.

    >>> from trainformer import Trainer
    >>> trainer = Trainer(TabularClassification(), "wine", val_split=0.2, max_steps=2, log="none")
    >>> sorted(trainer.evaluate())
    ['val/accuracy', 'val/auc', 'val/f1', 'val/loss']
    """

    _: KW_ONLY
    class_weights: Literal["balanced"] | Sequence[float] | None = None
    label_smoothing: float = 0.0

    class_names: list[str] | None = field(init=False, default=None)
    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation, labels as rows

    def __post_init__(self) -> None:
        if isinstance(self.class_weights, str) and self.class_weights != "balanced":
            raise BadArgument(expected("class_weights to be 'balanced', a list of numbers or None", self.class_weights))
        if not 0 <= self.label_smoothing < 1:
            raise BadArgument(expected("label_smoothing to be from 0 to 1", self.label_smoothing))
        super().__post_init__()
        self._weights: Tensor | None = None

    def convert_data(self, data: Any) -> Any:
        """A table with the classes of its target, if it has one."""
        table = super().convert_data(data)
        if not isinstance(table, Table) or hasattr(table, "targets"):
            return table
        names = [self.target] if isinstance(self.target, str) else [n for n in TARGET_NAMES if n in table.columns][:1]
        if not names or names[0] not in table.columns:
            return table  # rows to predict
        values = categories_of(table, names[0])
        if any(value is None for value in values):
            return table
        table.classes = sorted(set(values), key=_by_number)
        place = {name: index for index, name in enumerate(table.classes)}
        table.targets = np.array([place[value] for value in values], np.int64)
        return table

    def inspect_dataset(self, dataset: Any) -> None:
        super().inspect_dataset(dataset)
        table, name = rows_of(dataset), self._targets[0]
        missing = [index for index, value in enumerate(categories_of(table, name)) if value is None]
        if missing or not hasattr(table, "targets"):
            what = f"a class in each row of the target {name!r} of {table.name}"
            received = f"a missing value in row {missing[0] if missing else '?'}"
            raise DataError(expected(what, received, f"Drop the {len(missing)} rows without."))

    def configure(self, info: DatasetInfo) -> None:
        if info.num_classes is not None and info.num_classes < 2:
            raise DataError(expected(f"at least two classes in {self._targets[0]!r}", info.class_names))
        super().configure(info)
        self.class_names = info.class_names or self.class_names
        if self.class_weights == "balanced":
            self._weights = balanced_weights(info, info.num_classes or 0)
        elif self.class_weights is not None:
            self._weights = given_weights(self.class_weights, info.num_classes or len(self.class_weights))

    def _outputs(self, info: DatasetInfo) -> int:
        assert info.num_classes is not None
        return info.num_classes

    def _has_targets(self, table: Table) -> bool:
        return hasattr(table, "targets")

    def _encode_targets(self, table: Table) -> Tensor:
        return torch.from_numpy(table.targets)

    def _loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None, smoothing: float) -> tuple[Tensor, Any]:
        total = F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)
        return total, len(labels) if weights is None else weights[labels].sum()

    def train_step(self, batch: Any) -> Loss:
        """Cross-entropy; its weight is the number of rows, or the sum of their class weights."""
        labels, logits = self._target_of(batch), self._forward(batch)
        if self._weights is not None and self._weights.device != logits.device:
            self._weights = self._weights.to(logits.device)  # once: a copy in each step would synchronise
        weights = None if self._weights is None else self._weights.to(logits.dtype)
        right = (logits.detach().argmax(-1) == labels).sum()
        loss = self._loss(logits, labels, weights, self.label_smoothing)
        return Loss(*loss, metrics={"accuracy": (right, len(labels))})

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Loss without class weights, and probabilities for the metrics of the whole dataset."""
        labels, logits = self._target_of(batch), self._forward(batch)
        return {"loss": self._loss(logits, labels, None, 0.0), "probabilities": logits.softmax(-1), "label": labels}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Accuracy, macro F1, and the area under the ROC curve, if all classes occur."""
        probabilities, labels = rows["probabilities"], rows["label"]
        predictions, classes = probabilities.argmax(-1), probabilities.shape[1]
        self.confusion = confusion_matrix(predictions, labels, classes)
        auc = macro_auc(probabilities, labels)
        return {
            "accuracy": (predictions == labels).double().mean().item(),
            "f1": precision_recall_f1(predictions, labels, "macro", classes).f1.item(),
        } | ({"auc": auc} if auc == auc else {})

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """The class with its probability, and the probabilities of all."""
        probabilities = self._forward(batch).softmax(-1)
        probability, prediction = probabilities.max(-1)
        return {"prediction": prediction, "probability": probability, "probabilities": probabilities}

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        return confusion_record(self.confusion, self.class_names)

    def config_dict(self) -> dict[str, Any]:
        return super().config_dict() | {"class_names": self.class_names}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"class_names": self.class_names}

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        if self.class_names is not None and state["class_names"] not in (None, self.class_names):
            do = "Pass the data that the checkpoint was trained on, and other data to evaluate()."
            raise DataError(expected(f"a checkpoint with the classes {self.class_names}", state["class_names"], do))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.class_names = state["class_names"]


def _by_number(name: str) -> tuple[float, str]:
    """Sort classes that are numbers by value, others by name."""
    try:
        return float(name), name
    except ValueError:
        return float("inf"), name
