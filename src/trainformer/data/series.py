"""Time series: from arrays and tables to windows of a context and the values that follow it, split by time.

A window's target lies after its context. Validation targets lie after all training values, so nothing leaks.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import IndexedDataset
from trainformer.data.tabular.encoder import numbers_of
from trainformer.data.tabular.table import Table, column_named, load_table

logger = logging.getLogger("trainformer")

SAMPLE = "seasonal"
SAMPLE_SEASON = 24
_TARGETS = ("target", "value", "y")
_TIMES = ("time", "timestamp", "date", "datetime", "ds")
_SERIES = ("series", "series_id", "unique_id", "id")
_LARGEST_STEP = 1.5  # of the usual step, before the times count as irregular


class SeriesSet(IndexedDataset):
    """Several series on one time axis. Targets of windows begin at `first` of each series, at the earliest.

    `covariates` have one row per time step and may reach beyond the values; `starts` are the positions of the first
    values on the time axis.

    >>> data = SeriesSet(["a"], [np.arange(10.0)])
    >>> train, val = data.split_validation(0.3, seed=0)
    >>> len(train.values[0]), len(val.values[0]), val.first
    (7, 10, [7])
    """

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[np.ndarray],
        covariates: Sequence[np.ndarray] | None = None,
        starts: Sequence[int] | None = None,
        first: Sequence[int] | None = None,
    ) -> None:
        self.names, self.values = list(names), [np.asarray(one, np.float64) for one in values]
        empty = [np.zeros((len(one), 0)) for one in self.values]
        self.covariates = empty if covariates is None else [np.asarray(one, np.float64) for one in covariates]
        self.starts = [0] * len(self.values) if starts is None else list(starts)
        self.first = [0] * len(self.values) if first is None else list(first)
        for name, one in zip(self.names, self.values, strict=True):
            wrong = np.flatnonzero(~np.isfinite(one))
            if wrong.size:
                do = "Fill gaps, e.g. by interpolation, before you pass the series."
                raise DataError(expected(f"finite values in series {name!r}", f"{one[wrong[0]]} at {wrong[0]}", do))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"name": self.names[index], "values": self.values[index]}

    def split_validation(self, val_split: float | int, seed: int) -> tuple[SeriesSet, SeriesSet]:
        """Split by time: the last steps of the time axis, a share or a number of them, are validation targets.

        Contexts of validation windows reach back into the training values. The seed does not matter.
        """
        end = max(start + len(one) for start, one in zip(self.starts, self.values, strict=True))
        if isinstance(val_split, bool) or not isinstance(val_split, Real):
            raise BadArgument(expected("val_split to be a share such as 0.2 or a number of time steps", val_split))
        steps = int(val_split) if isinstance(val_split, Integral) else round(end * float(val_split))
        if not 0 < steps < end:
            raise BadArgument(expected(f"val_split to leave time steps for both of {end}", val_split))
        cuts = [min(len(one), max(0, end - steps - s)) for s, one in zip(self.starts, self.values, strict=True)]
        kept = [place for place, cut in enumerate(cuts) if cut > 0]
        train = SeriesSet(
            [self.names[place] for place in kept],
            [self.values[place][: cuts[place]] for place in kept],
            [self.covariates[place][: cuts[place]] for place in kept],
            [self.starts[place] for place in kept],
        )
        return train, SeriesSet(self.names, self.values, self.covariates, self.starts, cuts)


class Windows(Dataset):
    """Windows of a context (L) and the target (H) that follows, as dicts of float32 tensors.

    With `standardize`, context and target are shifted and divided by `mean` and `std` of the context, which are part of
    the sample. `error` is the seasonal error of the series in training (see `seasonal_errors`), NaN if it is not known.
    `covariates` are (L + H, C).
    """

    in_memory = True

    def __init__(
        self,
        series: SeriesSet,
        context: int,
        horizon: int,
        *,
        standardize: bool,
        stride: int = 1,
        errors: Mapping[str, float] | None = None,
    ) -> None:
        self.series, self.context, self.horizon, self.standardize = series, context, horizon, standardize
        self.errors = {} if errors is None else errors
        self.places = self._find_places(stride)

    def _find_places(self, stride: int) -> list[tuple[int, int]]:
        """Series and first target of each window."""
        context, horizon = self.context, self.horizon
        places = [
            (place, start)
            for place, values in enumerate(self.series.values)
            for start in range(max(context, self.series.first[place]), len(values) - horizon + 1, stride)
        ]
        if not places:
            longest = max(map(len, self.series.values), default=0)
            what = f"a series of at least {context + horizon} time steps (context_length + horizon)"
            do = "Pass longer series, a shorter context, or a larger val_split."
            raise DataError(expected(what, f"{longest} at most, or too few after the split", do))
        return places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place, start = self.places[index]
        values, covariates = self.series.values[place], self.series.covariates[place]
        context, target = values[start - self.context : start], values[start : start + self.horizon]
        mean, std = (context.mean(), context.std() or 1.0) if self.standardize else (0.0, 1.0)
        sample = {
            "context": (context - mean) / std,
            "covariates": covariates[start - self.context : start + self.horizon],
            "mean": [mean],
            "std": [std],
            "error": self.errors.get(self.series.names[place], float("nan")),
        }
        if len(target):
            sample["target"] = (target - mean) / std
        tensors: dict[str, Any] = {name: torch.tensor(part, dtype=torch.float32) for name, part in sample.items()}
        return {**tensors, "series": place}


class FutureWindows(Windows):
    """One window per series: its last context, to forecast what follows."""

    @property
    def ids(self) -> list[str]:
        """Names of the series."""
        return self.series.names

    def _find_places(self, stride: int) -> list[tuple[int, int]]:
        for name, values, known in zip(self.series.names, self.series.values, self.series.covariates, strict=True):
            if len(values) < self.context:
                what = f"at least {self.context} values (context_length) of series {name!r}"
                raise DataError(expected(what, len(values)))
            if known.shape[1] and len(known) < len(values) + self.horizon:
                what = f"covariates for the {self.horizon} steps after the end of series {name!r}"
                do = "Add rows with the covariates and without a target."
                raise DataError(expected(what, f"{len(known) - len(values)} of them", do))
        return [(place, len(values)) for place, values in enumerate(self.series.values)]


def seasonal_errors(series: SeriesSet, season: int) -> dict[str, float]:
    """The mean absolute difference of values one season apart, by series: what MASE divides by. 0 and unknown: NaN."""
    found = {}
    for name, values in zip(series.names, series.values, strict=True):
        errors = np.abs(values[season:] - values[:-season])
        mean = float(errors.mean()) if errors.size else 0.0
        found[name] = mean if mean > 0 else float("nan")
    return found


# -- where series come from ------------------------------------------------------------------------------------------


def load_series(
    data: Any,
    *,
    target: str | None = None,
    time: str | None = None,
    series: str | None = None,
    covariates: Sequence[str] = (),
) -> Any:
    """Series from an array (time) or (series, time), a list of arrays, or a table with a column of times.

    A table has one row per time step and series: a DataFrame, a `.csv` or `.parquet` file, a list of dicts. The sample
    is `"seasonal"`. Other data are returned as they are.

    >>> len(load_series("seasonal"))
    8
    """
    if isinstance(data, SeriesSet):
        return data
    if isinstance(data, str) and data == SAMPLE:
        return _sample()
    arrays = _as_arrays(data)
    if arrays is not None:
        if covariates:
            raise BadArgument(expected("a table with columns, for covariates", type(data).__name__))
        return SeriesSet([str(place) for place in range(len(arrays))], arrays)
    if isinstance(data, str | Path) and Path(data).suffix == "" and not Path(data).exists():
        raise DataError(expected("a file, or the sample 'seasonal'", str(data)))
    table = load_table(data)
    if not isinstance(table, Table):
        return data
    return _from_table(table, target, time, series, covariates)


def _as_arrays(data: Any) -> list[np.ndarray] | None:
    if isinstance(data, tuple) and len(data) == 1:
        data = data[0]
    if hasattr(data, "detach"):
        data = data.detach().cpu().numpy()
    if isinstance(data, np.ndarray):
        if data.ndim not in (1, 2) or data.dtype.kind not in "iuf":
            do = "Pass numbers of shape (time,) or (series, time)."
            raise DataError(expected("an array of series", f"{data.dtype} of shape {data.shape}", do))
        return [data] if data.ndim == 1 else list(data)
    if isinstance(data, list) and data and all(hasattr(one, "shape") and one.ndim == 1 for one in data):
        return [np.asarray(one) for one in data]
    return None


def _from_table(
    table: Table, target: str | None, time: str | None, series: str | None, covariates: Sequence[str]
) -> SeriesSet:
    names = {
        "target": _chosen(table, target, _TARGETS, "target"),
        "time": _chosen(table, time, _TIMES, "time"),
        "series": _chosen(table, series, _SERIES, "series", needed=False),
    }
    assert names["target"] is not None
    assert names["time"] is not None
    numbers = numbers_of(table, names["target"])
    known = [numbers_of(table, name) for name in covariates]
    extra = np.stack(known, 1) if known else np.zeros((len(table), 0))
    axis, places = np.unique(_times(table, names["time"]), return_inverse=True)
    _warn_if_irregular(axis)
    owners = np.full(len(table), "all", object) if names["series"] is None else _ids(table, names["series"])
    result: dict[str, list[Any]] = {"values": [], "covariates": [], "starts": []}
    ids = list(dict.fromkeys(owners.tolist()))
    for name in ids:
        rows = np.flatnonzero(owners == name)
        rows = rows[np.argsort(places[rows], kind="stable")]
        steps = np.diff(places[rows])
        if (steps != 1).any():
            place = rows[int(np.flatnonzero(steps != 1)[0]) + 1]
            problem = "a time that occurs twice" if (steps == 0).any() else "a gap"
            what = f"one row per time step for series {name!r} of {table.name}"
            do = "Aggregate or fill the rows (pandas: resample, interpolate)."
            raise DataError(expected(what, f"{problem} at {axis[places[place]]}", do))
        column = numbers[rows]
        end = len(column) - int(np.isnan(column[::-1]).argmin()) if np.isnan(column).any() else len(column)
        if np.isnan(column).all():
            raise DataError(expected(f"values of series {name!r}", "missing ones only"))
        if extra.shape[1] and np.isnan(extra[rows]).any():
            raise DataError(expected(f"covariates in each row of series {name!r}", "a missing value"))
        result["values"].append(column[:end])
        result["covariates"].append(extra[rows])
        result["starts"].append(int(places[rows[0]]))
    return SeriesSet(ids, **result)


def _chosen(table: Table, given: str | None, usual: Sequence[str], role: str, needed: bool = True) -> str | None:
    if given is not None:
        if given not in table.columns:
            column_named(table, given, role)
        return given
    found = next((name for name in usual if name in table.columns), None)
    if found is None and needed:
        do = f"Pass its name: {role}=..."
        raise BadArgument(expected(f"a column called {' or '.join(usual)} in {table.name}", list(table.columns), do))
    return found


def _ids(table: Table, name: str) -> np.ndarray:
    values = table.columns[name]
    texts = [str(int(v)) if isinstance(v, float) and v.is_integer() else str(v) for v in values.tolist()]
    return np.array(texts, object)


def _times(table: Table, name: str) -> np.ndarray:
    """Times that can be sorted: numbers, dates, or text in the ISO format."""
    values = table.columns[name]
    if values.dtype.kind in "fmM":
        return values
    if any(value is None for value in values):
        raise DataError(expected(f"a time in each row of column {name!r} of {table.name}", "a missing one"))
    try:
        return np.array([_moment(value) for value in values])
    except (ValueError, TypeError) as error:
        do = "Write them as 2024-01-31 or 2024-01-31T12:00, or pass numbers."
        raise DataError(expected(f"times in column {name!r} of {table.name}", str(error), do)) from error


def _moment(value: Any) -> np.datetime64:
    """A date or time, in UTC if it has a time zone."""
    moment = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    if getattr(moment, "tzinfo", None) is not None:
        moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
    return np.datetime64(moment.isoformat() if isinstance(moment, datetime.date) else moment, "us")


def _warn_if_irregular(axis: np.ndarray) -> None:
    steps = np.diff(axis).astype(np.float64)
    if steps.size and steps.max() > _LARGEST_STEP * np.median(steps):
        place = int(steps.argmax())
        logger.warning("times are irregular: the longest step is from %s to %s", axis[place], axis[place + 1])


def _sample() -> SeriesSet:
    """Eight series of 720 hours: a daily and a weekly season, a trend and noise."""
    hours = np.arange(720.0)
    names, values = [], []
    for number in range(8):
        rng = np.random.Generator(np.random.PCG64([0x5EA5, number]))
        level, daily, weekly, slope = rng.uniform(20, 100), rng.uniform(5, 15), rng.uniform(2, 8), rng.normal(0, 0.01)
        phase = rng.uniform(0, 2 * np.pi, 2)
        season = daily * np.sin(2 * np.pi * hours / SAMPLE_SEASON + phase[0])
        season += weekly * np.sin(2 * np.pi * hours / (7 * SAMPLE_SEASON) + phase[1])
        names.append(f"series-{number}")
        values.append(level + slope * hours + season + rng.normal(0, 1.5, len(hours)))
    return SeriesSet(names, values)
