"""Forecasting of time series from a context of past values.

Series and windows are in `data.series`, the networks in `models.forecasting`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_choice, check_count, expected
from trainformer.data.metadata import DatasetInfo
from trainformer.data.series import FutureWindows, SeriesSet, Windows, load_series, seasonal_errors
from trainformer.losses.numerics import upcast
from trainformer.models.backbones import UnbuiltModel, model_dtype
from trainformer.models.forecasting import FORECASTERS, build_forecaster
from trainformer.tasks.base import TaskBase
from trainformer.tasks.export_limits import WeightsOnly

_LOSSES = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.smooth_l1_loss}


@dataclass(eq=False)
class TimeSeriesForecasting(TaskBase):
    """Forecast the next `horizon` values of a series from the last `context_length`.

    `network` is `"dlinear"`, `"nbeats"`, or your own module, which is called with the contexts (N, L) and, if there
    are any, the covariates (N, L + H, C), and returns (N, H). `target`, `time` and `series` are the columns of a table
    with the values, the times and the names of the series. `covariates` are further columns of numbers, which are known
    in advance.

    `season` is the number of time steps after which values repeat, for the seasonal-naive baseline and for MASE.
    `scale` subtracts the mean of a context and divides by its standard deviation. `loss` is `"mse"`, `"mae"` or
    `"huber"`, of scaled values. Training windows begin every `stride` steps. `width`, `depth` and `dropout` are
    those of `"nbeats"`.

    >>> from trainformer import Trainer
    >>> task = TimeSeriesForecasting("dlinear", context_length=48, horizon=12, season=24)
    >>> trainer = Trainer(task, "seasonal", val_split=0.2, max_steps=2, log="none")
    >>> trainer.predict("seasonal")[0]["forecast"].shape
    torch.Size([12])
    """

    network: str | nn.Module = "dlinear"
    context_length: int = 96
    horizon: int = 24
    _: KW_ONLY
    season: int = 1
    target: str | None = None
    time: str | None = None
    series: str | None = None
    covariates: Sequence[str] = ()
    loss: Literal["mse", "mae", "huber"] = "mse"
    scale: bool = True
    stride: int = 1
    width: int = 128
    depth: int = 3
    dropout: float = 0.0

    series_names: list[str] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.network, nn.Module):
            check_choice("network", self.network, FORECASTERS)
        check_choice("loss", self.loss, _LOSSES)
        for name in ("context_length", "horizon", "season", "stride", "width", "depth"):
            check_count(name, getattr(self, name))
        if self.season > self.context_length:
            do = "The baseline repeats the last season of the context. Use a longer context."
            raise BadArgument(expected(f"season to be at most context_length={self.context_length}", self.season, do))
        if isinstance(self.covariates, str):
            raise BadArgument(expected("covariates to be a list of columns", self.covariates))
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise BadArgument(expected("dropout to be at least 0 and below 1", self.dropout))
        self._errors: dict[str, float] = {}
        self._windows = 0
        self._mean, self._std = torch.zeros(len(self.covariates)), torch.ones(len(self.covariates))
        self.model = self.network if isinstance(self.network, nn.Module) else UnbuiltModel()

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        return self.convert_data(path)

    def convert_data(self, data: Any) -> Any:
        """Series from a path, a table or arrays; loaders are returned as they are."""
        columns = {"target": self.target, "time": self.time, "series": self.series}
        return load_series(data, covariates=self.covariates, **columns)

    def inspect_dataset(self, dataset: Any) -> None:
        """Learn the seasonal errors and the scale of the covariates from the training values."""
        known = _series_of(dataset)
        self.series_names = list(known.names)
        self._set_errors(seasonal_errors(known, self.season))
        self._windows = len(self.prepare_dataset(known, train=True))
        if self.covariates and self.scale:
            values = np.concatenate(
                [one[: len(target)] for one, target in zip(known.covariates, known.values, strict=True)]
            )
            std = values.std(0)
            self._mean = torch.tensor(values.mean(0), dtype=torch.float32)
            self._std = torch.tensor(np.where(std > 0, std, 1.0), dtype=torch.float32)

    def _set_errors(self, errors: Mapping[str, float]) -> None:
        self._errors.clear()  # in place: windows that exist refer to it
        self._errors.update(errors)

    def configure(self, info: DatasetInfo) -> None:
        """Build the network. One that exists is kept."""
        info.num_samples = self._windows or info.num_samples  # windows, not series
        if isinstance(self.model, UnbuiltModel):
            assert isinstance(self.network, str)
            sizes = (self.context_length, self.horizon, len(self.covariates))
            self.model = build_forecaster(self.network, *sizes, self.width, self.depth, self.dropout)

    def prepare_dataset(self, dataset: Any, train: bool) -> Windows:
        """Windows of the series."""
        if isinstance(dataset, Windows):
            return dataset
        stride = self.stride if train else 1
        sizes = (self.context_length, self.horizon)
        return Windows(_series_of(dataset), *sizes, standardize=self.scale, stride=stride, errors=self._errors)

    def prediction_data(self, dataset: Any) -> Windows:
        """The last context of each series: a prediction is what follows it."""
        return FutureWindows(_series_of(dataset), self.context_length, self.horizon, standardize=self.scale)

    # -- steps ---------------------------------------------------------------------------------------------

    def _forecast(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forecasts (N, H) in the scale of the context."""
        context, kind = batch["context"], model_dtype(self.model)
        if self._mean.device != context.device:  # once: a copy in each step would synchronise
            self._mean, self._std = self._mean.to(context.device), self._std.to(context.device)
        known = ((batch["covariates"] - self._mean) / self._std).to(kind)
        plain = isinstance(self.network, nn.Module) and not known.shape[-1]
        output = self.model(context.to(kind)) if plain else self.model(context.to(kind), known)
        if output.shape != (len(context), self.horizon):
            what = f"forecasts of shape (batch, {self.horizon}) from the model"
            raise BadArgument(expected(what, tuple(output.shape)))
        return upcast(output)

    def _sum(self, forecast: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        if "target" not in batch:
            raise DataError("Expected windows with a target, received contexts alone.")
        return _LOSSES[self.loss](forecast, batch["target"].to(forecast.dtype), reduction="sum") / self.horizon

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The loss of scaled values: the mean over windows and time steps."""
        forecast = self._forecast(batch)
        return Loss(self._sum(forecast, batch), len(forecast))

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Errors of the forecast and of the seasonal-naive baseline, in the units of the series."""
        forecast = self._forecast(batch)
        found: dict[str, Any] = {"loss": (self._sum(forecast, batch), len(forecast))}
        steps = torch.arange(self.horizon, device=forecast.device) % self.season
        naive = batch["context"][:, -self.season :][:, steps]
        for prefix, guess in (("", forecast), ("naive_", naive)):
            found |= {f"{prefix}{name}": pair for name, pair in _error_sums(guess, batch).items()}
        return found

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """RMSE from the mean squared error. A MASE that has no denominator is NaN."""
        return {f"{prefix}rmse": math.sqrt(metrics[f"{prefix}mse"]) for prefix in ("", "naive_")}

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The forecast of each series, and which series it is."""
        return {"forecast": self._forecast(batch) * batch["std"] + batch["mean"], "series": batch["series"]}

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        if not isinstance(batch, Mapping) or not {"context", "target"} <= batch.keys():
            return ["Batches should be dicts with context and target."]
        flat = (batch["context"] == batch["context"][:, :1]).all(1).float().mean().item()
        return [] if flat < 0.5 else ["Most contexts of the batch are constant."]

    def config_dict(self) -> dict[str, Any]:
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        if isinstance(self.network, nn.Module):
            arguments["network"] = type(self.network).__qualname__
        return arguments

    def export_module(self, model: nn.Module) -> nn.Module:
        return WeightsOnly(model, "contexts and covariates")

    def learned(self) -> dict[str, Any]:
        """The seasonal errors and the scale of the covariates, recorded for predictions without the training data."""
        return self.state_dict()

    def use_learned(self, learned: Mapping[str, Any]) -> None:
        """Take over what `learned` returned."""
        self.load_state_dict(dict(learned))

    def state_dict(self) -> dict[str, Any]:
        return {
            "errors": {name: error for name, error in self._errors.items() if math.isfinite(error)},
            "series": list(self.series_names),
            "mean": self._mean.tolist(),
            "std": self._std.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set_errors(state["errors"])
        self.series_names = list(state["series"])
        self._mean, self._std = (torch.tensor(state[name], dtype=torch.float32) for name in ("mean", "std"))


def _error_sums(guess: Tensor, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Sums and weights of the error measures; windows of series without a seasonal error do not count for MASE."""
    wide = torch.float32 if guess.device.type == "mps" else torch.float64
    guess, target, mean, std = (part.to(wide) for part in (guess, batch["target"], batch["mean"], batch["std"]))
    known = batch["error"].isfinite()
    error, count = (guess - target).abs() * std, target.numel()
    size = (guess * std + mean).abs() + (target * std + mean).abs()
    relative = torch.where(size > 0, 2 * error / torch.where(size > 0, size, 1.0), 0.0)
    scaled = error.mean(1) / torch.where(known, batch["error"], 1.0) * known
    found: dict[str, tuple[Tensor, Tensor | int]] = {
        "mae": (error.sum(), count),
        "mse": (error.square().sum(), count),
        "smape": (relative.sum(), count),
        "mase": (scaled.sum(), known.sum()),
    }
    return found


def _series_of(dataset: Any) -> SeriesSet:
    if not isinstance(dataset, SeriesSet):
        do = "Pass an array (series, time), a list of arrays, or a table with a column of times."
        raise DataError(expected("time series", type(dataset).__name__, do))
    return dataset
