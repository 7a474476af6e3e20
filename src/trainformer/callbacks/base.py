"""Callbacks: the native protocol, what a callback may use of the trainer, and the list that delivers events to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from trainformer.callbacks.compat import ForeignCallback, original, to_native
from trainformer.core.errors import BadArgument, expected
from trainformer.engine import Control, Event, LazyScalar, RunState

# The method of a callback that hears an event. Every one gets the trainer first, then the event's arguments.
METHODS: dict[Event, str] = {
    Event.TRAIN_BEGIN: "on_train_begin",
    Event.EPOCH_BEGIN: "on_epoch_begin",
    Event.STEP_BEGIN: "on_step_begin",
    Event.SUBSTEP_END: "on_substep_end",
    Event.BEFORE_OPTIMIZER_STEP: "on_before_optimizer_step",
    Event.AFTER_OPTIMIZER_STEP: "on_after_optimizer_step",
    Event.STEP_END: "on_step_end",
    Event.LOG: "on_log",
    Event.EVAL_BEGIN: "on_validation_begin",
    Event.EVAL_END: "on_validation_end",
    Event.SAVE: "on_save",
    Event.EPOCH_END: "on_epoch_end",
    Event.TRAIN_END: "on_train_end",
    Event.ERROR: "on_error",
}


class Probe(Protocol):
    """Steps that leave no trace; see `TrainerLike.sandbox`."""

    def batches(self) -> Iterator[Any]:
        """Training batches, beginning anew when they are used up."""
        ...

    def step(self, batch: Any, lr: float | None = None) -> float:
        """One optimizer step on a batch, at a given rate; its loss."""
        ...


class TrainerLike(Protocol):
    """What callbacks may use of the trainer that calls them."""

    task: Any
    lr: float
    state: RunState
    control: Control

    @property
    def is_main(self) -> bool: ...
    @property
    def is_local_main(self) -> bool: ...
    @property
    def total_steps(self) -> int | None: ...
    @property
    def active_optimizer(self) -> Any: ...
    @property
    def active_scheduler(self) -> Any: ...
    @property
    def context(self) -> Any: ...
    @property
    def grad_norm(self) -> Any: ...
    @property
    def same_classes(self) -> bool: ...
    @property
    def train_dataloader(self) -> Any: ...
    @property
    def val_dataloader(self) -> Any: ...
    @property
    def logger(self) -> Any: ...
    def was_set(self, name: str) -> bool: ...
    def stop(self, reason: str) -> None: ...
    def log_metrics(self, metrics: dict[str, float]) -> None: ...
    def record(self, kind: str, **content: Any) -> None: ...
    def sample_predictions(self, max_samples: int, inputs: Callable[[Any], dict[str, Any]]) -> dict[str, Any]: ...
    def evaluate_without_ema(self) -> dict[str, float]: ...
    def embed(self, data: Any = "val", max_samples: int | None = None) -> dict[str, Any]: ...
    def eval_mode(self) -> AbstractContextManager[None]: ...
    def save(self, path: str) -> str: ...
    def copy_model(self) -> Any: ...

    def sandbox(self) -> AbstractContextManager[Probe]: ...


class Callback(Protocol):
    """Hears what happens in a run. Define only the methods you need; no base class is required.

    Besides the methods below, a callback may define `attach(trainer)`, called once when the trainer is built, and
    `compute_metrics(trainer, metrics)`, called with the metrics of an evaluation to return further ones (which can be monitored
    like any other), `on_substep_end`, `on_before_optimizer_step`, `on_after_optimizer_step`, `on_log`, `on_validation_begin`, `on_save`
    and `on_error`; see `trainformer.engine.Event` for when these happen.
    """

    def on_train_begin(self, trainer: TrainerLike) -> None:
        """Before the first step."""

    def on_train_end(self, trainer: TrainerLike) -> None:
        """After the last step."""

    def on_epoch_begin(self, trainer: TrainerLike, epoch: int) -> None:
        """Before an epoch (counted from 0)."""

    def on_epoch_end(self, trainer: TrainerLike, epoch: int, metrics: dict[str, float]) -> None:
        """After an epoch, with the metrics of its evaluation, if there was one."""

    def on_step_begin(self, trainer: TrainerLike, step: int) -> None:
        """Before an optimizer step; `step` steps are done."""

    def on_step_end(self, trainer: TrainerLike, step: int, loss: LazyScalar) -> None:
        """After an optimizer step; `step` steps are done. `loss` is a float that waits for the device when read."""

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """After an evaluation, with metrics named ``val/...``."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class CallbackList:
    """Callbacks in the order given. The caller's list is copied, not kept.

    >>> class Counter:
    ...     n = 0
    ...     def on_step_end(self, trainer, step, loss):
    ...         self.n += 1
    >>> counter = Counter()
    >>> CallbackList([counter]).on_step_end(None, 1, 0.5)
    >>> counter.n
    1
    """

    def __init__(self, callbacks: Iterable[Any] | None = None) -> None:
        self.callbacks: list[Any] = []
        self.shared: dict[str, Any] = {}  # what callbacks of one foreign dialect have in common
        for callback in callbacks or ():
            self.add(callback)

    def add(self, callback: Any) -> Any:
        """Append a callback of any dialect; the callback as it is kept, which may be a wrapper."""
        if isinstance(callback, type):
            raise BadArgument(
                expected("a callback object", f"the class {callback.__name__}", f"Write {callback.__name__}().")
            )
        callback = to_native(callback, self.shared)
        names = (*METHODS.values(), "attach", "compute_metrics")
        known = isinstance(callback, ForeignCallback) or any(callable(getattr(callback, n, None)) for n in names)
        if not known:
            raise BadArgument(
                expected(f"a callback with at least one of {', '.join(METHODS.values())}", type(callback).__name__)
            )
        self.callbacks.append(callback)
        return callback

    def remove(self, callback: Any) -> Any:
        """Take out a callback, or the first of a class; what was taken out (not its wrapper), or None."""
        for place, kept in enumerate(self.callbacks):
            found = original(kept)
            if (type(found) is callback) if isinstance(callback, type) else (found is callback):
                del self.callbacks[place]
                return found
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    def named(self) -> dict[str, Any]:
        """Callbacks by a stable unique key: the class name, numbered from the second of a class on."""
        keys: dict[str, Any] = {}
        for callback in self.callbacks:
            name = name_of(callback)
            number = 1 + sum(name_of(other) == name for other in keys.values())
            keys[name if number == 1 else f"{name}#{number}"] = callback
        return keys

    def state_dict(self) -> dict[str, Any]:
        """States of all callbacks that have one."""
        return {key: cb.state_dict() for key, cb in self.named().items() if callable(getattr(cb, "state_dict", None))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each callback its state back; callbacks that were not there before keep their own."""
        for key, callback in self.named().items():
            if key in state and callable(getattr(callback, "load_state_dict", None)):
                callback.load_state_dict(state[key])

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in METHODS.values():
            raise AttributeError(name)

        def deliver(trainer: Any, *args: Any) -> None:
            for callback in self.callbacks:
                if hasattr(callback, name):
                    getattr(callback, name)(trainer, *args)

        return deliver


def handlers_of(callback: Any, trainer: Any) -> dict[Event, Callable[..., None]]:
    """The events a callback listens to, with its methods bound to the trainer."""
    if isinstance(callback, ForeignCallback):
        return callback.listen(trainer)
    found: dict[Event, Callable[..., None]] = {}
    for event, name in METHODS.items():
        method = getattr(callback, name, None)
        # A class that inherits from the protocol has its empty methods; listening with those would cost time.
        if callable(method) and getattr(method, "__func__", None) is not getattr(Callback, name, object()):
            found[event] = partial(method, trainer)
    return found


def name_of(callback: Any) -> str:
    """How a callback is called in logs and checkpoints."""
    return type(original(callback)).__name__
