"""The folder of a run: config, metrics, checkpoints, log."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger("trainformer")

_CONTENTS = ("config.json", "metrics.jsonl", "log.txt", "checkpoints", "tensorboard", "report.html")


class RunFolder:
    """Where everything of one run is. Made when the run begins, not before."""

    def __init__(self, path: Path, save_dir: str) -> None:
        self.path = path
        self.checkpoints = path / save_dir  # an absolute save_dir replaces the path

    @classmethod
    def choose(cls, run_dir: str | Path | None, name: str | None, task: str, save_dir: str) -> RunFolder:
        """The folder the user named, else ``runs/<name>``, else a new one named after the task and the time."""
        if run_dir is not None:
            return cls(Path(run_dir), save_dir)
        if name is not None:
            return cls(Path("runs") / re.sub(r"[^\w.=+-]+", "-", name), save_dir)
        stem = Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, number = stem, 2
        while path.exists():
            path, number = stem.with_name(f"{stem.name}-{number}"), number + 1
        return cls(path, save_dir)

    def open(self, anew: bool) -> None:
        """Make the folder. `anew`: what an earlier run left in it is moved to ``previous/``, not overwritten."""
        self.path.mkdir(parents=True, exist_ok=True)
        found = [self.path / name for name in _CONTENTS if (self.path / name).exists()]
        if anew and found:
            number = 1
            while (archive := self.path / "previous" / f"{number:03d}").exists():
                number += 1
            archive.mkdir(parents=True)
            for item in found:
                item.rename(archive / item.name)
            logger.info("an earlier run's files in %s were moved to %s", self.path, archive)

    def write_config(self, config: dict[str, Any]) -> None:
        """Record every setting with where it came from."""
        write_atomically(self.path / "config.json", json.dumps(config, indent=2).encode())

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Everything logged by trainformer meanwhile also goes to ``log.txt``."""
        handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        level = logger.level
        logger.addHandler(handler)
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, and a crash, see the old content or the new one and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
