"""Keeps the logging services on this machine, silent, and inside the test's own folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def local_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No network, no login, no telemetry; home, temporary and working folder are under tmp_path."""
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    values = {
        "HOME": home,
        "TMPDIR": scratch,
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DIR": tmp_path,
        "WANDB_CONFIG_DIR": home / "wandb-config",
        "WANDB_CACHE_DIR": home / "wandb-cache",
        "WANDB_DATA_DIR": home / "wandb-data",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "DO_NOT_TRACK": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    yield
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        wandb.teardown()  # it reads the environment once per process, and each test has another one


@pytest.fixture
def wandb_records() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads every record of every offline run below a folder, in time order, with wandb's own reader."""

    def read(folder: Path) -> list[dict[str, Any]]:
        records = []
        for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
            command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
            records += [json.loads(line) for line in output.splitlines()]
        return records

    return read
