"""Signals of a run. A handler only sets a flag; the loop acts on it at the next step boundary."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainformer.engine import Control

logger = logging.getLogger("trainformer")

#: Save, then leave with 128 + the signal's number.
STOPPING = (signal.SIGTERM, signal.SIGINT)
#: Save and go on.
SAVING = (signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()


class SignalStop(SystemExit):
    """The run was asked by a signal to end, has saved, and leaves with this exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def obeying_signals(control: Control) -> Iterator[None]:
    """Note signals in `control` meanwhile; put the previous handlers back afterwards.

    Python allows handlers in the main thread alone; a run in another thread is left without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and control.signal == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        control.signal = number

    def save(number: int, frame: FrameType | None) -> None:
        control.should_save = True

    wanted = dict.fromkeys(STOPPING, stop) | dict.fromkeys(SAVING, save)
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
