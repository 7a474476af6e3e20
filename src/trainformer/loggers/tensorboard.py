"""TensorBoard event files, written with TensorBoard's own writer (neither torch nor TensorFlow is needed)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from trainformer.context.jsonable import jsonable
from trainformer.core.optional import require
from trainformer.loggers.base import BaseLogger, as_numbers, flatten


class TensorBoardLogger(BaseLogger):
    """Writes event files to `log_dir`; view them with ``tensorboard --logdir <log_dir>``.

    The configuration appears under "Text", and its scalar values under "HParams".
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "runs") -> None:
        self.log_dir = Path(log_dir)
        self._writer: _EventFile | None = None
        self._continue_from: int | None = None

    def init(self, config: dict[str, Any]) -> None:
        step, self._continue_from = self._continue_from, None
        self.finish()
        self._writer = writer = _EventFile(self.log_dir)
        if step is not None:
            writer.hide_from(step + 1)
        elif config:
            self._write_config(writer, config)
        writer.flush()

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

    def _write_config(self, writer: _EventFile, config: dict[str, Any]) -> None:
        text = json.dumps(jsonable(config), indent=2)
        # TensorBoard renders texts as Markdown; four spaces make it a code block.
        writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        # TensorBoard's public hparams API needs TensorFlow; this is the summary it writes. TensorBoard matches the
        # metrics itself.
        hparams = require("tensorboard.plugins.hparams.summary_v2", "tensorboard", "to write hyperparameters")
        values = {key: value for key, value in flatten(config).items() if value is not None}
        writer.add_summary(hparams.hparams_pb(values, trial_id=str(self.log_dir)), 0)


class _EventFile:
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
        """TensorBoard ignores events in earlier files from this step on."""
        self._add(step, file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step, session_log=start)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._add_value(step, tag=tag, simple_value=value)

    def add_text(self, tag: str, text: str, step: int) -> None:
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add_value(step, tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)

    def _add_value(self, step: int, **fields: Any) -> None:
        self.add_summary(self._summaries.Summary(value=[self._summaries.Summary.Value(**fields)]), step)

    def add_summary(self, summary: Any, step: int) -> None:
        self._add(step, summary=summary)

    def _add(self, step: int, **fields: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), **fields))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
