"""Limits of a run besides its number of steps: batches per epoch or evaluation, and time."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import HostBatch

_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "min": 60.0, "s": 1.0}


def parse_duration(text: str | float | None) -> float | None:
    """Seconds, from a number or from a text with days, hours, minutes and seconds.

    >>> parse_duration("1d"), parse_duration("2h30m"), parse_duration(90)
    (86400.0, 9000.0, 90.0)
    """
    if text is None:
        return None
    what = "training_time_limit to be a number of seconds, or a text such as '45m', '2h30m' or '1d'"
    if isinstance(text, (int, float)) and not isinstance(text, bool) and math.isfinite(text) and text > 0:
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s)", text.lower()) if isinstance(text, str) else []
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not isinstance(text, str) or seconds <= 0 or re.sub(r"[\d.\s]|d|h|min|m|s", "", text.lower()):
        raise BadArgument(expected(what, text))
    return seconds


class TimeLimit:
    """A callback that stops a run after some seconds. It ends the process, not the run: the same command resumes it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = 0.0
        self._trainer: Any = None

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stopped = self._trainer.state.stopped
        if stopped and stopped[0] == type(self).__name__:
            stopped.clear()

    def on_train_begin(self, trainer: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if time.monotonic() - self._began >= self.seconds:
            trainer.stop(f"training_time_limit: {self.seconds:g} s have passed")


class SaveInterval:
    """A callback that requests a checkpoint every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._saved = 0.0

    def on_train_begin(self, trainer: Any) -> None:
        self._saved = time.monotonic()

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if time.monotonic() - self._saved >= self.seconds:
            trainer.control.should_save = True
            self._saved = time.monotonic()


class FirstBatches:
    """The first `limit` batches of every epoch of a source, whose length may be unknown."""

    def __init__(self, source: Any, limit: int) -> None:
        self.source = source
        self.limit = limit

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def batches_per_epoch(self) -> int:
        length = self.source.batches_per_epoch
        return self.limit if length is None else min(length, self.limit)

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """The rest of an epoch after `batch` batches and `position` samples."""
        return islice(self.source.batches(epoch, batch, position), max(0, self.limit - batch))
