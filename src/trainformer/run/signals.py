"""Signal handling of a run. A handler only sets a flag; the loop acts on it at the next step boundary."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from trainformer.engine import Control

logger = logging.getLogger("trainformer")

#: Save and continue.
_SAVE_SIGNALS = (signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()


@dataclass(frozen=True)
class SignalRules:
    """Which signals stop a run (it saves, then exits), with which exit code, and after how many seconds."""

    stopping: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
    exit_code: int | str = "128+signal"
    wait: float = 0.0

    def code_for(self, number: int) -> int:
        """The exit code after a signal."""
        return 128 + number if self.exit_code == "128+signal" else int(self.exit_code)


class SignalStop(SystemExit):
    """A signal stopped the run; everything is saved, and the process exits with this code."""

    def __init__(self, number: int, rules: SignalRules) -> None:
        super().__init__(rules.code_for(number))
        self.number = number


def exit_after_signal(number: int, rules: SignalRules) -> None:
    """Exit the program after a signal, when everything is saved and closed."""
    if rules.wait:
        logger.info("exiting in %g s", rules.wait)
        time.sleep(rules.wait)
    raise SignalStop(number, rules)


@contextmanager
def handling_signals(control: Control, rules: SignalRules) -> Iterator[None]:
    """Record signals in `control`; restore the previous handlers afterwards.

    Python allows handlers in the main thread only; a run in another thread has none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in (control.pending_signal, control.signal):
            raise KeyboardInterrupt  # the second Ctrl-C: at once
        control.pending_signal = number

    def save(number: int, frame: FrameType | None) -> None:
        control.pending_save = True

    handlers = dict.fromkeys(rules.stopping, stop) | dict.fromkeys(_SAVE_SIGNALS, save)
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
