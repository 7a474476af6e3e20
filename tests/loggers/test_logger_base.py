"""The interface, the public names, and what all loggers share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import trainformer.loggers as public
from trainformer.context.jsonable import jsonable
from trainformer.core import BadArgument, MissingDependency
from trainformer.loggers import (
    BaseLogger,
    ConsoleLogger,
    JsonlLogger,
    LoggerError,
    MLflowLogger,
    MultiLogger,
    NoOpLogger,
    TensorBoardLogger,
    WandbLogger,
)
from trainformer.loggers.base import as_numbers, flatten


def test_public_names() -> None:
    assert public.__all__ == [
        "BaseLogger",
        "ConsoleLogger",
        "JsonlLogger",
        "LoggerError",
        "MLflowLogger",
        "MultiLogger",
        "NoOpLogger",
        "TensorBoardLogger",
        "WandbLogger",
        "make_loggers",
        "read_jsonl",
    ]
    assert all(getattr(public, name) is not None for name in public.__all__)


def test_importing_loggers_imports_no_service() -> None:
    code = (
        "import sys, trainformer.loggers as l; l.make_loggers, l.MultiLogger; "
        "print([m for m in ('torch', 'wandb', 'mlflow', 'tensorboard') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_interface_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseLogger()  # type: ignore[abstract]


def test_three_methods_are_enough() -> None:
    class Minimal(BaseLogger):
        def init(self, config: dict[str, Any]) -> None: ...
        def log(self, metrics: dict[str, float], step: int) -> None: ...
        def finish(self, status: str = "finished") -> None: ...

    logger = Minimal()
    logger.load_state_dict({})
    logger.continue_from(3)
    logger.init({})
    logger.log_text("sample", "hello", 4)
    logger.flush()
    assert logger.state_dict() == {}
    assert not logger.remote


@pytest.mark.parametrize(
    "logger",
    [
        ConsoleLogger(Console()),
        JsonlLogger("metrics.jsonl"),
        WandbLogger(),
        TensorBoardLogger(),
        MLflowLogger(),
        MultiLogger([NoOpLogger()]),
    ],
    ids=lambda logger: type(logger).__name__,
)
def test_log_before_init_is_a_clear_error(logger: BaseLogger) -> None:
    name = type(logger).__name__
    with pytest.raises(LoggerError, match=rf"Expected {name}\.init\(config\) before anything is logged"):
        logger.log({"train/loss": 1.0}, step=1)
    with pytest.raises(LoggerError, match=rf"{name}\.init"):
        logger.log_text("sample", "text", step=1)
    logger.flush()
    logger.finish()  # without init: nothing to do, and no error
    assert logger.state_dict() == {}


def test_noop_logger_accepts_every_call() -> None:
    logger = NoOpLogger()
    logger.log({"train/loss": 1.0}, step=1)
    logger.init({"lr": 0.1})
    logger.log_text("sample", "text", step=1)
    logger.finish("failed")
    assert logger.state_dict() == {}


@pytest.mark.parametrize(
    ("logger", "package"),
    [(WandbLogger(), "wandb"), (TensorBoardLogger(), "tensorboard"), (MLflowLogger(), "mlflow")],
    ids=["wandb", "tensorboard", "mlflow"],
)
def test_missing_package_names_the_pip_command(
    logger: BaseLogger, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"pip install 'trainformer\[{package}\]'"):
        logger.init({})
    assert not list(tmp_path.glob("runs*"))


def test_as_numbers_takes_tensors_and_refuses_text() -> None:
    import numpy as np
    import torch

    metrics = {"a": torch.tensor(0.5, requires_grad=True), "b": np.int64(3), "c": np.array([2.0]), "d": 7}
    numbers = as_numbers(metrics)
    assert numbers == {"a": 0.5, "b": 3.0, "c": 2.0, "d": 7}
    assert isinstance(numbers["d"], int)
    for wrong in ("0.5", None, torch.zeros(2), [1.0]):
        with pytest.raises(BadArgument, match="Expected metric 'x' to be a number"):
            as_numbers({"x": wrong})


def test_jsonable_is_strict_json_for_anything() -> None:
    import numpy as np

    config = {
        "path": Path("a/b"),
        "set": {"b", "a"},
        "scalar": np.float32(0.5),
        "bad": float("-inf"),
        3: object,
        "nested": {"tuple": (1, float("nan"))},
    }
    plain = jsonable(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["set"] == ["a", "b"]
    assert plain["scalar"] == 0.5
    assert plain["bad"] == "-Infinity"
    assert plain["nested"] == {"tuple": [1, "NaN"]}
    assert "3" in plain


def test_flatten_joins_names_with_dots() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": None, "e": [{"f": 1}]}) == {"a.b.c": 1, "d": None, "e": '[{"f": 1}]'}
