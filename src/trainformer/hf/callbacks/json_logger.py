"""`JsonLogger`: the events of a run as JSON Lines. `trainformer.loggers.jsonl` makes the file safe against crashes."""

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
from trainformer.hf.callbacks.common import all_arguments, is_evaluation
from trainformer.loggers.jsonl import JsonlLogger, valid_lines
from trainformer.utils.files import write_atomically

FILE_NAME = "trainer_logs.jsonl"
_NOTHING: Mapping[str, Any] = {}


class JsonLogger(TrainerCallback):
    """Appends a record to a file when training begins and ends, and at each log, evaluation and save.

    A record has the fields `event`, `timestamp` (ISO 8601, UTC), `global_step`, `epoch`, `metrics` and `meta`, which
    holds the keyword arguments (`name`, `description`, `config`, ...). The first record also has the arguments of the
    run, as `args`. The file is `path`, or ``trainer_logs.jsonl`` in `log_dir` (default: the logging folder of the run).

    Each line is standard JSON: NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which
    `float` reads. Each record is flushed at once, so a kill damages at most the last line, which the next run removes.
    A resumed run drops the records after the step it resumes from. A run that starts from scratch renames an existing
    file to a numbered name.
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
        self._before: Path | None = None  # file of the run that is resumed
        self._file: _EventFile | None = None
        self._has_trained = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        step = state.global_step
        evaluated_before = self._file is not None and not self._has_trained  # the file has records of this run already
        self._close()
        self._open(args, resume_step=None if evaluated_before and step == 0 else step)
        self._has_trained = True
        self._write(args, "on_train_begin", state, {}, {"args": all_arguments(args)})

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Write training metrics; those of an evaluation arrive in `on_evaluate`."""
        if logs and not is_evaluation(logs):
            self._write(args, "on_log", state, logs)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._write(args, "on_evaluate", state, metrics or {})

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write(args, "on_save", state, {})

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write(args, "on_train_end", state, {})
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.finish()
            self._file = None

    def _open(self, args: Any, resume_step: int | None) -> None:
        if self.path is None:
            folder = self._folder or getattr(args, "logging_dir", None) or args.output_dir
            self.path = self._file_of_resumed_run(args) or Path(folder) / FILE_NAME
        self._file = _EventFile(self.path)
        if resume_step is not None:
            self._file.continue_from(resume_step)
        self._file.init({})

    def _file_of_resumed_run(self, args: Any) -> Path | None:
        """The file of the run being resumed, as a new process has another logging folder. Never that of another run."""
        before = self._before
        if before is None or self._folder is not None or not before.exists():
            return None
        return before if before.resolve().is_relative_to(Path(args.output_dir).resolve()) else None

    def state_dict(self) -> dict[str, Any]:
        return {"path": None if self.path is None else str(self.path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = None if state["path"] is None else Path(state["path"])

    def _write(
        self, args: Any, event: str, state: TrainerState, metrics: Mapping[str, Any], more: Mapping[str, Any] = _NOTHING
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._file is None:  # an evaluation outside of training
            self._open(args, resume_step=None)
        assert self._file is not None
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        where = {"event": event, "timestamp": now, "global_step": state.global_step, "epoch": state.epoch}
        self._file.write({**where, "metrics": metrics, "meta": self.meta, **more})


class _EventFile(JsonlLogger):
    """A crash-safe JSON Lines file with records of our own."""

    def write(self, record: dict[str, Any]) -> None:
        file = self._started(self._file)
        # ASCII only: lone surrogates, which UTF-8 cannot encode, are valid JSON escapes.
        file.write(json.dumps(jsonable(record)).encode() + b"\n")
        file.flush()

    def continue_from(self, step: int) -> None:
        if not self.path.exists():
            return
        if step == 0:
            number = 1
            while (other := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
                number += 1
            self.path.rename(other)
            return
        kept = [line for line, record in valid_lines(self.path) if record.get("global_step", 0) <= step]
        content = b"".join(line + b"\n" for line in kept)
        if content != self.path.read_bytes():
            write_atomically(self.path, content)
