"""Predicting numbers from the columns of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_choice, expected
from trainformer.data.metadata import DatasetInfo
from trainformer.data.tabular.encoder import numbers_of
from trainformer.data.tabular.table import Table
from trainformer.eval.tabular import regression_scores
from trainformer.tasks.tabular.base import TabularTask, rows_of


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
        values = self._values(rows_of(dataset))
        self._mean, self._std = torch.zeros(values.shape[1]).double(), torch.ones(values.shape[1]).double()
        if self.scale:
            std = values.std(0)
            self._mean = torch.from_numpy(values.mean(0))
            self._std = torch.from_numpy(np.where(std > 0, std, 1.0))

    def _outputs(self, info: DatasetInfo) -> int:
        return len(self._targets)

    def _values(self, table: Table) -> np.ndarray:
        """The targets (rows, targets) in their units."""
        words = [name for name in self._targets if name in table.columns and not table.is_numeric(name)]
        if words:
            do = "Use TabularClassification to predict a class."
            raise DataError(expected(f"numbers in the target {words[0]!r} of {table.name}", "text", do))
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
