"""The folder of a run: config, metrics, checkpoints, log."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from trainformer.context import PipelineConfig
from trainformer.core.errors import BadArgument, expected
from trainformer.live.runs import read_status
from trainformer.run.console import messages_to
from trainformer.utils.files import write_atomically
from trainformer.utils.processes import is_alive, process_identity

logger = logging.getLogger("trainformer")

_DRAFT = re.compile(r"\..+\.(\d+)\.tmp")  # as `write_atomically` names them
_CONTENTS = (
    "config.json", "status.json", "metrics.jsonl", "records.jsonl", "log.txt", "checkpoints", "tensorboard",
    "report.html", "recipe.yaml",
)  # fmt: skip


class RunFolder:
    """Where everything of one run is. Made when the run begins, not before."""

    def __init__(self, path: Path, save_dir: str) -> None:
        self.path = path
        self.checkpoints = path / save_dir  # an absolute save_dir replaces the path
        self.fingerprint = ""

    @classmethod
    def choose(
        cls, run_dir: str | Path | None, name: str | None, task: str, save_dir: str, unfinished: str | None = None
    ) -> RunFolder:
        """The folder the user named, else ``runs/<name>``, else one named after the task and the time.

        `unfinished` is the fingerprint of the command. If a run of the very same command was cut short, its folder is
        taken up again: that is what makes running the same command again go on where it was.
        """
        if run_dir is not None:
            return cls(Path(run_dir), save_dir)
        if name is not None:
            chosen = re.sub(r"[^\w.=+-]+", "-", name)
            if not chosen.strip("."):
                do = "Leave it out for one after the task and the time."
                raise BadArgument(expected("name to name a folder under runs/", name, do))
            return cls(Path("runs") / chosen, save_dir)
        if unfinished is not None and (found := _unfinished_run(task, unfinished)) is not None:
            return cls(found, save_dir)
        stem = Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, number = stem, 2
        while path.exists():
            path, number = stem.with_name(f"{stem.name}-{number}"), number + 1
        return cls(path, save_dir)

    def open(self, anew: bool) -> None:
        """Make the folder. `anew`: what an earlier run left in it is moved to ``previous/``, not overwritten."""
        self.path.mkdir(parents=True, exist_ok=True)
        for draft in self.path.glob(".*.tmp"):  # of a process that was killed while it wrote
            match = _DRAFT.fullmatch(draft.name)
            if match and not is_alive(int(match[1])):
                draft.unlink(missing_ok=True)
        found = [self.path / name for name in _CONTENTS if (self.path / name).exists()]
        if anew and found:
            number = 1
            while (archive := self.path / "previous" / f"{number:03d}").exists():
                number += 1
            archive.mkdir(parents=True)
            for item in found:
                item.rename(archive / item.name)
            logger.info("an earlier run's files in %s were moved to %s", self.path, archive)

    def was_cut_short(self) -> bool:
        """Whether this folder holds an unfinished run of the very same command."""
        return _was_cut_short(read_status(self.path), self.fingerprint)

    @contextmanager
    def recording(self, config: PipelineConfig) -> Iterator[None]:
        """Keep ``config.json``: every setting and where it came from, also those that are found during the run."""
        path = self.path / "config.json"
        write_atomically(path, json.dumps(config.to_json(), indent=2).encode())
        try:
            yield
        finally:
            write_atomically(path, json.dumps(config.to_json(), indent=2).encode())

    @contextmanager
    def status(self, outcome: Callable[[], str]) -> Iterator[None]:
        """Keep ``status.json``: running (and which process), then finished, stopped, interrupted or failed.

        A process that is killed leaves "running" with the number of a process that no longer is.
        """
        self._write_status("running")
        try:
            yield
        except KeyboardInterrupt:
            self._write_status("interrupted")
            raise
        except BaseException:
            self._write_status("failed")
            raise
        self._write_status(outcome())

    def _write_status(self, status: str) -> None:
        process = os.getpid()
        content = {
            "status": status,
            "process": process,
            "identity": process_identity(process),
            "fingerprint": self.fingerprint,
            "time": time.time(),
        }
        write_atomically(self.path / "status.json", json.dumps(content).encode())

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Everything logged by trainformer meanwhile also goes to ``log.txt``."""
        handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        with messages_to(handler):
            yield


class GuestFolder(RunFolder):
    """The folder of a run as ranks other than 0 see it: they write their parts of checkpoints, and nothing else."""

    @contextmanager
    def recording(self, config: PipelineConfig) -> Iterator[None]:
        """Rank 0 does."""
        yield

    @contextmanager
    def status(self, outcome: Callable[[], str]) -> Iterator[None]:
        """Rank 0 does."""
        yield

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Rank 0 does."""
        yield


class NoFolder:
    """A run that leaves nothing on disk."""

    path = None

    def recording(self, config: PipelineConfig) -> AbstractContextManager[None]:
        """No ``config.json``."""
        return nullcontext()

    def status(self, outcome: Callable[[], str]) -> AbstractContextManager[None]:
        """No ``status.json``."""
        return nullcontext()

    def log_file(self) -> AbstractContextManager[None]:
        """No ``log.txt``."""
        return nullcontext()


def _unfinished_run(task: str, fingerprint: str) -> Path | None:
    """The newest folder of a run of the same command that did not come to its end and that nobody is working on."""
    for path in sorted(Path("runs").glob(f"{task}-*"), reverse=True):
        if _was_cut_short(read_status(path), fingerprint):
            return path
    return None


def _was_cut_short(status: dict[str, Any], fingerprint: str) -> bool:
    """Whether a run of this very command did not come to its end, and no process is working on it."""
    if status.get("fingerprint") != fingerprint or status["status"] in ("finished", "stopped"):
        return False
    return not (status["status"] == "running" and process_identity(status["process"]) == status["identity"])
