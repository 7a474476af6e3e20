"""OnlineKNN and CollapseMonitor in metric learning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightly.utils.benchmarking import knn_predict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainformer import Trainer
from trainformer.callbacks import CollapseMonitor, OnlineKNN
from trainformer.core import BadArgument, DataError
from trainformer.tasks import MetricLearning


def samples(n: int = 60, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    centres = torch.randn(classes, 1, 4, 4, generator=torch.Generator().manual_seed(9))
    labels = torch.arange(n) % classes
    return centres[labels] + torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed)), labels


def trainer_with(*callbacks: Any, loss: str = "arcface", **more: Any) -> Trainer:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh())
    task = MetricLearning(net, 8, loss, augment=None)
    options = {"log": "none", "device": "cpu", "save_every": None, "resume": None, "max_steps": 6, "batch_size": 10}
    data = {"data": samples(), "val_data": samples(40, seed=1)}
    return Trainer(task, callbacks=list(callbacks), **{**data, **options, **more})


class Evaluations:
    """Collects the metrics of every evaluation."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.metrics.append(dict(metrics))


# -- OnlineKNN ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [5, 20])
def test_online_knn_matches_lightly(k: int) -> None:
    noted = Evaluations()
    trainer = trainer_with(OnlineKNN(k=k, temperature=0.1), noted, epochs=1, max_steps=None).fit()
    bank, queries = trainer.embed("train"), trainer.embed("val")
    theirs = knn_predict(queries["embedding"], bank["embedding"].T, bank["label"], num_classes=5, knn_k=k, knn_t=0.1)
    want = (theirs[:, 0] == queries["label"]).float().mean().item()
    assert noted.metrics[-1]["val/online_knn"] == pytest.approx(want)
    assert 0.2 < want < 1


def test_it_can_be_monitored_and_does_not_affect_the_run() -> None:
    plain = trainer_with(eval_every="2steps").fit()
    watched = trainer_with(
        OnlineKNN(k=3), eval_every="2steps", monitor_metric="val/online_knn", monitor_mode="max"
    ).fit()
    assert "val/online_knn" in watched.best_metrics
    for a, b in zip(plain.task.parameters(), watched.task.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_second_evaluation() -> None:
    noted = Evaluations()
    trainer_with(OnlineKNN(k=3, every=2), noted, eval_every="1steps").fit()
    assert ["val/online_knn" in metrics for metrics in noted.metrics] == [False, True] * 3


def test_max_train_below_k() -> None:
    noted = Evaluations()
    trainer_with(OnlineKNN(k=50, max_train=10), noted).fit()  # fewer samples than neighbours
    assert 0 <= noted.metrics[-1]["val/online_knn"] <= 1


class Named(TensorDataset):
    """A dataset with class names."""

    def __init__(self, names: str, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.classes = list(names)


def test_validation_classes_that_are_not_in_the_training_data() -> None:
    data = {"data": Named("abcde", *samples()), "val_data": Named("vwxyz", *samples(40, seed=1))}
    noted = Evaluations()
    try:
        trainer_with(OnlineKNN(k=3), noted, **data).fit()
    except DataError:
        return
    assert "val/online_knn" not in noted.metrics[-1]


@pytest.mark.parametrize("options", [{"k": 0}, {"every": 0}, {"temperature": 0.0}])
def test_online_knn_rejects_invalid_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=f"OnlineKNN's {next(iter(options))}"):
        OnlineKNN(**options)


def test_without_validation_data_it_never_runs() -> None:
    trainer = trainer_with(OnlineKNN(), val_data=None).fit()
    assert trainer.state.step == 6
    with pytest.raises(DataError, match="no validation data to embed"):
        trainer.embed("val")


# -- CollapseMonitor ---------------------------------------------------------------------------------------


def same_image(n: int = 60) -> tuple[Tensor, Tensor]:
    return torch.ones(1, 1, 4, 4).repeat(n, 1, 1, 1), torch.arange(n) % 5


@pytest.mark.parametrize("loss", ["arcface", "triplet"])
def test_a_collapse_is_logged_and_stops_the_run(loss: str, caplog: pytest.LogCaptureFixture) -> None:
    monitor = CollapseMonitor(patience=3, stop=True)
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        trainer = trainer_with(monitor, loss=loss, data=same_image(), val_data=None, log_every=1, max_steps=9).fit()
    assert trainer.state.step == 3
    assert "the features have collapsed" in caplog.text


@pytest.mark.parametrize("loss", ["arcface", "triplet", "supcon"])
def test_different_embeddings_are_not_a_collapse(loss: str) -> None:
    loader = DataLoader(TensorDataset(*samples()), batch_size=10)
    trainer = trainer_with(
        CollapseMonitor(patience=1, stop=True), loss=loss, data=loader, sampler=None, log_every=1
    ).fit()
    assert trainer.state.step == 6


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": 1.0}, {"patience": 0}])
def test_collapse_monitor_rejects_invalid_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=f"CollapseMonitor's {next(iter(options))}"):
        CollapseMonitor(**options)
