"""What a run reports: console messages, `records.jsonl`, and progress of evaluations.

`records.jsonl` holds what happened in a run and is not a number over steps, one JSON object per line: start, resume,
saves, evaluations, skipped steps, split batches, who stopped the run, how it ended, and whatever callbacks add. Unlike
`metrics.jsonl` it is append-only: after a crash it documents the crash. Losing a line is better than losing the run, so
a file that cannot be written causes one warning. Nothing here is called per step.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainformer.checkpointing.checkpointer import versions
from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, expected
from trainformer.core.secrets import mask
from trainformer.engine import Event
from trainformer.live.runs import read_status
from trainformer.loggers.jsonl import encode_record, truncate_partial_line
from trainformer.run.provenance import differences
from trainformer.utils.console import INTERRUPTIONS
from trainformer.utils.text import duration

if TYPE_CHECKING:
    from trainformer.checkpointing import Checkpoint
    from trainformer.run.folder import NoFolder, RunFolder
    from trainformer.run.run import Run

logger = logging.getLogger("trainformer")

RECORDS_FILE = "records.jsonl"
# How the last process ended, by its status.
_ENDED = {
    "running": ": the last process was killed",
    "failed": ": the last process failed",
    "interrupted": ": the last process was interrupted",
    "finished": ": the run had finished",
}
_RESERVED = {"time", "step", "kind"}


# -- log messages ----------------------------------------------------------------------------------------------------


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        # A line of a log file stays whole; on a terminal it is wrapped between words.
        whole = not self._console.is_terminal
        self._console.print(record.getMessage(), style=style, highlight=False, markup=False, soft_wrap=whole)


@contextmanager
def console_messages(console: Console, enabled: bool) -> Iterator[None]:
    """Show trainformer's log messages on the console, unless the program has set up logging itself."""
    own = [handler for handler in logging.getLogger().handlers if not isinstance(handler, logging.NullHandler)]
    if not enabled or own:
        yield
        return
    with log_handler(_ConsoleHandler(console)):
        yield


@contextmanager
def log_handler(handler: logging.Handler) -> Iterator[None]:
    """Add a handler to trainformer's logger, then close it."""
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


def log_resume(run: Run, checkpoint: Checkpoint, folder: Path) -> None:
    """Where the run continues, how the last process ended, and what is different now."""
    if not run.process_group.is_main:
        return
    state, manifest, total = run.state, checkpoint.manifest, run.total_steps()
    where = [f"step {state.step:,}" if total is None else f"step {state.step:,} of {total:,}"]
    if total is None or state.step < total:
        where.append(f"epoch {state.epoch + 1}")
    if manifest.time:
        where.append(f"saved {duration(max(0.0, time.time() - manifest.time))} ago")
    if state.seconds >= 1:
        where.append(f"{duration(state.seconds)} of training so far")
    ended = _ENDED.get(read_status(folder).get("status", ""), "")
    logger.info(
        "resuming from %s (%s)%s. To start from scratch, %s.",
        checkpoint.path, ", ".join(where), ended, run.options.fresh_start_hint,
    )  # fmt: skip
    if changed := differences(run, folder, manifest):
        logger.info("different from last time: %s", ", ".join(changed))


def log_start(run: Run) -> None:
    """What is about to be trained, or why there is nothing to train."""
    state, total, hint = run.state, run.total_steps(), run.options.fresh_start_hint
    if state.stopped:
        logger.warning(
            "nothing left to train: the run was stopped at step %d by %s: %s. Call fit() again or load the "
            "checkpoint to continue all the same, or %s to start from scratch.", state.step, *state.stopped, hint,
        )  # fmt: skip
        return
    if total is not None and state.step >= total:
        logger.warning(
            "nothing left to train: %d of %d steps are done. Raise the number of steps or epochs to continue, "
            "or %s to start from scratch.", state.step, total, hint,
        )  # fmt: skip
        return
    samples = run.train_size
    logger.info(
        "training %s, %s samples, %s steps",
        run.describe(), f"{samples:,}" if samples is not None else "?", f"{total:,}" if total is not None else "?",
    )  # fmt: skip


# -- records.jsonl ---------------------------------------------------------------------------------------------------


class RecordFile:
    """Appends records to a file, unbuffered; without a path it writes nothing. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._is_repaired = self._has_warned = False
        self._lock = threading.Lock()

    def write(self, kind: str, step: int, content: Mapping[str, Any]) -> None:
        """Append one record. If that fails, the run continues without it."""
        if self.path is None:
            return
        record = {"time": round(time.time(), 3), "step": step, "kind": kind, **content}
        line = encode_record(mask(jsonable(record)))
        with self._lock:
            try:
                if not self._is_repaired:  # a killed process may have left a partial line
                    truncate_partial_line(self.path)
                    self._is_repaired = True
                with open(self.path, "ab") as file:
                    file.write(line)
            except OSError as error:
                self._is_repaired = False  # some of it may have been written
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "%s cannot be written (%s): the run continues, but reports will lack these events",
                        self.path, error,
                    )  # fmt: skip


class RunRecords:
    """The records of one run. Every rank may add records; rank 0 writes them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._file = RecordFile()
        self._faults: dict[str, int] = {}
        self._recorded_save = -1
        self.resumed_from: str | None = None  # the checkpoint that was loaded since the last `fit`

    def add(self, kind: str, content: Mapping[str, Any]) -> None:
        """Add a record at the current step."""
        self._file.write(kind, self._run.state.step, content)

    def add_custom(self, kind: str, content: Mapping[str, Any]) -> None:
        """Add a record of a user or a callback."""
        if not isinstance(kind, str) or not kind:
            raise BadArgument(expected("the kind of a record to be a non-empty string", kind))
        if taken := _RESERVED & content.keys():
            raise BadArgument(expected("a record to have keys other than time, step and kind", sorted(taken)))
        if self._run.folder is None:
            do = "Call it from a callback, or after fit()."
            raise BadArgument(
                expected("a run that has started, so that there is a folder for the record", "none yet", do)
            )
        self.add(kind, content)

    @contextmanager
    def recording(self, folder: RunFolder | NoFolder) -> Iterator[None]:
        """Record the start of a run, what it resumed from, and how it ended."""
        run = self._run
        if run.process_group.is_main and folder.path is not None and self._file.path is None:
            self._file = RecordFile(folder.path / RECORDS_FILE)
        settings = run.settings
        start = {
            "epochs": None if settings.max_steps is not None else settings.epochs,
            "steps_planned": run.total_steps(),
            **run.device_info(),
            "world_size": run.process_group.world_size,
            "versions": {"python": sys.version.split()[0], **versions(run.files)},
            "command": list(sys.argv),
            "git": current_commit(Path.cwd()),
        }
        self.add("began", start)
        self._faults = run.fault_counters()
        if self.resumed_from is not None:
            self.add("resumed", {"from": self.resumed_from, "from_step": run.state.step})
            self.resumed_from = None
        try:
            yield
        except BaseException as error:
            self.check_faults()
            status = "interrupted" if isinstance(error, INTERRUPTIONS) else "failed"
            self.add("ended", {"status": status, "error": f"{type(error).__name__}: {error}".removesuffix(": ")})
            raise
        self.check_faults()
        control = run.control
        if control.should_stop:
            self.add("stopped", {"by": control.stopped_by, "reason": control.stop_reason})
        self.add("ended", {"status": run.outcome(), "error": None})

    def handlers(self) -> dict[Event, Callable[..., None]]:
        """Event handlers that record evaluations and saves."""
        return {Event.EVAL_END: self._evaluated, Event.SAVE: self._saved}

    def check_faults(self, loss: float | None = None) -> None:
        """Record steps skipped and batches split since the last call. `loss` is the one being logged."""
        now = self._run.fault_counters()
        before, self._faults = self._faults, now
        skipped = now.get("skipped", 0) - before.get("skipped", 0)
        if skipped > 0:
            self.add("skipped", {"reason": "loss or gradient not finite", "steps": skipped, "loss": loss})
        if now.get("pieces", 1) > before.get("pieces", 1):
            self.add("split", {"parts": now["pieces"]})

    def begin_save(self, name: str) -> Callable[[], None]:
        """Called before a checkpoint is written; returns what to call once it is complete, in any thread."""
        began, reason = time.perf_counter(), save_reason(self._run)
        self._recorded_save = step = self._run.state.step

        def written() -> None:
            seconds = round(time.perf_counter() - began, 3)
            self._file.write("saved", step, {"checkpoint": name, "seconds": seconds, "reason": reason})

        return written

    def _saved(self, path: str) -> None:
        """A checkpoint that was not written by the run itself, but by a hook of `trainformer.mini`."""
        if self._recorded_save != self._run.state.step:
            self.add("saved", {"checkpoint": Path(path).name, "seconds": None, "reason": save_reason(self._run)})

    def _evaluated(self, metrics: Mapping[str, float]) -> None:
        self.check_faults()
        self.add("evaluated", {"metrics": dict(metrics)})


def current_commit(folder: Path) -> str | None:
    """The git commit checked out at `folder`, read from git's files; None if it is not in a repository."""
    for place in (folder, *folder.parents):
        if (place / ".git").exists():
            try:
                return _head_of(place / ".git")
            except (OSError, ValueError, IndexError):  # an unknown layout: the record lacks the commit
                return None
    return None


def _head_of(git: Path) -> str | None:
    if git.is_file():  # in a worktree: "gitdir: <folder>"
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


def save_reason(run: Run) -> str | None:
    """Why a checkpoint is written at the current step. Of several reasons, the one that would not recur."""
    if run.loop is None:
        return None
    plan, state = run.loop.plan, run.state
    if run.control.ending_signal is not None:
        return "signal"
    if run.best_at_step == state.step:
        return "best"
    if run.control.should_stop:
        return "stopped"
    limits = (state.step, plan.max_steps), (state.epoch, plan.epochs)
    if any(limit is not None and done >= limit for done, limit in limits):
        return "end"
    cadence = plan.save_every
    if cadence is None:
        return "requested"
    at_epoch = state.batch == 0 and cadence.due_at_epoch(state.epoch)
    # Only the loop knows whether a cadence in minutes is due.
    return "due" if at_epoch or cadence.due_at_step(state.step) or cadence.unit == "seconds" else "requested"


@contextmanager
def eval_progress(callbacks: Iterable[Any], owner: Any, total: int | None) -> Iterator[Callable[[int], None] | None]:
    """A function to call after each evaluation batch, or None if no callback wants to know."""
    listeners = [cb for cb in callbacks if hasattr(cb, "on_validation_batch_end")]
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += 1
        for listener in listeners:
            listener.on_validation_batch_end(owner, done, total)

    try:
        yield advance if listeners else None
    finally:
        for listener in listeners:
            if hasattr(listener, "on_validation_cleanup"):
                listener.on_validation_cleanup(owner)
