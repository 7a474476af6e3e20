"""Hooks of mini.trainer: their base class, and how they hear the events of a run.

A hook of a `mini.BaseTrainer` gets that trainer. In any other run it gets a `TrainerView`: the run under the names that
hooks know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.callbacks.compat.foreign import ForeignCallback
from trainformer.engine import Event

if TYPE_CHECKING:
    import torch
    from torch import nn


class BaseHook:
    """Hears what happens in a run. Override what you need; what is not overridden costs nothing."""

    def on_before_train(self, trainer: Any) -> None:
        """Once, before the first step."""

    def on_after_train(self, trainer: Any) -> None:
        """Once, after the last step."""

    def on_before_step(self, trainer: Any) -> None:
        """Before each step."""

    def on_after_step(self, trainer: Any) -> None:
        """After each step; `trainer.step_info` tells what it gave."""

    def on_log(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        """When the trainer logs metrics; with `dry_run` nothing is to be written."""

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        """When the trainer logs images; with `dry_run` nothing is to be written."""

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """When a checkpoint is made: add what must survive to `state_dict`, which is this hook's own."""

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
        self._shared = shared
        self._trainer: Any = None
        # Only a hook that keeps something has a state: a checkpoint without it is then nothing to warn of.
        if overrides(hook, "on_state_dict") or overrides(hook, "on_load_state_dict"):
            self.state_dict = self._state_dict
            self.load_state_dict = self._load_state_dict

    def attach(self, trainer: Any) -> None:
        """When the trainer has been built."""
        self._trainer = self._as_hooks_know_it(trainer)

    def listen(self, trainer: Any) -> dict[Event, Callable[..., None]]:
        """The events the hook overrides."""
        known = self._as_hooks_know_it(trainer)
        handlers = {
            event: _told(event, getattr(self.original, name), known)
            for event, name in _METHODS.items()
            if overrides(self.original, name)
        }
        # A scheduler of torch that the user gave has moved on when the step ends: its rates are noted before.
        given = isinstance(known, TrainerView) and hasattr(known.native.active_scheduler, "scheduler")
        if given and Event.STEP_END in handlers:
            handlers[Event.BEFORE_OPTIMIZER_STEP] = lambda step: known.note_rates()
        return handlers

    def _as_hooks_know_it(self, trainer: Any) -> Any:
        """The trainer of mini itself, or one view that all hooks of a run share."""
        own = getattr(trainer, "mini_trainer", None)
        if own is not None:
            return own
        if "mini" not in self._shared:
            self._shared["mini"] = TrainerView(trainer)
        return self._shared["mini"]

    def _state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        self.original.on_state_dict(self._trainer, state)
        return state

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.original.on_load_state_dict(self._trainer, state)


class TrainerView:
    """A run of `trainformer.Trainer` (or of another way in) under the names that hooks of mini.trainer know."""

    def __init__(self, trainer: Any) -> None:
        self.native = trainer
        self.step_info: dict[str, Any] = {}
        self.logger = logging.getLogger("trainformer.mini")
        self._in_step = False
        self._told = -1
        self._rates: list[float] = []
        self._ended = time.perf_counter()

    @property
    def step(self) -> int:
        """The current step, from `on_before_step` on; 0 before training."""
        return self.native.state.step + self._in_step

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run, where that is known."""
        return self.native.total_steps

    @property
    def model(self) -> nn.Module:
        """The model being trained."""
        return self.native.task.model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model inside wrappers."""
        from trainformer.callbacks.compat.unwrapping import unwrap  # it needs torch, hooks as such do not

        return unwrap(model)

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model being trained, without wrappers."""
        return self.unwrap(self.model)

    @property
    def optimizer(self) -> Any:
        """The optimizer at work."""
        return self.native.active_optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule at work."""
        return self.native.active_scheduler

    @property
    def data_loader(self) -> Any:
        """The batches of the training data."""
        return self.native.train_dataloader

    @property
    def hooks(self) -> list[BaseHook]:
        """The hooks of the run, without callbacks of other dialects."""
        callbacks = getattr(getattr(self.native, "_run", None), "callbacks", ())
        return [c.original for c in callbacks if isinstance(c, HookCallback)]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def workspace(self) -> Path | None:
        """The folder of the run."""
        return self.native.run_folder

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal is ending this process; the run goes on in another one."""
        return self.native.control.ending_signal is not None

    def log(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Tell the hooks of metrics."""
        for hook in self.hooks:
            hook.on_log(self, records, dry_run or not self.native.is_main)

    def log_images(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Tell the hooks of images."""
        for hook in self.hooks:
            hook.on_log_images(self, records, dry_run or not self.native.is_main)

    def note_rates(self) -> None:
        """Before an update: the rates that are in force."""
        self._rates = self.native.active_scheduler.get_last_lr()

    def take_note(self, event: Event, args: tuple[Any, ...]) -> None:
        """Before the first hook hears of an event: bring step and `step_info` up to it."""
        if event is not Event.STEP_END:
            self._in_step = event is Event.STEP_BEGIN
            if event is Event.TRAIN_BEGIN:
                self._ended = time.perf_counter()
        elif self._told != self.native.state.step:
            self._told = self.native.state.step
            self._in_step = False
            now, schedule = time.perf_counter(), self.native.active_scheduler
            # A scheduler of torch has moved on to the next step by now; one of our own sets the rates before a step.
            rates = self._rates if hasattr(schedule, "scheduler") else schedule.get_last_lr()
            self.step_info = {
                "loss": args[1],
                "records": {},
                "grad_norm": self.native.grad_norm,
                **{f"lr_{i}": rate for i, rate in enumerate(rates)},
                "step_time": now - self._ended,
            }
            self._ended = now


def speaks_mini(callback: Any) -> bool:
    """Whether a callback is a hook of mini.trainer."""
    return isinstance(callback, BaseHook)


def overrides(hook: BaseHook, name: str) -> bool:
    """Whether a hook does anything on an event.

    >>> class Printer(BaseHook):
    ...     def on_before_train(self, trainer): ...
    >>> overrides(Printer(), "on_before_train"), overrides(Printer(), "on_after_train")
    (True, False)
    """
    method = getattr(hook, name)
    return getattr(method, "__func__", method) is not getattr(BaseHook, name)


def _told(event: Event, method: Callable[[Any], None], trainer: Any) -> Callable[..., None]:
    if not isinstance(trainer, TrainerView):
        return lambda *args: method(trainer)

    def tell(*args: Any) -> None:
        trainer.take_note(event, args)
        method(trainer)

    return tell
