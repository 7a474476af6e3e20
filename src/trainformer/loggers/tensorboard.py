"""TensorBoard event files, written with its own writer. Owns the folder they are in and what a restart hides there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from trainformer.core.optional import require
from trainformer.loggers.base import BaseLogger
from trainformer.loggers.values import as_numbers, flatten, jsonable


class TensorBoardLogger(BaseLogger):
    """Writes event files to `log_dir`; look at them with ``tensorboard --logdir <log_dir>``.

    The configuration is shown under "Text", and its scalar values under "HParams".
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "runs") -> None:
        self.log_dir = Path(log_dir)
        self._writer: Any = None
        self._continue_from: int | None = None

    def init(self, config: dict[str, Any]) -> None:
        step, self._continue_from = self._continue_from, None
        self.finish()
        self._writer = _EventFile(self.log_dir)
        if step is not None:
            self._writer.hide_from(step + 1)
        if step is None:
            self._write_config(config)
        self._writer.flush()

    def log(self, metrics: dict[str, float], step: int) -> None:
        writer = self._started(self._writer)
        for key, value in as_numbers(metrics).items():
            writer.add_scalar(key, value, step)

    def log_text(self, key: str, text: str, step: int) -> None:
        self._started(self._writer).add_text(key, text, step)

    def continue_from(self, step: int) -> None:
        self._continue_from = step

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finish(self, status: str = "finished") -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_config(self, config: dict[str, Any]) -> None:
        if not config:
            return
        text = json.dumps(jsonable(config), indent=2)
        # TensorBoard renders texts as Markdown; four spaces make it a code block.
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        # tensorboard's public hparams API needs TensorFlow; the summary below is the one that API writes. Metrics are
        # matched by TensorBoard itself.
        hparams = require("tensorboard.plugins.hparams.summary_v2", "tensorboard", "to write hyperparameters")
        values = {key: value for key, value in flatten(config).items() if value is not None}
        self._writer.add_summary(hparams.hparams_pb(values, trial_id=str(self.log_dir)), 0)


class _EventFile:
    """One file of events. Neither torch nor TensorFlow is needed to write it."""

    def __init__(self, folder: Path) -> None:
        why = "to write TensorBoard event files"
        require("tensorboard", "tensorboard", why)
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard", why)
        self._events = require("tensorboard.compat.proto.event_pb2", "tensorboard", why)
        self._summaries = require("tensorboard.compat.proto.summary_pb2", "tensorboard", why)
        self._tensors = require("tensorboard.compat.proto.tensor_pb2", "tensorboard", why)
        self._types = require("tensorboard.compat.proto.types_pb2", "tensorboard", why)
        self._writer = writer.EventFileWriter(str(folder), flush_secs=30)

    def hide_from(self, step: int) -> None:
        """What earlier files hold from this step on, it included, is not shown."""
        self._add(step, file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step, session_log=start)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """A number."""
        self._add_value(step, tag=tag, simple_value=value)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """A text, which is shown as Markdown."""
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add_value(step, tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)

    def _add_value(self, step: int, **fields: Any) -> None:
        self.add_summary(self._summaries.Summary(value=[self._summaries.Summary.Value(**fields)]), step)

    def add_summary(self, summary: Any, step: int) -> None:
        """Any summary that a plugin of TensorBoard understands."""
        self._add(step, summary=summary)

    def _add(self, step: int, **fields: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), **fields))

    def flush(self) -> None:
        """Onto the disk."""
        self._writer.flush()

    def close(self) -> None:
        """No more."""
        self._writer.close()
