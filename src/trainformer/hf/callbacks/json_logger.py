"""`JsonLogger`: every event of a run that carries figures, one JSON object per line.

Owns the record. How a file of such lines survives a crash is the business of `trainformer.loggers.jsonl`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, expected
from trainformer.hf.callbacks.arguments import all_arguments
from trainformer.hf.callbacks.names import is_evaluation
from trainformer.loggers.jsonl import JsonlLogger, valid_lines
from trainformer.utils.files import write_atomically

FILE_NAME = "trainer_logs.jsonl"
_NOTHING: Mapping[str, Any] = {}


class JsonLogger(TrainerCallback):
    """Appends a record to a file when training begins and ends, and at each log, evaluation and save.

    A record holds `event`, `timestamp` (ISO 8601, UTC), `global_step`, `epoch`, `metrics` and `meta`, which is whatever
    keyword arguments were given (`name`, `description`, `config`, ...); the first record also has the arguments, under
    `args`. The file is `path`, or ``trainer_logs.jsonl`` in `log_dir` or else in the run's logging folder.

    Each line is JSON that any reader accepts: NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, which `float` reads. A record is handed to the system at once, so that a kill tears at most
    the last line, which the next run removes. A run that goes on drops the records after the step it goes on from. A
    run that begins anew leaves an older file aside, under a numbered name.
    """

    sets_control = False

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        **meta: Any,
    ) -> None:
        if path is not None and log_dir is not None:
            raise BadArgument(expected("either path or log_dir for JsonLogger", (path, log_dir), "Leave one out."))
        self.meta = meta
        self.path: Path | None = Path(path) if path is not None else None
        self._folder = None if log_dir is None else Path(log_dir)
        self._before: Path | None = None  # where the run that goes on wrote to
        self._file: _EventFile | None = None
        self._has_trained = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the file where the run goes on, and say what it is."""
        if not state.is_world_process_zero:
            return
        step = state.global_step
        evaluated_before = self._file is not None and not self._has_trained  # that record belongs to this run
        self._close()
        self._open(args, goes_on_from=None if evaluated_before and step == 0 else step)
        self._has_trained = True
        self._write(args, "on_train_begin", state, {}, {"args": all_arguments(args)})

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Write a record of training; that of an evaluation follows when it is announced as one."""
        if logs and not is_evaluation(logs):
            self._write(args, "on_log", state, logs)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Write the metrics of an evaluation."""
        self._write(args, "on_evaluate", state, metrics or {})

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note that there is a checkpoint."""
        self._write(args, "on_save", state, {})

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the last record."""
        self._write(args, "on_train_end", state, {})
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.finish()
            self._file = None

    def _open(self, args: Any, goes_on_from: int | None) -> None:
        if self.path is None:
            folder = self._folder or getattr(args, "logging_dir", None) or args.output_dir
            self.path = self._of_same_run(args) or Path(folder) / FILE_NAME
        self._file = _EventFile(self.path)
        if goes_on_from is not None:
            self._file.continue_from(goes_on_from)
        self._file.init({})

    def _of_same_run(self, args: Any) -> Path | None:
        """The file of the run that goes on, where a new process would choose another folder. Never another run's."""
        before = self._before
        if before is None or self._folder is not None or not before.exists():
            return None
        return before if before.resolve().is_relative_to(Path(args.output_dir).resolve()) else None

    def state_dict(self) -> dict[str, Any]:
        """Where the records are."""
        return {"path": None if self.path is None else str(self.path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, if that is still the same run."""
        self._before = None if state["path"] is None else Path(state["path"])

    def _write(
        self, args: Any, event: str, state: TrainerState, metrics: Mapping[str, Any], more: Mapping[str, Any] = _NOTHING
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._file is None:  # an evaluation outside of training
            self._open(args, goes_on_from=None)
        assert self._file is not None
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        where = {"event": event, "timestamp": now, "global_step": state.global_step, "epoch": state.epoch}
        self._file.write({**where, "metrics": metrics, "meta": self.meta, **more})


class _EventFile(JsonlLogger):
    """The same file with records of another shape."""

    def write(self, record: dict[str, Any]) -> None:
        file = self._started(self._file)
        # ASCII only: also lone surrogates, which no encoding has, are then valid.
        file.write(json.dumps(jsonable(record)).encode() + b"\n")
        file.flush()

    def continue_from(self, step: int) -> None:
        if not self.path.exists():
            return
        if step == 0:
            self._set_aside()
            return
        kept = [line for line, record in valid_lines(self.path) if record.get("global_step", 0) <= step]
        content = b"".join(line + b"\n" for line in kept)
        if content != self.path.read_bytes():
            write_atomically(self.path, content)

    def _set_aside(self) -> None:
        """What another run wrote here is not ours to delete."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
            number += 1
        self.path.rename(aside)
