"""Hooks of mini.trainer: their base class, and the adapter that runs them as callbacks.

Hooks of a `mini.BaseTrainer` receive that trainer. In any other run they receive a `TrainerView`, which shows the run
under the names that hooks know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from trainformer.callbacks.compat import CallbackAdapter
from trainformer.engine import Event

if TYPE_CHECKING:
    from torch import nn


class BaseHook:
    """Receives the events of a run. Override what you need; events that are not overridden cost nothing."""

    def on_before_train(self, trainer: Any) -> None:
        """Before the first step."""

    def on_after_train(self, trainer: Any) -> None:
        """After the last step."""

    def on_before_step(self, trainer: Any) -> None:
        """Before each step."""

    def on_before_optimizer_step(self, trainer: Any) -> None:
        """Before each optimizer step: gradients are complete and unscaled, and (in a mini trainer) not clipped yet."""

    def on_after_step(self, trainer: Any) -> None:
        """After each step; `trainer.step_info` holds its results."""

    def on_log(self, trainer: Any, records: dict[str, Any], dry_run: bool = False) -> None:
        """When the trainer logs metrics. With `dry_run`, write nothing."""

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool = False) -> None:
        """When the trainer logs images. With `dry_run`, write nothing."""

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """When a checkpoint is saved: add the state of this hook to `state_dict`."""

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """When a checkpoint is loaded: restore what this hook added in `on_state_dict`."""


class StepLosses(list[Any]):
    """The losses of a step's micro-batches. As a number, their mean.

    >>> losses = StepLosses([1.0, 2.0])
    >>> losses[0], float(losses)
    (1.0, 1.5)
    """

    def __float__(self) -> float:
        return sum(map(float, self)) / len(self) if self else float("nan")


_METHODS = {
    Event.TRAIN_BEGIN: "on_before_train",
    Event.STEP_BEGIN: "on_before_step",
    Event.BEFORE_OPTIMIZER_STEP: "on_before_optimizer_step",
    Event.STEP_END: "on_after_step",
    Event.TRAIN_END: "on_after_train",
}


class HookCallback(CallbackAdapter):
    """Adapter of one hook."""

    def __init__(self, hook: BaseHook, shared: dict[str, Any]) -> None:
        super().__init__(hook)
        self._shared = shared
        self._trainer: Any = None
        # Stateless hooks get no state_dict, so that loading a checkpoint without their state does not warn.
        if overrides(hook, "on_state_dict") or overrides(hook, "on_load_state_dict"):
            self.state_dict = self._state_dict
            self.load_state_dict = self._load_state_dict

    def attach(self, trainer: Any) -> None:
        self._trainer = self._hook_trainer(trainer)

    def handlers(self, trainer: Any) -> dict[Event, Callable[..., None]]:
        view = self._hook_trainer(trainer)
        handlers: dict[Event, Callable[..., None]] = {}
        for event, name in _METHODS.items():
            if overrides(self.wrapped, name):
                handlers[event] = partial(_call, event, getattr(self.wrapped, name), view)
        if not isinstance(view, TrainerView):  # the run of a mini trainer calls it, before it clips gradients
            handlers.pop(Event.BEFORE_OPTIMIZER_STEP, None)
        elif hasattr(view.native.active_scheduler, "scheduler") and Event.STEP_END in handlers:
            # A torch scheduler has already advanced when the step ends, so the learning rates are recorded before it.
            handlers[Event.BEFORE_OPTIMIZER_STEP] = view.recording_lrs(handlers.get(Event.BEFORE_OPTIMIZER_STEP))
        return handlers

    def _hook_trainer(self, trainer: Any) -> Any:
        """The mini trainer itself, or a view that all hooks of a run share."""
        own = getattr(trainer, "mini_trainer", None)
        if own is not None:
            return own
        if "mini" not in self._shared:
            self._shared["mini"] = TrainerView(trainer)
        return self._shared["mini"]

    def _state_dict(self) -> dict[str, Any]:
        """What the hook adds to the state, or replaces in it."""
        around = self._state_around()
        state = dict(around)
        self.wrapped.on_state_dict(self._trainer, state)
        return {key: value for key, value in state.items() if key not in around or value is not around[key]}

    def _load_state_dict(self, own: dict[str, Any]) -> None:
        self.wrapped.on_load_state_dict(self._trainer, {**self._state_around(), **own})

    def _state_around(self) -> dict[str, Any]:
        """The rest of the state, which hooks of a mini trainer may read as well."""
        return getattr(self._trainer, "state_in_transfer", None) or {}


class TrainerView:
    """A trainer of another entry point under the names that hooks of mini.trainer know."""

    def __init__(self, trainer: Any) -> None:
        self.native = trainer
        self.step_info: dict[str, Any] = {}
        self.logger = logging.getLogger("trainformer.mini")
        self._in_step = False
        self._last_step = -1
        self._lrs: list[float] = []
        self._ended = time.perf_counter()

    step = property(lambda self: self.native.state.step + self._in_step)  # current from on_before_step on; 0 before
    max_steps = property(lambda self: self.native.total_steps)  # None if unknown
    model = property(lambda self: self.native.task.model)
    unwrapped_model = property(lambda self: unwrap(self.model))
    optimizer = property(lambda self: self.native.active_optimizer)
    lr_scheduler = property(lambda self: self.native.active_scheduler)
    data_loader = property(lambda self: self.native.train_dataloader)
    device = property(lambda self: next(self.model.parameters()).device)
    workspace = property(lambda self: self.native.run_folder)
    is_interrupted = property(lambda self: self.native.control.ending_signal is not None)  # another process will resume

    unwrap = staticmethod(lambda model: unwrap(model))

    @property
    def hooks(self) -> list[BaseHook]:
        """The hooks of the run, without other callbacks."""
        callbacks = getattr(getattr(self.native, "_run", None), "callbacks", ())
        return [c.wrapped for c in callbacks if isinstance(c, HookCallback)]

    def log(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Pass metrics to the hooks."""
        for hook in self.hooks:
            hook.on_log(self, records, dry_run=dry_run or not self.native.is_main)

    def log_images(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Pass images to the hooks."""
        for hook in self.hooks:
            hook.on_log_images(self, records, dry_run=dry_run or not self.native.is_main)

    def recording_lrs(self, handler: Callable[..., None] | None) -> Callable[..., None]:
        """A handler that first remembers the learning rates of the optimizer step that follows."""

        def record(step: int) -> None:
            self._lrs = self.native.active_scheduler.get_last_lr()
            if handler is not None:
                handler(step)

        return record

    def update(self, event: Event, args: tuple[Any, ...]) -> None:
        """Update `step` and `step_info` before hooks receive an event."""
        if event is not Event.STEP_END:
            self._in_step = event in (Event.STEP_BEGIN, Event.BEFORE_OPTIMIZER_STEP)
            if event is Event.TRAIN_BEGIN:
                self._ended = time.perf_counter()
        elif self._last_step != self.native.state.step:
            self._last_step = self.native.state.step
            self._in_step = False
            now, scheduler = time.perf_counter(), self.native.active_scheduler
            # A torch scheduler has advanced to the next step by now; ours set the learning rates before a step.
            lrs = self._lrs if hasattr(scheduler, "scheduler") else scheduler.get_last_lr()
            self.step_info = {
                "loss": StepLosses([args[1]]),
                "records": [],
                "grad_norm": self.native.grad_norm,
                **{f"lr_{i}": lr for i, lr in enumerate(lrs)},
                "step_time": now - self._ended,
            }
            self._ended = now


def overrides(hook: BaseHook, name: str) -> bool:
    """Whether a hook handles an event.

    >>> class Printer(BaseHook):
    ...     def on_before_train(self, trainer): ...
    >>> overrides(Printer(), "on_before_train"), overrides(Printer(), "on_after_train")
    (True, False)
    """
    method = getattr(hook, name)
    return getattr(method, "__func__", method) is not getattr(BaseHook, name)


def _call(event: Event, method: Callable[[Any], None], trainer: Any, *args: Any) -> None:
    if isinstance(trainer, TrainerView):
        trainer.update(event, args)
    method(trainer)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DDP, FSDP, `DataParallel` and `AveragedModel`, in any order.

    >>> import torch
    >>> inner = torch.nn.Linear(1, 1)
    >>> unwrap(torch.nn.DataParallel(inner)) is inner
    True
    """
    # Hooks also run on JAX, where nothing may import torch.
    import torch
    from torch.optim.swa_utils import AveragedModel

    from trainformer.adapters.base import unwrap_model

    wrappers: tuple[type, ...] = (torch.nn.DataParallel, AveragedModel)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrappers += (FullyShardedDataParallel,)
    while True:
        inner = unwrap_model(model)
        if isinstance(inner, wrappers):
            inner = inner.module  # type: ignore[assignment]
        if inner is model:
            return model
        model = inner
