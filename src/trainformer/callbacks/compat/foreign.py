"""What wrappers of callbacks from elsewhere have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainformer.engine import Event


class ForeignCallback:
    """A callback of another dialect, as a callback of a run."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def listen(self, trainer: Any) -> dict[Event, Callable[..., None]]:
        """What it wants to hear of a run, translated."""
        raise NotImplementedError
