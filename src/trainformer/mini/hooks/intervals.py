"""Hooks that do something every so many steps."""

from __future__ import annotations

from typing import Any

from trainformer.callbacks.compat.mini import BaseHook
from trainformer.core.errors import BadArgument, expected


class IntervalHook(BaseHook):
    """A hook with an interval in steps."""

    def __init__(self, interval: int) -> None:
        self.interval = whole_number(f"{type(self).__name__}'s interval", interval, least=1)

    def is_time(self, trainer: Any) -> bool:
        """Whether the step that was just made is one of them."""
        return trainer.step % self.interval == 0


def whole_number(name: str, value: Any, least: int) -> int:
    """The value, if it is a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadArgument(expected(f"{name} to be a whole number of at least {least}", value))
    return value
