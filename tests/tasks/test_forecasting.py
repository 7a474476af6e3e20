"""Forecasting: windows, splits by time, tables, and metrics against formulas written out."""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pytest
import torch
from promise_toys import settings
from torch import nn

from trainformer import Trainer
from trainformer.core import BadArgument, DataError
from trainformer.data.series import SeriesSet, Windows, load_series
from trainformer.run import run_of
from trainformer.tasks import TimeSeriesForecasting


def waves(series: int = 3, steps: int = 80) -> np.ndarray:
    rng = np.random.default_rng(0)
    time = np.arange(steps)
    return np.stack([10 * (1 + n) + 3 * np.sin(time / 2 + n) + rng.normal(0, 0.3, steps) for n in range(series)])


def test_metrics_by_hand():
    data, context, horizon, season, cut = waves(), 14, 5, 7, 60
    task = TimeSeriesForecasting("nbeats", context, horizon, season=season, width=16)
    trainer = Trainer(task, data, val_split=20, **settings(eval_batch_size=11, lr=1e-3)).fit()
    found = trainer.evaluate()
    errors, squares, relative, scaled, naive = [], [], [], [], []
    for values in data:
        denominator = np.abs(values[season:cut] - values[: cut - season]).mean()
        for start in range(cut, len(values) - horizon + 1):
            past, future = values[start - context : start], values[start : start + horizon]
            inputs = torch.tensor((past - past.mean()) / past.std(), dtype=torch.float32)[None]
            with torch.no_grad():
                forecast = task.model.eval()(inputs, torch.zeros(1, context + horizon, 0))[0].double().numpy()
            forecast = forecast * past.std() + past.mean()
            errors.append(np.abs(forecast - future).mean())
            squares.append(((forecast - future) ** 2).mean())
            relative.append((2 * np.abs(forecast - future) / (np.abs(forecast) + np.abs(future))).mean())
            scaled.append(np.abs(forecast - future).mean() / denominator)
            naive.append(np.abs(past[-season:][:horizon] - future).mean())
    assert found["val/mae"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert found["val/rmse"] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-4)
    assert found["val/smape"] == pytest.approx(np.mean(relative), rel=1e-4)
    assert found["val/mase"] == pytest.approx(np.mean(scaled), rel=1e-4)
    assert found["val/naive_mae"] == pytest.approx(np.mean(naive), rel=1e-4)


def test_the_baseline_repeats_the_last_season():
    """A horizon of more than a season, and a series that is purely seasonal: no error."""
    data = np.tile(np.array([3.0, 1.0, 4.0, 1.0, 5.0]), 12)
    trainer = Trainer(TimeSeriesForecasting("dlinear", 10, 8, season=5), data, val_split=20, **settings())
    found = trainer.evaluate()
    assert found["val/naive_mae"] == pytest.approx(0, abs=1e-5)
    assert found["val/mae"] > 0.1
    assert "val/mase" not in found or np.isnan(found["val/mase"])  # its denominator is 0


def test_validation_targets_lie_after_all_training_values():
    data = SeriesSet(["long", "late"], [np.arange(50.0), np.arange(100.0, 130.0)], starts=[0, 20])
    train, val = data.split_validation(0.2, seed=3)
    assert [len(values) for values in train.values] == [40, 20]
    targets = [sample["target"] for sample in map(Windows(val, 8, 4, standardize=False).__getitem__, range(14))]
    assert min(target.min().item() for target in targets[:7]) == 40
    assert min(target.min().item() for target in targets[7:]) == 120
    seen = Windows(train, 8, 4, standardize=False)
    assert max(seen[index]["target"].max().item() for index in range(len(seen))) < 120
    trainer = Trainer(TimeSeriesForecasting("dlinear", 8, 4), data, val_split=0.2, **settings())
    assert run_of(trainer).info.num_samples == len(seen)


def frame(series: int = 2, steps: int = 60) -> pd.DataFrame:
    times = pd.date_range("2024-01-01", periods=steps, freq="h")
    parts = [
        pd.DataFrame({"time": times, "series": f"s{n}", "value": values, "hour": times.hour})
        for n, values in enumerate(waves(series, steps))
    ]
    return pd.concat(parts).sample(frac=1, random_state=0)  # in any order


def test_all_forms_of_series_are_the_same(tmp_path):
    data = frame()
    data.to_csv(tmp_path / "series.csv", index=False)
    data.to_parquet(tmp_path / "series.parquet")
    wanted = waves(2, 60)
    for form in (
        wanted,
        list(wanted),
        torch.from_numpy(wanted),
        data,
        str(tmp_path / "series.csv"),
        str(tmp_path / "series.parquet"),
    ):
        found = load_series(form)
        order = np.argsort(found.names)
        assert np.allclose(np.stack(found.values)[order], wanted)
    assert len(load_series(wanted[0])) == 1


def test_predictions_follow_the_end_of_each_series():
    data = waves()
    trainer = Trainer(TimeSeriesForecasting("dlinear", 12, 6, season=6), data, **settings()).fit()
    rows = trainer.predict(data[:, :40])
    assert [row["series"].item() for row in rows] == [0, 1, 2]
    past = data[1, 28:40]
    inputs = torch.tensor((past - past.mean()) / past.std(), dtype=torch.float32)[None]
    with torch.no_grad():
        by_hand = trainer.task.model.eval()(inputs, torch.zeros(1, 18, 0))[0] * past.std() + past.mean()
    assert torch.allclose(rows[1]["forecast"].double(), by_hand.double(), rtol=1e-5)


def test_covariates_are_known_in_advance():
    """The value is that of the covariate one step later: only a network that sees it can know."""
    rng = np.random.default_rng(0)
    steps = 300
    known = rng.normal(size=steps)
    data = pd.DataFrame({"ds": np.arange(steps), "y": 5 + known, "promo": known})
    options = settings(max_steps=150, lr=2e-2, batch_size=32, optimizer="adamw")
    ends = {}
    for covariates in ([], ["promo"]):
        task = TimeSeriesForecasting("dlinear", 8, 2, covariates=covariates)
        ends[len(covariates)] = Trainer(task, data, val_split=0.2, **options).fit()
    assert ends[1].evaluate()["val/mae"] < 0.5 * ends[0].evaluate()["val/mae"]
    with pytest.raises(DataError, match="covariates for the 2 steps after the end"):
        ends[1].predict(data)
    more = pd.DataFrame({"ds": [steps, steps + 1], "y": [np.nan, np.nan], "promo": [3.0, -3.0]})
    forecast = ends[1].predict(pd.concat([data, more]))[0]["forecast"]
    assert forecast[0] - forecast[1] > 2


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda d: d.rename(columns={"value": "sales"}), BadArgument, "Pass its name: target="),
        (lambda d: d.drop(columns="time"), BadArgument, "Pass its name: time="),
        (
            lambda d: d[~((d.series == "s1") & (d.time == d.time.min() + pd.Timedelta("5h")))],
            DataError,
            "'s1'.*a gap at",
        ),
        (lambda d: pd.concat([d, d.head(1)]), DataError, "a time that occurs twice"),
        (lambda d: d.assign(value=d.value.where(d.hour != 3)), DataError, "finite values in series"),
        (lambda d: d.assign(time="31/12/2024"), DataError, "Write them as 2024-01-31"),
        (lambda d: d[d.time < d.time.min() + pd.Timedelta("10h")], DataError, "at least 16 time steps"),
    ],
)
def test_plausible_mistakes_in_tables(change, error, match):
    with pytest.raises(error, match=match):
        Trainer(TimeSeriesForecasting("dlinear", 12, 4), change(frame()), **settings()).fit()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"network": "dliner"}, "Did you mean 'dlinear'"),
        ({"season": 30, "context_length": 24}, "season to be at most context_length=24"),
        ({"horizon": 0}, "horizon to be a positive integer"),
        ({"covariates": "hour"}, "covariates to be a list"),
        ({"loss": "mape"}, "loss to be one of"),
    ],
)
def test_plausible_mistakes(options, match):
    with pytest.raises(BadArgument, match=match):
        TimeSeriesForecasting(**options)


def test_irregular_times_are_warned_of(caplog):
    data = frame(1)
    with caplog.at_level(logging.WARNING):
        load_series(data[data.time != data.time.min() + pd.Timedelta("7h")])
    assert "times are irregular: the longest step is from 2024-01-01T06" in caplog.text


def test_a_module_of_the_wrong_shape():
    with pytest.raises(BadArgument, match=r"shape \(batch, 4\) from the model"):
        Trainer(TimeSeriesForecasting(nn.Linear(12, 5), 12, 4), waves(), **settings()).fit()


@pytest.mark.parametrize("name", ["dlinear", "nbeats"])
def test_quality_on_the_sample(name):
    """Half the error of the seasonal-naive baseline after 100 steps (MASE 0.5 against 1.0)."""
    task = TimeSeriesForecasting(name, context_length=168, horizon=24, season=24)
    trainer = Trainer(
        task, "seasonal", val_split=0.2, **settings(max_steps=100, batch_size=64, lr=2e-3, optimizer="adamw")
    ).fit()
    found = trainer.evaluate()
    assert found["val/mase"] < 0.7 * found["val/naive_mase"]
