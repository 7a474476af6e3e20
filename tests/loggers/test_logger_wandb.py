"""Weights & Biases, offline: what wandb's own reader finds in the run's file."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainformer.core import BadArgument
from trainformer.loggers import LoggerError, MultiLogger, WandbLogger

pytestmark = pytest.mark.slow
Reader = Callable[[Path], list[dict[str, Any]]]


def rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of numbers among the records, without wandb's own columns except the step."""
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{key: item[key] for key in item if key == "_step" or not key.startswith("_")} for item in items]


def test_metrics_texts_and_configuration(tmp_path: Path, wandb_records: Reader) -> None:
    logger = WandbLogger(project="birds", name="first", tags=["a", "b"], dir=tmp_path)
    logger.init({"lr": 0.5, "data": {"folder": Path("x"), "best": float("inf")}})
    logger.log({"train/loss": 0.25}, step=10)
    logger.log({"val/loss": 0.5}, step=10)
    logger.log({"train/loss": float("nan")}, step=20)
    logger.log_text("sample", "once upon a time", step=20)
    state = logger.state_dict()
    logger.finish()

    records = wandb_records(tmp_path)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["project"], run["display_name"], run["tags"]) == ("birds", "first", ["a", "b"])
    assert state == {"run_id": run["run_id"]}
    config = run["config"]["update"]
    assert (config["lr"], config["data"]) == (0.5, {"folder": "x", "best": "Infinity"})
    assert rows(records) == [
        {"_step": 10, "train/loss": 0.25, "val/loss": 0.5},
        {"_step": 20, "train/loss": "NaN", "text/sample": "once upon a time"},
    ]


def test_no_secret_of_the_command_line_or_the_configuration_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "--var", "token=hunter2", "--db", "redis://:swordfish@host"])
    before = sys.argv
    logger = MultiLogger([WandbLogger(dir=tmp_path)])
    logger.init({"task": {"api_key": "open-sesame"}, "lr": 0.5})
    logger.log_text("sample", "from hf_" + "aB3" * 11, step=1)
    logger.finish()
    assert sys.argv is before
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"***masked***" in files
    assert [s for s in (b"hunter2", b"swordfish", b"open-sesame", b"aB3aB3") if s in files] == []


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 0), ("interrupted", 255), ("failed", 1)])
def test_status_becomes_an_exit_code(tmp_path: Path, wandb_records: Reader, status: str, code: int) -> None:
    logger = WandbLogger(dir=tmp_path)
    logger.init({})
    logger.finish(status)
    logger.finish(status)
    exits = [record["exit"].get("exit_code", 0) for record in wandb_records(tmp_path) if record["type"] == "exit"]
    assert exits == [code]


def test_resuming_goes_on_in_the_same_run_and_repeats_no_step(tmp_path: Path, wandb_records: Reader) -> None:
    first = WandbLogger(dir=tmp_path)
    first.init({})
    for step in range(1, 4):
        first.log({"train/loss": float(step)}, step)
    state = first.state_dict()  # the checkpoint at step 3
    for step in range(4, 6):
        first.log({"train/loss": float(step)}, step)
    first.finish("failed")

    second = WandbLogger(dir=tmp_path)
    second.load_state_dict(state)
    second.continue_from(3)
    assert second.state_dict() == state
    second.init({})
    assert second.state_dict() == state
    for step in range(4, 8):
        second.log({"train/loss": float(step)}, step)
    second.finish()
    records = wandb_records(tmp_path)
    assert [record["run"]["run_id"] for record in records if record["type"] == "run"] == [state["run_id"]] * 2
    assert sorted(row["_step"] for row in rows(records)) == [1, 2, 3, 4, 5, 6, 7]


def test_resuming_after_a_kill_repeats_and_loses_no_step(tmp_path: Path, wandb_records: Reader) -> None:
    code = f"""
import json, os, signal, time
from trainformer.loggers import WandbLogger
logger = WandbLogger(dir={str(tmp_path)!r})
logger.init({{}})
print(json.dumps(logger.state_dict()["run_id"]), flush=True)
for step in range(1, 6):
    logger.log({{"train/loss": float(step)}}, step)
    logger.log({{"val/loss": float(step)}}, step)
time.sleep(3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run_id = killed.stdout.strip().strip('"')
    logger = WandbLogger(dir=tmp_path)
    logger.load_state_dict({"run_id": run_id})
    logger.continue_from(3)
    logger.init({})
    for step in range(4, 8):
        logger.log({"train/loss": float(step)}, step)
        logger.log({"val/loss": float(step)}, step)
    logger.finish()
    wanted = [{"_step": step, "train/loss": step, "val/loss": step} for step in range(1, 8)]
    assert rows(wandb_records(tmp_path)) == wanted


def test_a_second_run_of_the_same_logger_is_another_run(tmp_path: Path) -> None:
    logger = WandbLogger(dir=tmp_path)
    ids = []
    for _ in range(2):
        logger.init({})
        logger.log({"train/loss": 1.0}, step=1)
        ids.append(logger.state_dict()["run_id"])
        logger.finish()
    assert ids[0] != ids[1]


def test_a_run_of_the_user_is_used_and_left_open(tmp_path: Path, wandb_records: Reader) -> None:
    import wandb

    run = wandb.init(dir=str(tmp_path), config={"mine": 1})
    logger = WandbLogger(dir=tmp_path / "unused")
    logger.init({"lr": 0.5})
    logger.log({"train/loss": 0.25}, step=1)
    logger.finish()
    assert wandb.run is run
    assert (run.config["mine"], run.config["lr"]) == (1, 0.5)
    run.log({"after": 1}, step=2)
    run.finish()
    assert rows(wandb_records(tmp_path)) == [{"_step": 1, "train/loss": 0.25}, {"_step": 2, "after": 1}]
    assert not (tmp_path / "unused").exists()


def test_disabled_writes_nothing(tmp_path: Path) -> None:
    logger = WandbLogger(dir=tmp_path, mode="disabled")
    logger.init({})
    logger.log({"train/loss": 0.25}, step=1)
    logger.finish()
    assert not list(tmp_path.glob("wandb/**/*.wandb"))


def test_unknown_mode() -> None:
    with pytest.raises(BadArgument, match=r"Expected mode to be one of online, offline, .* received 'ofline'"):
        WandbLogger(mode="ofline")


@pytest.mark.parametrize("mode", [None, "online"])
def test_without_a_key_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    logger = WandbLogger(dir=tmp_path, mode=mode)
    with pytest.raises(LoggerError, match=r"`wandb login`.*WANDB_MODE=offline or WandbLogger\(mode='offline'\)"):
        logger.init({})
    assert not (tmp_path / "wandb").exists()


def test_a_key_is_found_where_wandb_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from trainformer.loggers.wandb import _has_credentials

    monkeypatch.delenv("WANDB_MODE")
    settings = wandb.setup().settings
    assert not _has_credentials(settings)
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine example.com\n  login user\n  password other\n")
    netrc.chmod(0o600)
    assert not _has_credentials(settings)
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {'0' * 40}\n")
    assert _has_credentials(settings)
    netrc.write_text("not a netrc file {")
    assert not _has_credentials(settings)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert _has_credentials(settings)


def test_on_a_terminal_nobody_is_asked_for_a_login(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("WANDB_MODE", "WANDB_SILENT")}
    terminal, other_end = pty.openpty()
    code = "from trainformer.loggers import WandbLogger; WandbLogger().init({})"
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            stdin=other_end,
            stderr=other_end,
            env=environment,
            check=False,
            timeout=60,  # a prompt would wait for ever
        )
        shown = os.read(terminal, 100_000).decode()
    finally:
        os.close(terminal)
        os.close(other_end)
    assert result.returncode == 1
    assert "LoggerError" in shown


def test_a_failure_while_logging_does_not_end_training(tmp_path: Path) -> None:
    import wandb

    logger = MultiLogger([WandbLogger(dir=tmp_path)])
    logger.init({})
    logger.log({"train/loss": 1.0}, step=1)
    assert wandb.run is not None
    wandb.run.finish()  # somebody else closes the run
    with pytest.warns(RuntimeWarning, match=r"WandbLogger\.log failed"):
        logger.log({"train/loss": 1.0}, step=2)
    with warnings.catch_warnings(action="error"):
        logger.log({"train/loss": 1.0}, step=3)
    assert logger.failures == {"WandbLogger": 2}
