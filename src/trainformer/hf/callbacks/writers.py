"""TensorBoard writers that callbacks were given, or open themselves at a path.

Owns who opens, shares and closes them. Callbacks that name the same path share one writer: on resuming, each new writer
hides what earlier ones hold after the resumed step, and two of them would hide each other's new values.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainformer.callbacks.compat.huggingface_types import TrainerState
from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require


@dataclass
class _Shared:
    """A writer of a run, which began with `step`."""

    writer: Any
    state: TrainerState
    step: int
    users: list[WriterHandle] = field(default_factory=list)


_open_writers: dict[Path, _Shared] = {}


class WriterHandle:
    """A `SummaryWriter`, a path to open one at, or nothing: then everything here does nothing.

    A writer that was handed in is flushed, and never closed: whoever made it closes it.
    """

    def __init__(self, summary_writer: Any, owner: str) -> None:
        self._path: Path | None = None
        self._writer: Any = None
        if isinstance(summary_writer, str | os.PathLike):
            require("tensorboard", "tensorboard", "to write TensorBoard event files")
            self._path = Path(summary_writer).absolute()
        elif summary_writer is not None and not callable(getattr(summary_writer, "add_scalar", None)):
            words = f"{owner}'s summary_writer to be a SummaryWriter, a folder to write event files to, or None"
            raise BadArgument(expected(words, summary_writer))
        else:
            self._writer = summary_writer

    def open(self, state: TrainerState) -> None:
        """When training begins. Only the main process writes to a path."""
        if self._path is None or not state.is_world_process_zero:
            return
        shared, step = _open_writers.get(self._path), state.global_step
        if shared is None or not (shared.state is state and shared.step == step):
            if shared is not None:  # of a run that failed, and closed nothing
                shared.writer.close()
            module = require("torch.utils.tensorboard", "tensorboard", "to write TensorBoard event files")
            # TensorBoard hides what earlier files hold from purge_step on, this step included.
            writer = module.SummaryWriter(str(self._path), purge_step=step + 1 if step else None)
            _open_writers[self._path] = shared = _Shared(writer, state, step)
        self._writer = shared.writer
        shared.users.append(self)

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        """Numbers under their names, there for a reader at once."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def add_text(self, name: str, text: str, step: int) -> None:
        """A text, which TensorBoard renders as Markdown."""
        if self._writer is not None:
            self._writer.add_text(name, text, step)
            self._writer.flush()

    def add_record(self, name: str, values: Any, step: int) -> None:
        """Something structured, as JSON in a code block."""
        lines = json.dumps(jsonable(values), indent=2).splitlines()
        self.add_text(name, "\n".join(f"    {line}" for line in lines), step)

    def close(self) -> None:
        """When training has ended: let go of a writer that was opened here; the last to do so closes it."""
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
