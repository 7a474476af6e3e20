"""MultiLogger, and loggers by name: built-in ones and those of other packages."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plugin_packages import install  # noqa: F401 - a fixture
from trainformer.core import BadArgument
from trainformer.loggers import (
    BaseLogger,
    ConsoleLogger,
    JsonlLogger,
    MLflowLogger,
    MultiLogger,
    NoOpLogger,
    TensorBoardLogger,
    WandbLogger,
    make_loggers,
    read_jsonl,
)


class Recorder(BaseLogger):
    """Records every call; `fail` names the method that raises."""

    def __init__(self, fail: str = "", remote: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail = fail
        self.remote = remote  # type: ignore[misc]

    def _record(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fail:
            raise ConnectionError("no route to host")

    def init(self, config: dict[str, Any]) -> None:
        self._record("init", config)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._record("log", metrics, step)

    def log_text(self, key: str, text: str, step: int) -> None:
        self._record("log_text", key, text, step)

    def flush(self) -> None:
        self._record("flush")

    def continue_from(self, step: int) -> None:
        self._record("continue_from", step)

    def finish(self, status: str = "finished") -> None:
        self._record("finish", status)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._record("load_state_dict", state)


def test_every_call_reaches_every_logger() -> None:
    parts = [Recorder(), Recorder()]
    logger = MultiLogger(parts)
    logger.load_state_dict({"Recorder": {"calls": 1}, "Recorder#2": {"calls": 2}, "Gone": {}})
    logger.continue_from(7)
    logger.init({"lr": 0.1})
    logger.log({"train/loss": 1.0}, step=8)
    logger.log_text("sample", "text", step=8)
    logger.flush()
    state = logger.state_dict()
    logger.finish("stopped")
    logger.flush()  # allowed at any time
    for number, part in enumerate(parts, start=1):
        assert part.calls == [
            ("load_state_dict", {"calls": number}),
            ("continue_from", 7),
            ("init", {"lr": 0.1}),
            ("log", {"train/loss": 1.0}, 8),
            ("log_text", "sample", "text", 8),
            ("flush",),
            ("finish", "stopped"),
        ]
    assert state == {"Recorder": {"calls": 6}, "Recorder#2": {"calls": 6}}


def test_a_logger_added_after_the_checkpoint_starts_a_new_run() -> None:
    part = Recorder()
    MultiLogger([NoOpLogger(), part]).load_state_dict({})
    assert part.calls == []


@pytest.mark.parametrize("call", ["log", "log_text", "flush", "finish"])
def test_a_remote_failure_warns_once_and_is_counted(call: str) -> None:
    broken, fine = Recorder(fail=call, remote=True), Recorder()
    logger = MultiLogger([broken, fine])
    logger.init({})

    def train() -> None:
        for step in (1, 2):
            logger.log({"train/loss": 1.0}, step)
            logger.log_text("sample", "text", step)
            logger.flush()
        logger.finish()

    with pytest.warns(RuntimeWarning) as caught:
        train()
    first = f"Recorder.{call} failed: ConnectionError: no route to host"
    assert first in str(caught[0].message)
    if call == "finish":
        assert logger.failures == {"Recorder": 1}
        assert len(caught) == 1
    else:
        assert logger.failures == {"Recorder": 2}
        assert [str(warning.message) for warning in caught][1:] == ["Recorder: 2 calls failed during the run."]
    assert [name for name, *_ in fine.calls] == ["init", *(["log", "log_text", "flush"] * 2), "finish"]


def test_a_local_failure_is_raised() -> None:
    logger = MultiLogger([Recorder(fail="log")])
    logger.init({})
    with pytest.raises(ConnectionError, match="no route"):
        logger.log({"train/loss": 1.0}, step=1)
    assert logger.failures == {}


def test_an_error_in_init_is_raised_and_closes_open_loggers() -> None:
    first, broken, last = Recorder(), Recorder(fail="init", remote=True), Recorder()
    logger = MultiLogger([first, broken, last])
    with pytest.raises(ConnectionError, match="no route"):
        logger.init({})
    assert first.calls == [("init", {}), ("finish", "failed")]
    assert ("init", {}) not in last.calls


def test_every_logger_is_finished_even_if_one_fails() -> None:
    parts = [Recorder(fail="finish"), Recorder()]
    logger = MultiLogger(parts)
    logger.init({})
    with pytest.raises(ConnectionError, match="no route"):
        logger.finish("failed")
    assert parts[1].calls[-1] == ("finish", "failed")


def test_failures_start_at_zero_in_the_next_run() -> None:
    broken = Recorder(fail="log", remote=True)
    logger = MultiLogger([broken])
    for _ in range(2):
        logger.init({})
        with pytest.warns(RuntimeWarning, match="Recorder.log failed"):
            logger.log({"train/loss": 1.0}, step=1)
        assert logger.failures == {"Recorder": 1}
        logger.finish()


def test_only_loggers_are_accepted() -> None:
    with pytest.raises(BadArgument, match="Expected loggers to be BaseLogger instances, received 'wandb'"):
        MultiLogger(["wandb"])  # type: ignore[list-item]


def kinds(logger: BaseLogger) -> list[str]:
    assert isinstance(logger, MultiLogger)
    return [type(part).__name__ for part in logger.loggers]


def make(spec: Any, run_dir: Path, **options: Any) -> MultiLogger:
    logger = make_loggers(spec, project="birds", name="first", run_dir=run_dir, **options)
    assert isinstance(logger, MultiLogger)
    return logger


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (None, []),
        ("none", []),
        ([], []),
        ("console", ["ConsoleLogger"]),
        ("wandb", ["WandbLogger"]),
        (("tensorboard", "mlflow"), ["TensorBoardLogger", "MLflowLogger"]),
        (["console", "none"], ["ConsoleLogger"]),
        (NoOpLogger(), ["NoOpLogger"]),
        ([WandbLogger(mode="offline"), "console"], ["WandbLogger", "ConsoleLogger"]),
    ],
)
def test_names_and_instances(spec: Any, wanted: list[str], tmp_path: Path) -> None:
    assert kinds(make(spec, tmp_path / "run")) == ["JsonlLogger", *wanted]
    assert not (tmp_path / "run").exists()  # nothing is opened before init


def test_each_logger_gets_its_path_in_the_run_folder(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    parts = make(["console", "wandb", "tensorboard", "mlflow"], tmp_path, console=console).loggers
    jsonl, terminal, wandb, tensorboard, mlflow = parts
    assert isinstance(jsonl, JsonlLogger)
    assert jsonl.path == tmp_path / "metrics.jsonl"
    assert isinstance(terminal, ConsoleLogger)
    assert terminal.console is console
    assert isinstance(wandb, WandbLogger)
    assert (wandb.project, wandb.name, wandb.dir) == ("birds", "first", tmp_path)
    assert isinstance(tensorboard, TensorBoardLogger)
    assert tensorboard.log_dir == tmp_path / "tensorboard"
    assert isinstance(mlflow, MLflowLogger)
    assert (mlflow.experiment_name, mlflow.run_name) == ("birds", "first")


def test_the_file_is_not_written_twice(tmp_path: Path) -> None:
    own = JsonlLogger(tmp_path / "x" / ".." / "metrics.jsonl")
    assert make(own, tmp_path).loggers == [own]
    elsewhere = JsonlLogger(tmp_path / "other.jsonl")
    assert kinds(make(elsewhere, tmp_path)) == ["JsonlLogger", "JsonlLogger"]


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("wandbb", "Did you mean 'wandb'"),
        (["console", "tensorbord"], "Did you mean 'tensorboard'"),
        ("xyz", "Pass a name"),
    ],
)
def test_unknown_names_get_a_suggestion(spec: Any, hint: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=f"one of console, wandb, tensorboard, mlflow, none, .*{hint}"):
        make(spec, tmp_path)


PLUGIN = """
from trainformer.loggers import BaseLogger

class FileLogger(BaseLogger):
    def __init__(self, run_dir, name=None):
        self.run_dir, self.name = run_dir, name

    def init(self, config): ...
    def log(self, metrics, step):
        (self.run_dir / "plugin.txt").write_text(f"{step}: {metrics}")
    def finish(self, status="finished"): ...

def everything(**about_run):
    logger = FileLogger(about_run["run_dir"])
    logger.about_run = about_run
    return logger

def nothing():
    return None
"""


def test_a_logger_of_another_package(install: Any, tmp_path: Path) -> None:  # noqa: F811
    install("logger_plugin", PLUGIN, "loggers", file="FileLogger", everything="everything", nothing="nothing")
    logger = make(["file", "console", "everything"], tmp_path)
    assert kinds(logger) == ["JsonlLogger", "FileLogger", "ConsoleLogger", "FileLogger"]
    assert logger.loggers[1].name == "first"  # type: ignore[attr-defined]
    about_run = {"project": "birds", "name": "first", "run_dir": tmp_path}
    assert logger.loggers[3].about_run == about_run  # type: ignore[attr-defined]
    logger.init({})
    logger.log({"train/loss": 0.5}, step=3)
    logger.finish()
    assert (tmp_path / "plugin.txt").read_text() == "3: {'train/loss': 0.5}"
    with pytest.raises(BadArgument, match="the plugin 'nothing' to make a BaseLogger, received None"):
        make("nothing", tmp_path)
    names = "console, wandb, tensorboard, mlflow, everything, file, nothing, none"
    with pytest.raises(BadArgument, match=f"one of {names}, .*Did you mean 'file'"):
        make("fil", tmp_path)


def test_values_that_are_no_loggers_are_refused(tmp_path: Path) -> None:
    for wrong in (3, {"name": "wandb"}, [NoOpLogger]):
        with pytest.raises(BadArgument, match=r"received .* Pass a name, a BaseLogger, or a list of them"):
            make(wrong, tmp_path)


def test_a_run_and_its_resume(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False)
    first = make(["console", "tensorboard"], tmp_path, console=console)
    first.init({"lr": 0.1})
    for step in (1, 2, 3):
        first.log({"train/loss": 1 / step}, step)
    state = first.state_dict()
    first.finish("interrupted")

    second = make(["console", "tensorboard"], tmp_path, console=console)
    second.load_state_dict(state)
    second.continue_from(2)
    second.init({"lr": 0.1})
    for step in (3, 4):
        second.log({"train/loss": 1 / step}, step)
    second.finish()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert stream.getvalue().count("step     3") == 2  # printed lines cannot be undone
