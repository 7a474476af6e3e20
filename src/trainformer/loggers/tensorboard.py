"""TensorBoard event files, written through torch. Owns the folder they are in and what a restart hides there."""

from __future__ import annotations

import json
import os
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
        require("tensorboard", "tensorboard", "to write TensorBoard event files")
        torch_tensorboard = require("torch.utils.tensorboard", "tensorboard", "to write TensorBoard event files")
        step, self._continue_from = self._continue_from, None
        self.finish()
        # TensorBoard hides what earlier files hold from purge_step on, this step included.
        purge_step = None if step is None else step + 1
        self._writer = torch_tensorboard.SummaryWriter(str(self.log_dir), purge_step=purge_step, flush_secs=30)
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
        # SummaryWriter.add_hparams would open a second run in a subfolder, and tensorboard's public hparams API needs
        # TensorFlow; the summary below is the one that API writes. Metrics are matched by TensorBoard itself.
        hparams = require("tensorboard.plugins.hparams.summary_v2", "tensorboard", "to write hyperparameters")
        values = {key: value for key, value in flatten(config).items() if value is not None}
        self._writer.file_writer.add_summary(hparams.hparams_pb(values, trial_id=str(self.log_dir)), 0)
