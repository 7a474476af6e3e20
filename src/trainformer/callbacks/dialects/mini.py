"""Hooks of mini.trainer: their base class, and how they hear the events of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainformer.callbacks.dialects.foreign import ForeignCallback
from trainformer.engine import Event


class BaseHook:
    """Hears what happens in a run. Override what you need."""

    def on_before_train(self, trainer: Any) -> None:
        """Once, before the first step."""

    def on_after_train(self, trainer: Any) -> None:
        """Once, after the last step."""

    def on_before_step(self, trainer: Any) -> None:
        """Before each step."""

    def on_after_step(self, trainer: Any) -> None:
        """After each step; `trainer.step_info` tells what it gave."""

    def on_log(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        """When the trainer logs metrics."""

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        """When the trainer logs images."""

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """When a checkpoint is made: add to it what must survive."""

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """When a checkpoint is taken up: take back what `on_state_dict` added."""


_METHODS = {
    Event.TRAIN_BEGIN: "on_before_train",
    Event.STEP_BEGIN: "on_before_step",
    Event.STEP_END: "on_after_step",
    Event.TRAIN_END: "on_after_train",
}


class HookCallback(ForeignCallback):
    """A hook as a callback of a run."""

    def __init__(self, hook: BaseHook, shared: dict[str, Any]) -> None:
        super().__init__(hook)

    def listen(self, trainer: Any) -> dict[Event, Callable[..., None]]:
        """The events the hook overrides."""
        return {
            event: _told(getattr(self.original, name), trainer)
            for event, name in _METHODS.items()
            if getattr(type(self.original), name, None) is not getattr(BaseHook, name)
        }


def speaks_mini(callback: Any) -> bool:
    """Whether a callback is a hook of mini.trainer."""
    return isinstance(callback, BaseHook)


def _told(method: Callable[[Any], None], trainer: Any) -> Callable[..., None]:
    return lambda *args: method(trainer)
