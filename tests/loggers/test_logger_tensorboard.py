"""TensorBoard: what its own reader finds in the event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainformer.loggers import TensorBoardLogger


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def test_scalars_texts_and_configuration(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "tb")
    logger.init({"lr": 0.5, "data": {"size": 32, "folder": Path("x")}, "flag": True, "none": None})
    logger.log({"train/loss": 0.25, "train/epoch": 1}, step=10)
    logger.log({"train/loss": 0.125}, step=20)
    logger.log_text("sample", "once upon a time", step=20)
    logger.finish()

    reader = events(tmp_path / "tb")
    assert scalars(tmp_path / "tb", "train/loss") == [(10, 0.25), (20, 0.125)]
    assert scalars(tmp_path / "tb", "train/epoch") == [(10, 1.0)]
    (text,) = reader.Tensors("sample/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (20, b"once upon a time")
    (config,) = reader.Tensors("config/text_summary")
    assert b'"size": 32' in config.tensor_proto.string_val[0]


def test_hyperparameters_are_in_the_same_run(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = TensorBoardLogger(tmp_path / "tb")
    logger.init({"lr": 0.5, "data": {"size": 32, "crops": [1, 2]}, "flag": True, "none": None, "name": "x"})
    logger.log({"val/loss": 0.25}, step=10)
    logger.finish()
    metadata = events(tmp_path / "tb").SummaryMetadata("_hparams_/session_start_info")
    values = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    assert set(values) == {"lr", "data.size", "data.crops", "flag", "name"}
    assert (values["lr"].number_value, values["flag"].bool_value, values["name"].string_value) == (0.5, True, "x")
    assert values["data.crops"].string_value == "[1, 2]"
    assert [path for path in (tmp_path / "tb").iterdir() if path.is_dir()] == []


def test_an_empty_configuration_writes_nothing_about_it(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "tb")
    logger.init({})
    logger.finish()
    assert events(tmp_path / "tb").Tags()["tensors"] == []


@pytest.mark.usefixtures("event_files_in_order")
def test_resuming_hides_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path / "tb")
    first.init({"lr": 0.5})
    for step in range(1, 6):
        first.log({"train/loss": float(step)}, step)
    first.flush()  # and then the process dies, without finish()

    second = TensorBoardLogger(tmp_path / "tb")
    second.continue_from(3)
    second.init({"lr": 0.5})
    for step in range(4, 8):
        second.log({"train/loss": 10.0 * step}, step)
    second.finish()
    assert scalars(tmp_path / "tb", "train/loss") == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60), (7, 70)]
    assert len(events(tmp_path / "tb").Tensors("config/text_summary")) == 1
    first.finish()


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_finish_twice_is_harmless(tmp_path: Path, status: str) -> None:
    logger = TensorBoardLogger(tmp_path / "tb")
    logger.init({})
    logger.log({"train/loss": 1.0}, step=1)
    logger.finish(status)
    logger.finish(status)
    assert scalars(tmp_path / "tb", "train/loss") == [(1, 1.0)]
