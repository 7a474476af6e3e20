"""HuggingFace's callbacks in a run of ours: their order of events, their state, their flags.

Where the order of events differs, each side gets its own. Ours is step, log, evaluate, end of epoch, save. Theirs is
step, then log, evaluate and save as far as steps make them due, then the end of the epoch, then what epochs make due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainformer.callbacks.compat.arguments import arguments_of
from trainformer.callbacks.compat.foreign import ForeignCallback
from trainformer.callbacks.compat.huggingface_types import (
    EVENTS,
    IntervalStrategy,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trainformer.engine import Event

# Flags of theirs, and what they are called in the engine's control.
_FLAGS = {
    "should_epoch_stop": "should_end_epoch",
    "should_save": "should_save",
    "should_evaluate": "should_evaluate",
    "should_log": "should_log",
}
_STOPPING = ("should_training_stop", "should_abort_without_save")


def speaks_huggingface(callback: Any) -> bool:
    """Whether a callback is one of HuggingFace's: by its base class, or by what its methods want to be told.

    >>> class Printer:
    ...     def on_step_end(self, args, state, control, **kwargs): ...
    >>> speaks_huggingface(Printer()), speaks_huggingface(object())
    (True, False)
    """
    if isinstance(callback, TrainerCallback):
        return True
    classes = type(callback).__mro__
    if any(c.__name__ == "TrainerCallback" and c.__module__.startswith("transformers") for c in classes):
        return True
    methods = [getattr(type(callback), name, None) for name in EVENTS]
    return any(_arguments(method)[1:4] == ("args", "state", "control") for method in methods if method is not None)


def _arguments(method: Any) -> tuple[str, ...]:
    code = getattr(method, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


class HuggingFaceCallback(ForeignCallback):
    """One of HuggingFace's callbacks. All of a run share one state and one control, as they are used to."""

    def __init__(self, callback: Any, shared: dict[str, Any]) -> None:
        super().__init__(callback)
        self.bridge = Bridge.of(shared)
        self._epoch: int | None = None  # the one that has begun and not ended
        self._owes_epoch_end = False
        self._hears: dict[str, bool] = {}
        self.sets_control = getattr(callback, "sets_control", True)

    # -- the run's events, in their words ------------------------------------------------------------------

    def attach(self, trainer: Any) -> None:
        """When the trainer has been built."""
        if self.hears("on_init_end"):
            self._tell(trainer, "on_init_end")

    def listen(self, trainer: Any) -> dict[Event, Callable[..., None]]:
        """The events that concern the callback. An epoch's end is watched for at every point where it may be due."""
        bridge, tell = self.bridge, self._tell
        handlers: dict[Event, Callable[..., None]] = {
            Event.TRAIN_BEGIN: lambda: self._train_begin(trainer),
            Event.EPOCH_BEGIN: lambda epoch: self._epoch_begin(trainer),
            Event.LOG: lambda metrics: self._log(trainer, metrics),
            Event.EVAL_BEGIN: lambda: self._eval_begin(trainer),
            Event.EVAL_END: lambda metrics: self._evaluated(trainer, metrics),
            Event.EPOCH_END: lambda epoch, metrics: self._epoch_end(trainer),
            Event.SAVE: lambda path: self._saved(trainer),
            Event.TRAIN_END: lambda: self._train_end(trainer),
        }
        simple: dict[Event, tuple[str, Callable[..., None]]] = {
            Event.STEP_BEGIN: ("on_step_begin", lambda step: tell(trainer, "on_step_begin")),
            Event.SUBSTEP_END: ("on_substep_end", lambda step: self._substep(trainer)),
            Event.BEFORE_OPTIMIZER_STEP: ("on_pre_optimizer_step", lambda step: tell(trainer, "on_pre_optimizer_step")),
            Event.AFTER_OPTIMIZER_STEP: ("on_optimizer_step", lambda step: tell(trainer, "on_optimizer_step")),
            Event.STEP_END: ("on_step_end", lambda step, loss: tell(trainer, "on_step_end")),
        }
        handlers |= {event: handler for event, (name, handler) in simple.items() if self.hears(name)}
        if callable(getattr(self.original, "on_error", None)):  # an addition of ours to the dialect
            handlers[Event.ERROR] = lambda error: tell(trainer, "on_error", error=error)
        bridge.take_history(trainer)
        return handlers

    def on_validation_batch_end(self, trainer: Any, done: int, total: int | None) -> None:
        """After each batch of an evaluation or a prediction."""
        if self.hears("on_prediction_step"):
            self._tell(trainer, "on_prediction_step")

    def _train_begin(self, trainer: Any) -> None:
        self.bridge.begin(trainer)
        self._tell(trainer, "on_train_begin")
        if self._owes_epoch_end:  # the checkpoint this run goes on from was written between the two
            self._pay_epoch_end(trainer)

    def _epoch_begin(self, trainer: Any) -> None:
        self._epoch = trainer.state.epoch
        self.bridge.epoch_began(trainer)
        self._tell(trainer, "on_epoch_begin")

    def _substep(self, trainer: Any) -> None:
        if self.bridge.is_inside_step(trainer, self):
            self._tell(trainer, "on_substep_end")

    def _log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self._owe_epoch_end(trainer)
        if _strategy(trainer, "logging_strategy") is IntervalStrategy.EPOCH:
            self._pay_epoch_end(trainer)
        logs = self.bridge.logs_of(trainer, metrics)
        self._tell(trainer, "on_log", logs=logs)
        self.bridge.load_components(logs, metrics)

    def _eval_begin(self, trainer: Any) -> None:
        self._owe_epoch_end(trainer)
        self.bridge.remember_best(trainer)
        if _strategy(trainer, "eval_strategy") is IntervalStrategy.EPOCH:
            self._pay_epoch_end(trainer)

    def _evaluated(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        with self.bridge.eval_mode():
            logs = self.bridge.logs_of(trainer, metrics)
            self._tell(trainer, "on_log", logs=logs)
            self._tell(trainer, "on_evaluate", metrics=logs)

    def _epoch_end(self, trainer: Any) -> None:
        self._owe_epoch_end(trainer)
        if not self.bridge.save_follows(trainer) or _strategy(trainer, "save_strategy") is IntervalStrategy.EPOCH:
            self._pay_epoch_end(trainer)

    def _saved(self, trainer: Any) -> None:
        self._tell(trainer, "on_save")
        self._pay_epoch_end(trainer)

    def _train_end(self, trainer: Any) -> None:
        self._owe_epoch_end(trainer)
        self._pay_epoch_end(trainer)
        self._tell(trainer, "on_log", logs=self.bridge.summary(trainer))
        self._tell(trainer, "on_train_end")

    # -- an epoch's end, told once and at their time -------------------------------------------------------

    def _owe_epoch_end(self, trainer: Any) -> None:
        """At the first event after an epoch's last step, or after a run's last one in the middle of an epoch."""
        run, planned = trainer.state, trainer.total_steps
        stopped = trainer.control.should_stop and trainer.control.signal is None  # a signal only interrupts
        is_over = stopped or (planned is not None and run.step >= planned)
        if self._epoch is not None and (run.epoch > self._epoch or is_over):
            self._epoch = None
            self._owes_epoch_end = True

    def _pay_epoch_end(self, trainer: Any) -> None:
        if self._owes_epoch_end:
            self._owes_epoch_end = False
            self._tell(trainer, "on_epoch_end")

    # -- telling -------------------------------------------------------------------------------------------

    def hears(self, name: str) -> bool:
        """Whether the callback does anything on an event. One that intercepts its own attributes hears everything."""
        if name not in self._hears:
            self._hears[name] = self._does(name)
        return self._hears[name]

    def _does(self, name: str) -> bool:
        kind = type(self.original)
        if kind.__getattribute__ is not object.__getattribute__:
            return True
        bases = [c for c in kind.__mro__ if c.__name__ == "TrainerCallback"]
        method = getattr(kind, name, None) or getattr(self.original, name, None)
        return method is not None and all(method is not getattr(base, name, None) for base in bases)

    def _tell(self, trainer: Any, name: str, **extra: Any) -> None:
        if self.hears(name):
            self.bridge.call(trainer, self.original, name, extra)

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The callback's own state, by its own protocol or HuggingFace's, and what it has yet to be told."""
        own: Any = {}
        if callable(getattr(self.original, "state_dict", None)):
            own = self.original.state_dict()
        elif callable(getattr(self.original, "state", None)):
            own = self.original.state().get("attributes", {})
        return {"own": own, "owes_epoch_end": self._owes_epoch_end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._owes_epoch_end = state["owes_epoch_end"]
        if callable(getattr(self.original, "load_state_dict", None)):
            self.original.load_state_dict(state["own"])
        elif callable(getattr(self.original, "state", None)):
            for name, value in state["own"].items():
                setattr(self.original, name, value)


class Bridge:
    """What all of HuggingFace's callbacks of one run share, kept in step with the run."""

    def __init__(self) -> None:
        self.state = TrainerState()
        self.control = TrainerControl()
        self._read = 0  # records of the run's history that were translated
        self._logs: tuple[Any, dict[str, Any]] = (None, {})
        self._best_before: tuple[float | None, int | None] = (None, None)
        self._save_due: tuple[int, bool] = (-1, False)
        self._judging = False
        self._began = 0.0, 0  # when the run began, and at which step
        self._ended = True
        self._substep: tuple[int, dict[int, int]] = (-1, {})

    @classmethod
    def of(cls, shared: dict[str, Any]) -> Bridge:
        """The one of a run."""
        return shared.setdefault("huggingface", cls())

    def begin(self, trainer: Any) -> None:
        """Before the first callback hears that training begins."""
        if self._ended:
            self._began, self._ended = (time.perf_counter(), trainer.state.step), False
            self._save_due, self._substep = (-1, False), (-1, {})
        self.take_history(trainer)

    def epoch_began(self, trainer: Any) -> None:
        """Note with which step an epoch began."""
        if trainer.state.batch == 0:
            self.state.epoch_start_step = trainer.state.step

    # -- calling -------------------------------------------------------------------------------------------

    def call(self, trainer: Any, callback: Any, event: str, extra: dict[str, Any]) -> None:
        """One callback, one event; then what it asked for is asked of the engine."""
        self.refresh(trainer)
        control, engine = self.control, trainer.control
        before = self._flags(engine)
        for name, value in before.items():
            setattr(control, name, value)
        returned = getattr(callback, event)(
            arguments_of(trainer), self.state, control, **self._company(trainer), **extra
        )
        for name in changed_flags(before, control, returned):
            self._ask(trainer, type(callback).__name__, event, name, not before[name])

    def _flags(self, engine: Any) -> dict[str, bool]:
        flags = {theirs: bool(getattr(engine, ours)) for theirs, ours in _FLAGS.items()}
        return flags | dict(zip(_STOPPING, (engine.should_stop, engine.aborted), strict=True))

    def _ask(self, trainer: Any, who: str, event: str, flag: str, value: bool) -> None:
        engine = trainer.control
        if flag in _FLAGS:
            setattr(engine, _FLAGS[flag], value)
        elif not value:
            engine.cancel_stop()
        elif flag == "should_abort_without_save":
            engine.abort(f"it set {flag} in {event}", by=who)
        else:
            engine.stop(f"it set {flag} in {event}", by=who)

    def _company(self, trainer: Any) -> dict[str, Any]:
        task = trainer.task
        return {
            "model": task.model,
            "processing_class": getattr(trainer, "processing_class", None) or getattr(task, "tokenizer", None),
            "optimizer": trainer.active_optimizer,
            "lr_scheduler": trainer.active_scheduler,
            "train_dataloader": trainer.train_dataloader,
            "eval_dataloader": trainer.val_dataloader,
            "trainer": getattr(trainer, "front", trainer),
        }

    # -- the state -----------------------------------------------------------------------------------------

    def refresh(self, trainer: Any) -> None:
        """Bring the state up to where the run is."""
        run, state = trainer.state, self.state
        length = trainer.train_dataloader.batches_per_epoch
        state.global_step, state.raw_epoch = run.step, run.epoch
        state.epoch = run.epoch + (run.batch / length if length else 0.0)
        state.max_steps = trainer.total_steps or -1
        state.num_input_tokens_seen = run.tokens
        state.best_metric, state.best_global_step = self._best_before if self._judging else self._best(trainer)
        state.is_world_process_zero, state.is_local_process_zero = trainer.is_main, trainer.is_local_main
        args = arguments_of(trainer)
        state.num_train_epochs = args.num_train_epochs
        state.logging_steps, state.eval_steps = args.logging_steps, args.eval_steps or args.logging_steps
        state.save_steps, state.train_batch_size = args.save_steps, args.per_device_train_batch_size

    def _best(self, trainer: Any) -> tuple[float | None, int | None]:
        run = trainer.state
        value = run.best_metrics.get(trainer.monitor_metric)
        return value, (run.best_step if value is not None else None)

    def remember_best(self, trainer: Any) -> None:
        """Before an evaluation."""
        self._best_before = self._best(trainer)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """While they hear of an evaluation, the best is still that of the evaluations before: they compare with it."""
        self._judging = True
        try:
            yield
        finally:
            self._judging = False

    def save_follows(self, trainer: Any) -> bool:
        """Whether a checkpoint is due when an epoch ends, before any of them has heard of the end and asked for one."""
        if self._save_due[0] != trainer.state.step:
            self._save_due = trainer.state.step, trainer.control.should_save and not trainer.control.aborted
        return self._save_due[1]

    def is_inside_step(self, trainer: Any, listener: object) -> bool:
        """Whether a micro-batch that has just ended is not the last of its step."""
        run, args = trainer.state, arguments_of(trainer)
        length = trainer.train_dataloader.batches_per_epoch
        most = args.gradient_accumulation_steps
        size = most if length is None else min(most, length - run.batch)
        if self._substep[0] != run.step:
            self._substep = run.step, {}
        done = self._substep[1].get(id(listener), 0) % size + 1  # a window that is repeated begins anew
        self._substep[1][id(listener)] = done
        return done < size

    # -- metrics -------------------------------------------------------------------------------------------

    def take_history(self, trainer: Any) -> None:
        """Translate what the run has logged so far; a run that was taken up has a past."""
        records = trainer.state.log_history
        if self._read > len(records):
            self._read = 0
            self.state.log_history.clear()
        for record in records[self._read :]:
            self.state.log_history.append(translated(record))
        self._read = len(records)

    def logs_of(self, trainer: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics in their words: one dict for all callbacks, which may add to it, and the history's newest record."""
        known, logs = self._logs
        if known is not metrics:
            self.take_history(trainer)
            self.refresh(trainer)
            logs = {**translated(metrics), "epoch": self.state.epoch}
            self._logs = metrics, logs
            history = self.state.log_history
            if not any(name.startswith("eval_") for name in logs):
                self._read += 1  # the run adds this record when everybody has heard of it
                history.append({**logs, "step": trainer.state.step})
            elif history:
                history[-1] = {**logs, "step": trainer.state.step}
        return logs

    def load_components(self, logs: Mapping[str, Any], metrics: dict[str, Any]) -> None:
        """What callbacks added to the logs becomes part of the record."""
        known = {translated_name(name) for name in metrics} | {"epoch"}
        metrics.update({name: value for name, value in logs.items() if name not in known})

    def summary(self, trainer: Any) -> dict[str, float]:
        """What is logged when training has ended."""
        self._ended = True
        self.refresh(trainer)
        return {**training_summary(trainer, *self._began), "epoch": self.state.epoch}


def changed_flags(before: Mapping[str, bool], control: Any, returned: Any) -> list[str]:
    """Flags that a callback changed: in the control it was given, in one that it returned, or in both."""
    answers = [control] if returned is None else [control, returned]
    return [name for name, value in before.items() if any(bool(getattr(a, name, value)) != value for a in answers)]


def training_summary(trainer: Any, began: float, first_step: int) -> dict[str, float]:
    """HuggingFace's figures of a whole run: how long it took, how fast it was, and its mean loss."""
    run = trainer.state
    seconds = max(time.perf_counter() - began, 1e-9)
    steps = run.step - first_step
    samples = run.samples * steps / run.step if run.step else 0
    return {
        "train_runtime": seconds,
        "train_samples_per_second": samples / seconds,
        "train_steps_per_second": steps / seconds,
        "total_flos": 0.0,
        "train_loss": run.loss_sum / run.loss_steps if run.loss_steps else 0.0,
    }


def translated_name(name: str) -> str:
    """A metric's name in their words.

    >>> [translated_name(n) for n in ("train/loss", "train/lr", "val/accuracy", "step")]
    ['loss', 'learning_rate', 'eval_accuracy', 'step']
    """
    if name == "train/lr":
        return "learning_rate"
    if name.startswith("val/"):
        return f"eval_{name.removeprefix('val/')}"
    return name.removeprefix("train/")


def our_name(name: str) -> str:
    """A metric's name in our words, where it is one of theirs.

    >>> [our_name(n) for n in ("loss", "eval_accuracy", "my/metric")]
    ['train/loss', 'val/accuracy', 'my/metric']
    """
    if name.startswith("eval_"):
        return f"val/{name.removeprefix('eval_')}"
    if "/" in name or name.startswith(("test_", "train_")):
        return name
    return "train/lr" if name == "learning_rate" else f"train/{name}"


def translated(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics in their words."""
    return {translated_name(name): value for name, value in metrics.items()}


def _strategy(trainer: Any, name: str) -> IntervalStrategy:
    value = str(getattr(arguments_of(trainer), name))
    if value == "best":  # saved when an evaluation says so
        return _strategy(trainer, "eval_strategy")
    return IntervalStrategy(value)
