"""Regression and classification of table rows: numbers and categories, encoded with what the training rows tell.

Tables are read by `data.tabular`, which also owns the encoder; the networks are in `models.tabular`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_choice, check_count, expected
from trainformer.data.fetcher import unwrap_subsets
from trainformer.data.metadata import DatasetInfo
from trainformer.data.tabular.encoder import TableEncoder, categories_of, numbers_of
from trainformer.data.tabular.table import Table, column_named, load_table
from trainformer.eval.classification import confusion_matrix, precision_recall_f1
from trainformer.eval.tabular import macro_auc, regression_scores
from trainformer.losses.numerics import upcast
from trainformer.models.backbones import UnbuiltModel
from trainformer.models.tabular import TABULAR_MODELS, build_tabular
from trainformer.tasks.base import TaskBase
from trainformer.tasks.classification_report import confusion_record
from trainformer.tasks.export_limits import WeightsOnly
from trainformer.tasks.vision.checks import balanced_weights, given_weights

_TARGETS = ("target", "label", "y", "class")  # looked for if none is named


@dataclass(eq=False)
class TabularTask(TaskBase):
    """Base class of the tabular tasks, with the arguments that they share."""

    network: str | nn.Module = "mlp"
    target: str | Sequence[str] | None = None
    _: KW_ONLY
    categorical: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    width: int = 128
    depth: int = 2
    dropout: float = 0.1
    scale: bool = True

    encoder: TableEncoder | None = field(init=False, default=None, repr=False)
    several_targets: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.network, nn.Module):
            check_choice("network", self.network, TABULAR_MODELS)
        check_count("width", self.width)
        check_count("depth", self.depth, least=0 if self.network == "mlp" else 1)
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise BadArgument(expected("dropout to be at least 0 and below 1", self.dropout))
        for name in ("categorical", "ignore"):
            if isinstance(getattr(self, name), str):
                raise BadArgument(expected(f"{name} to be a list of columns", getattr(self, name)))
        if not self.several_targets and self.target is not None and not isinstance(self.target, str):
            raise BadArgument(expected("target to be the name of one column", self.target))
        self._targets: list[str] = []
        # What was encoded, to encode it again after a load; weak, since predictions encode data too.
        self._prepared: list[tuple[Table, weakref.ref[TensorDataset]]] = []
        self.model = self.network if isinstance(self.network, nn.Module) else UnbuiltModel()

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        return self.convert_data(path)

    def convert_data(self, data: Any) -> Any:
        """A table from a path, a frame, arrays, an HF dataset or a list of dicts; loaders are returned as they are."""
        return load_table(data)

    def inspect_dataset(self, dataset: Any) -> None:
        """Learn the encoding of the columns from the training rows."""
        table = _rows_of(dataset)
        self._targets = self._find_targets(table)
        unknown = [name for name in (*self.ignore, *(self.categorical or ())) if name not in table.columns]
        for name in unknown:
            column_named(table, name, "a name in `ignore` or `categorical`")
        taken = {*self._targets, *self.ignore}
        features = [name for name in table.columns if name not in taken]
        if not features:
            raise DataError(expected(f"columns beside the target in {table.name}", "none"))
        kinds = [n for n in features if n in (self.categorical or ()) or not table.is_numeric(n)]
        numbers = [name for name in features if name not in kinds]
        self.encoder = TableEncoder.learn(table, numbers, kinds, self.scale)

    def _find_targets(self, table: Table) -> list[str]:
        if isinstance(self.target, str):
            names = [self.target]
        elif self.target is not None:
            names = list(self.target)
        else:
            names = [name for name in _TARGETS if name in table.columns][:1]
            if not names and self.several_targets:
                names = [name for name in table.columns if name.startswith("target") and name[6:].isdigit()]
            if not names:
                do = "Pass the name of the column to predict as target."
                raise BadArgument(expected(f"a column called target in {table.name}", list(table.columns), do))
        for name in names:
            column_named(table, name, "target")
        return names

    def configure(self, info: DatasetInfo) -> None:
        """Build the network for the columns. A network that exists is kept."""
        if not isinstance(self.model, UnbuiltModel):
            return
        if self.encoder is None:
            do = "Pass a table, arrays or a file, or a module as network."
            raise BadArgument(expected("data whose columns are known", "a loader of batches", do))
        assert isinstance(self.network, str)
        width, kinds = self.encoder.width, self.encoder.cardinalities
        self.model = build_tabular(
            self.network, width, kinds, self._outputs(info), self.width, self.depth, self.dropout
        )

    def _outputs(self, info: DatasetInfo) -> int:
        raise NotImplementedError

    def prepare_dataset(self, dataset: Any, train: bool) -> TensorDataset:
        """Encode the rows: numbers, category indices and, where there are any, targets."""
        table = _rows_of(dataset)
        assert self.encoder is not None
        tensors = [torch.from_numpy(part) for part in self.encoder.encode(table)]
        if train or self._has_targets(table):
            tensors.append(self._encode_targets(table))
        prepared = TensorDataset(*tensors)
        self._prepared = [*self._alive(), (table, weakref.ref(prepared))]
        return prepared

    def _alive(self) -> list[tuple[Table, Any]]:
        return [pair for pair in self._prepared if pair[1]() is not None]

    def _has_targets(self, table: Table) -> bool:
        """Whether each row has its target: rows to predict may lack it."""
        raise NotImplementedError

    def _encode_targets(self, table: Table) -> Tensor:
        raise NotImplementedError

    def _forward(self, batch: Any) -> Tensor:
        """Outputs of the network in float32 or float64. A module of the user gets categories only if there are any."""
        numbers, categories = batch[0], batch[1]
        if isinstance(self.network, nn.Module) and not categories.shape[1]:
            return upcast(self.model(numbers))
        return upcast(self.model(numbers, categories))

    @staticmethod
    def _target_of(batch: Any) -> Tensor:
        if len(batch) < 3:
            raise DataError(
                "Expected rows with their target, received some without: the column is missing, or has missing values."
            )
        return batch[2]

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        if not isinstance(batch, tuple | list) or len(batch) < 3:
            return ["Batches should be (numbers, categories, target)."]
        problems = [] if torch.isfinite(batch[0]).all() else ["Numbers hold NaN or infinite values."]
        counts = [] if self.encoder is None else self.encoder.cardinalities
        high = [int(batch[1][:, place].max()) >= count for place, count in enumerate(counts)]
        return [*problems, *(["Category indices are out of range."] if any(high) else [])]

    def config_dict(self) -> dict[str, Any]:
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        if isinstance(self.network, nn.Module):
            arguments["network"] = type(self.network).__qualname__
        if self.encoder is not None:
            columns = {kind: [c.name for c in getattr(self.encoder, kind)] for kind in ("numeric", "categorical")}
            arguments["columns"] = columns
        return arguments | {"target": self._targets or self.target}

    def export_module(self, model: nn.Module) -> nn.Module:
        return WeightsOnly(model, "numbers and category indices")

    def learned(self) -> dict[str, Any]:
        """The encoding of the columns, with which the network can be built again without the data."""
        return self.state_dict()

    def use_learned(self, learned: Mapping[str, Any]) -> None:
        """Take over what `learned` returned."""
        self.load_state_dict(dict(learned))

    def state_dict(self) -> dict[str, Any]:
        encoder = None if self.encoder is None else self.encoder.state_dict()
        return {"encoder": encoder, "targets": list(self._targets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the encoding, and encode again what was prepared with another one."""
        loaded = None if state["encoder"] is None else TableEncoder.from_state(state["encoder"])
        self._targets = list(state["targets"])
        if loaded is None or loaded == self.encoder:
            return
        self.encoder = loaded
        for table, prepared in self._alive():
            for tensor, values in zip(prepared().tensors, loaded.encode(table), strict=False):
                tensor.copy_(torch.from_numpy(values))

    def check_state(self, state: dict[str, Any]) -> None:
        """Reject a checkpoint of other columns than those of data that were encoded already."""
        if not self._alive() or state["encoder"] is None or self.encoder is None:
            return
        own, loaded = self.encoder, TableEncoder.from_state(state["encoder"])
        if (own.width, len(own.categorical)) != (loaded.width, len(loaded.categorical)):
            what = f"data with the columns of the checkpoint ({', '.join(loaded.names)})"
            do = "Pass the data that the checkpoint was trained on, and other data to evaluate()."
            raise DataError(expected(what, own.names, do))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": []}  # a copy has no data


@dataclass(eq=False)
class TabularRegression(TabularTask):
    """Predict one or several numbers from the columns of a table.

    `network` is `"mlp"`, `"resnet"`, `"ft-transformer"`, or your own module, which is called with the numbers (N, F)
    and, if there are any, the category indices (N, C). `target` is the column to predict, or several. Columns of text
    are categories, others numbers; `categorical` are further columns that are categories. Columns in `ignore` are not
    used.
    `width`, `depth` and `dropout` are those of the network.

    `loss` is `"mse"`, `"mae"` or `"huber"`, of targets that are standardised with `scale`, as the numbers are.
    Metrics and predictions are in the units of the target.

    >>> from trainformer import Trainer
    >>> trainer = Trainer(TabularRegression(), "diabetes", val_split=0.2, max_steps=2, log="none")
    >>> sorted(trainer.evaluate())
    ['val/loss', 'val/mae', 'val/r2', 'val/rmse']
    """

    _: KW_ONLY
    loss: Literal["mse", "mae", "huber"] = "mse"

    several_targets = True

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, _REGRESSION_LOSSES)
        super().__post_init__()
        self._mean = torch.zeros(1, dtype=torch.float64)
        self._std = torch.ones(1, dtype=torch.float64)

    def inspect_dataset(self, dataset: Any) -> None:
        super().inspect_dataset(dataset)
        values = self._values(_rows_of(dataset))
        self._mean, self._std = torch.zeros(values.shape[1]).double(), torch.ones(values.shape[1]).double()
        if self.scale:
            std = values.std(0)
            self._mean = torch.from_numpy(values.mean(0))
            self._std = torch.from_numpy(np.where(std > 0, std, 1.0))

    def _outputs(self, info: DatasetInfo) -> int:
        return len(self._targets)

    def _values(self, table: Table) -> np.ndarray:
        """The targets (rows, targets) in their units."""
        columns = [numbers_of(table, name) for name in self._targets]
        for name, values in zip(self._targets, columns, strict=True):
            missing = np.flatnonzero(np.isnan(values))
            if missing.size:
                what = f"a number in each row of the target {name!r} of {table.name}"
                do = f"Drop the {missing.size} rows without."
                raise DataError(expected(what, f"a missing value in row {missing[0]}", do))
        return np.stack(columns, axis=1)

    def _has_targets(self, table: Table) -> bool:
        return all(name in table.columns and not np.isnan(numbers_of(table, name)).any() for name in self._targets)

    def _encode_targets(self, table: Table) -> Tensor:
        values = torch.from_numpy(self._values(table))
        return ((values - self._mean) / self._std).float()

    def _guesses(self, batch: Any) -> Tensor:
        outputs = self._forward(batch)
        return outputs.unsqueeze(-1) if outputs.ndim == 1 else outputs

    def _sums(self, guesses: Tensor, targets: Tensor) -> Tensor:
        if guesses.shape != targets.shape:
            what = f"outputs of shape (batch, {targets.shape[1]}) from the model"
            raise BadArgument(expected(what, tuple(guesses.shape)))
        return _REGRESSION_LOSSES[self.loss](guesses, targets.to(guesses.dtype), reduction="sum") / targets.shape[1]

    def train_step(self, batch: Any) -> Loss:
        """The mean loss over rows and targets."""
        targets = self._target_of(batch)
        return Loss(self._sums(self._guesses(batch), targets), len(targets))

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """The loss, and predictions and targets in their units."""
        targets, guesses = self._target_of(batch), self._guesses(batch)
        loss = (self._sums(guesses, targets), len(targets))
        return {"loss": loss, "prediction": self._in_units(guesses), "target": self._in_units(targets)}

    def _in_units(self, values: Tensor) -> Tensor:
        return values.detach().cpu().double() * self._std + self._mean  # some accelerators have no float64

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """R², RMSE and MAE over all rows."""
        found = regression_scores(rows["prediction"], rows["target"])
        return {name: value for name, value in found.items() if value == value}

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """Predictions in the units of the target."""
        guesses = self._in_units(self._guesses(batch))
        return {"prediction": guesses.squeeze(1) if guesses.shape[1] == 1 else guesses}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mean": self._mean.tolist(), "std": self._std.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        mean, std = (torch.tensor(state[name], dtype=torch.float64) for name in ("mean", "std"))
        if not (torch.equal(mean, self._mean) and torch.equal(std, self._std)):
            self._mean, self._std = mean, std
            for table, prepared in self._alive():
                for tensor in prepared().tensors[2:]:
                    tensor.copy_(self._encode_targets(table))


_REGRESSION_LOSSES = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.smooth_l1_loss}


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
        names = [self.target] if isinstance(self.target, str) else [n for n in _TARGETS if n in table.columns][:1]
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
        table, name = _rows_of(dataset), self._targets[0]
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


def _rows_of(dataset: Any) -> Table:
    """The rows of a table, or of a subset of one."""
    base, chosen = unwrap_subsets(dataset)
    if not isinstance(base, Table):
        do = "Pass a DataFrame, (X, y) arrays, a .csv or .parquet file, or a list of dicts."
        raise DataError(expected("a table", type(base).__name__, do))
    return base if chosen is None else base.take(chosen)


def _by_number(name: str) -> tuple[float, str]:
    """Sort classes that are numbers by value, others by name."""
    try:
        return float(name), name
    except ValueError:
        return float("inf"), name
