"""What a way into the library does otherwise than `Trainer`: users of other libraries keep what they are used to."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SignalRules:
    """Which signals end a run (it saves, then leaves), with which exit code, and how long it waits before."""

    stopping: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
    exit_code: int | str = "128+signal"
    wait: float = 0.0

    def code_for(self, number: int) -> int:
        """The exit code after a signal."""
        return 128 + number if self.exit_code == "128+signal" else int(self.exit_code)


@dataclass(frozen=True)
class FrontOptions:
    """Handed to a session by the way in that makes it.

    `plan` changes fields of the loop's plan. Without `keeps_folder` nothing is written to disk. `checkpoint_name` is
    formatted with the step. With `shows_messages` the console shows what is said of the run, whatever logs there are.
    `begin_anew` is how one is told to do that.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    keeps_folder: bool = True
    checkpoint_name: str = "step_{:08d}"
    shows_messages: bool = False
    begin_anew: str = "pass resume=None"
    signals: SignalRules = SignalRules()
