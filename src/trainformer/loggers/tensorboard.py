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
        self._writer: Any = None
        self._protos: dict[str, Any] = {}
        self._continue_from: int | None = None

    def init(self, config: dict[str, Any]) -> None:
        step, self._continue_from = self._continue_from, None
        self.finish()
        why = "to write TensorBoard event files"
        require("tensorboard", "tensorboard", why)
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard", why)
        for name in ("event", "summary", "tensor", "types"):
            self._protos[name] = require(f"tensorboard.compat.proto.{name}_pb2", "tensorboard", why)
        self._writer = writer.EventFileWriter(str(self.log_dir), flush_secs=30)
        if step is not None:  # TensorBoard then ignores events in earlier files from this step on
            session = self._protos["event"].SessionLog
            self._add(step + 1, file_version="brain.Event:2")
            self._add(step + 1, session_log=session(status=session.START))
        elif config:
            self._write_config(config)
        self._writer.flush()

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._started(self._writer)
        for key, value in as_numbers(metrics).items():
            self._add_value(step, tag=key, simple_value=value)

    def log_text(self, key: str, text: str, step: int) -> None:
        self._started(self._writer)
        summary = self._protos["summary"].SummaryMetadata
        metadata = summary(plugin_data=summary.PluginData(plugin_name="text"))
        kind = self._protos["types"].DT_STRING
        tensor = self._protos["tensor"].TensorProto(dtype=kind, string_val=[text.encode()])
        self._add_value(step, tag=f"{key}/text_summary", metadata=metadata, tensor=tensor)

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
        text = json.dumps(jsonable(config), indent=2)
        # TensorBoard renders texts as Markdown; four spaces make it a code block.
        self.log_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        # TensorBoard's public hparams API needs TensorFlow; this is the summary it writes. TensorBoard matches the
        # metrics itself.
        hparams = require("tensorboard.plugins.hparams.summary_v2", "tensorboard", "to write hyperparameters")
        values = {key: value for key, value in flatten(config).items() if value is not None}
        self._add(0, summary=hparams.hparams_pb(values, trial_id=str(self.log_dir)))

    def _add_value(self, step: int, **fields: Any) -> None:
        summary = self._protos["summary"].Summary
        self._add(step, summary=summary(value=[summary.Value(**fields)]))

    def _add(self, step: int, **fields: Any) -> None:
        self._writer.add_event(self._protos["event"].Event(step=step, wall_time=time.time(), **fields))
