"""`TBLogger`, and the TensorBoard writers that callbacks are given or open at a path.

Callbacks with the same path share one writer: a new writer of a resumed run hides what earlier ones wrote after the
resumed step, and two of them would hide each other's new values.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.hf.callbacks.common import all_arguments, numbers, to_tags


class WritingCallback(TrainerCallback):
    """Base class of callbacks with a `summary_writer`: opened when training begins, closed when it ends."""

    sets_control = False

    def __init__(self, summary_writer: Any) -> None:
        self._writer = WriterHandle(summary_writer, type(self).__name__)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._writer.open(state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._writer.close()


class TBLogger(WritingCallback):
    """Logs metrics, arguments, the model config and information about the experiment to TensorBoard.

    `summary_writer` is a `SummaryWriter` or a folder. Scalars have the names that transformers uses (``train/loss``,
    ``train/learning_rate``, ``eval/loss``). When training begins it writes the texts ``experiment_info`` (the keyword
    arguments), ``args`` and ``model_config``. The writer of a folder is closed when training ends, and a resumed run
    hides what was written after the step it resumes from. A writer that you pass is only flushed.
    """

    def __init__(self, summary_writer: Any, **experiment_info: Any) -> None:
        super().__init__(summary_writer)
        self.experiment_info = experiment_info

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._writer.open(state)
        if self.experiment_info:
            self._writer.add_record("experiment_info", self.experiment_info, state.global_step)
        self._writer.add_record("args", all_arguments(args), state.global_step)
        config = getattr(kwargs.get("model"), "config", None)
        if config is not None:
            content = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
            self._writer.add_record("model_config", content, state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        tags = to_tags(logs)
        self._writer.add_scalars(numbers(tags), state.global_step)
        for name, value in tags.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, state.global_step)


@dataclass
class _SharedWriter:
    """A writer, and the run and step at which it was opened."""

    writer: Any
    state: TrainerState
    step: int
    users: list[WriterHandle] = field(default_factory=list)


_open_writers: dict[Path, _SharedWriter] = {}


class WriterHandle:
    """A `SummaryWriter`, a path to open one at, or None, which makes all methods do nothing.

    A writer that the user passed is flushed but never closed.
    """

    def __init__(self, summary_writer: Any, owner: str) -> None:
        self._path: Path | None = None
        self._writer: Any = None
        if isinstance(summary_writer, str | os.PathLike):
            require("tensorboard", "tensorboard", "to write TensorBoard event files")
            self._path = Path(summary_writer).absolute()
        elif summary_writer is not None and not callable(getattr(summary_writer, "add_scalar", None)):
            what = f"{owner}'s summary_writer to be a SummaryWriter, a folder to write event files to, or None"
            raise BadArgument(expected(what, summary_writer))
        else:
            self._writer = summary_writer

    def open(self, state: TrainerState) -> None:
        """Open the writer of a path when training begins, on the main process only."""
        if self._path is None or not state.is_world_process_zero:
            return
        shared, step = _open_writers.get(self._path), state.global_step
        if shared is None or not (shared.state is state and shared.step == step):
            if shared is not None:  # left open by a run that failed
                shared.writer.close()
            module = require("torch.utils.tensorboard", "tensorboard", "to write TensorBoard event files")
            # TensorBoard hides what earlier files hold from purge_step on, this step included.
            writer = module.SummaryWriter(str(self._path), purge_step=step + 1 if step else None)
            _open_writers[self._path] = shared = _SharedWriter(writer, state, step)
        self._writer = shared.writer
        shared.users.append(self)

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        """Write scalars, and flush."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def add_text(self, name: str, text: str, step: int) -> None:
        """Write a text, which TensorBoard renders as Markdown, and flush."""
        if self._writer is not None:
            self._writer.add_text(name, text, step)
            self._writer.flush()

    def add_record(self, name: str, values: Any, step: int) -> None:
        """Write structured values as JSON in a code block."""
        lines = json.dumps(jsonable(values), indent=2).splitlines()
        self.add_text(name, "\n".join(f"    {line}" for line in lines), step)

    def close(self) -> None:
        """Release the writer when training ends. The last user of a shared writer closes it."""
        if self._writer is None:
            return
        self._writer.flush()
        if self._path is not None:
            shared = _open_writers.get(self._path)
            if shared is not None and self in shared.users:
                shared.users.remove(self)
                if not shared.users:
                    del _open_writers[self._path]
                    shared.writer.close()
            self._writer = None
