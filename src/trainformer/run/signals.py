"""Signals of a run. A handler only sets a flag; the loop acts on it at the next step boundary."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainformer.engine import Control
from trainformer.run.habits import SignalRules

logger = logging.getLogger("trainformer")

#: Save and go on.
SAVING = (signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()


class SignalStop(SystemExit):
    """The run was asked by a signal to end, has saved, and leaves with this exit code."""

    def __init__(self, number: int, rules: SignalRules) -> None:
        super().__init__(rules.code_for(number))
        self.number = number


def leave(number: int, rules: SignalRules) -> None:
    """End the program after a signal, when everything is saved and closed."""
    if rules.wait:
        logger.info("leaving in %g s", rules.wait)
        time.sleep(rules.wait)
    raise SignalStop(number, rules)


@contextmanager
def obeying_signals(control: Control, rules: SignalRules) -> Iterator[None]:
    """Note signals in `control` meanwhile; put the previous handlers back afterwards.

    Python allows handlers in the main thread alone; a run in another thread is left without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in (control.pending_signal, control.signal):
            raise KeyboardInterrupt  # asked twice: at once
        control.pending_signal = number

    def save(number: int, frame: FrameType | None) -> None:
        control.pending_save = True

    wanted = dict.fromkeys(rules.stopping, stop) | dict.fromkeys(SAVING, save)
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
