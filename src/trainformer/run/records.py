"""`records.jsonl`: what happened in a run and is no number over steps, one JSON object per line.

Owns the file and which events of a run go into it: that it began, on what it went on, saves, evaluations, steps that
were left out, batches that were split, who stopped it and how it ended; and whatever callbacks add. Unlike
`metrics.jsonl` it is only ever appended to: after a crash it tells of the crash. Losing a line is better than losing
the run, so a file that cannot be written is warned about once. Nothing here is called per step.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.checkpointing.checkpointer import versions
from trainformer.core.errors import BadArgument, expected
from trainformer.engine import Event
from trainformer.loggers.jsonl import encode_record, truncate_partial_line

if TYPE_CHECKING:
    from trainformer.run.folder import NoFolder, RunFolder
    from trainformer.run.run import Run

logger = logging.getLogger("trainformer")

RECORDS_FILE = "records.jsonl"
_RESERVED = {"time", "step", "kind"}


class RecordFile:
    """Appends records to a file, each at once; to none without a path. Threads may share it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._is_clean = self._has_warned = False
        self._lock = threading.Lock()

    def write(self, kind: str, step: int, content: Mapping[str, Any]) -> None:
        """Append one record. If that is not possible, the run goes on without."""
        if self.path is None:
            return
        line = encode_record({"time": round(time.time(), 3), "step": step, "kind": kind, **content})
        with self._lock:
            try:
                if not self._is_clean:  # a killed process may have left a partial line
                    truncate_partial_line(self.path)
                    self._is_clean = True
                with open(self.path, "ab") as file:
                    file.write(line)
            except OSError as error:
                self._is_clean = False  # some of it may have been written
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "%s cannot be written (%s): the run goes on, a report of it will lack what happened",
                        self.path, error,
                    )  # fmt: skip


class RunRecords:
    """The records of one run. Every rank may ask for them to be written; the main one does."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._file = RecordFile()
        self._mishaps: dict[str, int] = {}
        self._told_of_save = -1
        self.went_on_from: str | None = None  # the checkpoint that was loaded since the last `fit`

    def add(self, kind: str, content: Mapping[str, Any]) -> None:
        """One more, at the current step."""
        self._file.write(kind, self._run.state.step, content)

    def add_asked(self, kind: str, content: Mapping[str, Any]) -> None:
        """One that a user or a callback asks for."""
        if not isinstance(kind, str) or not kind:
            raise BadArgument(expected("the kind of a record to be a word", kind))
        if taken := _RESERVED & content.keys():
            raise BadArgument(expected("a record to have keys other than time, step and kind", sorted(taken)))
        if self._run.folder is None:
            do = "Call it from a callback, or after fit()."
            raise BadArgument(expected("a run that has begun, whose folder a record can go to", "none yet", do))
        self.add(kind, content)

    @contextmanager
    def keeping(self, folder: RunFolder | NoFolder) -> Iterator[None]:
        """Around a run: that it began, where it went on from, and how it ended."""
        run = self._run
        if run.process_group.is_main and folder.path is not None and self._file.path is None:
            self._file = RecordFile(folder.path / RECORDS_FILE)
        self.add("began", _beginning(run))
        self._mishaps = run.fault_counters()
        if self.went_on_from is not None:
            self.add("resumed", {"from": self.went_on_from, "from_step": run.state.step})
            self.went_on_from = None
        try:
            yield
        except BaseException as error:
            self.notice()
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.add("ended", {"status": status, "error": f"{type(error).__name__}: {error}".removesuffix(": ")})
            raise
        self.notice()
        control = run.control
        if control.should_stop:
            self.add("stopped", {"by": control.stopped_by, "reason": control.stop_reason})
        self.add("ended", {"status": run.outcome(), "error": None})

    def listeners(self) -> dict[Event, Callable[..., None]]:
        """What is recorded on hearing of it."""
        return {Event.EVAL_END: self._evaluated, Event.SAVE: self._saved}

    def notice(self, loss: float | None = None) -> None:
        """Steps left out and batches split since the last look. `loss` is the one that is being logged."""
        now = self._run.fault_counters()
        before, self._mishaps = self._mishaps, now
        skipped = now.get("skipped", 0) - before.get("skipped", 0)
        if skipped > 0:
            self.add("skipped", {"reason": "loss or gradient not finite", "steps": skipped, "loss": loss})
        if now.get("pieces", 1) > before.get("pieces", 1):
            self.add("split", {"parts": now["pieces"]})

    def expect_save(self, name: str) -> Callable[[], None]:
        """Before a checkpoint is written: what to call when it is there, in whatever thread."""
        began, reason = time.perf_counter(), self._run.why_saved()
        self._told_of_save = step = self._run.state.step

        def written() -> None:
            seconds = round(time.perf_counter() - began, 3)
            self._file.write("saved", step, {"checkpoint": name, "seconds": seconds, "reason": reason})

        return written

    def _saved(self, path: str) -> None:
        """A checkpoint that somebody else wrote, as the hooks of `trainformer.mini` do."""
        if self._told_of_save != self._run.state.step:
            self.add("saved", {"checkpoint": Path(path).name, "seconds": None, "reason": self._run.why_saved()})

    def _evaluated(self, metrics: Mapping[str, float]) -> None:
        self.notice()
        self.add("evaluated", {"metrics": dict(metrics)})


def _beginning(run: Run) -> dict[str, Any]:
    settings = run.settings
    return {
        "epochs": None if settings.max_steps is not None else settings.epochs,
        "steps_planned": run.total_steps(),
        **run.place(),
        "world_size": run.process_group.world_size,
        "versions": {"python": sys.version.split()[0], **versions(run.files)},
        "command": list(sys.argv),
        "git": current_commit(Path.cwd()),
    }


def current_commit(folder: Path) -> str | None:
    """The commit that is checked out where `folder` is, read from git's files; None where there is none."""
    for place in (folder, *folder.parents):
        if (place / ".git").exists():
            try:
                return _head_of(place / ".git")
            except (OSError, ValueError, IndexError):  # not a form we know: a record lacks one line
                return None
    return None


def _head_of(git: Path) -> str | None:
    if git.is_file():  # of a worktree: "gitdir: <its own folder>"
        git = git.parent / git.read_text().split(":", 1)[1].strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    name = head.split(":", 1)[1].strip()
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    for place in (git / name, common / name):
        if place.exists():
            return place.read_text().strip()
    packed = (common / "packed-refs").read_text().splitlines() if (common / "packed-refs").exists() else []
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
