"""Runs HF `TrainerCallback`s in a run of ours: the order of events, the state and the control flags they expect.

The order of events differs. Ours: step, log, evaluate, end of epoch, save. HF: step; log, evaluate and save if due by
steps; end of epoch; log, evaluate and save if due by epochs. Each side gets its own order.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainformer.callbacks.compat import CallbackAdapter
from trainformer.callbacks.compat.handlers import call_handler
from trainformer.callbacks.compat.huggingface_types import (
    IntervalStrategy,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    arguments_of,
)
from trainformer.engine import Event
from trainformer.engine.state import append_record

# HF control flags and their names in the engine's control.
_FLAGS = {
    "should_epoch_stop": "should_end_epoch",
    "should_save": "should_save",
    "should_evaluate": "should_evaluate",
    "should_log": "should_log",
}
# Metrics of a training record that HF does not have.
_NOT_IN_HF = ("train/samples_per_second", "train/tokens_per_second", "train/memory_gb", "train/save_seconds")
_STOP_FLAGS = ("should_training_stop", "should_abort_without_save")


def is_huggingface_callback(callback: Any) -> bool:
    """Whether a callback is written for HF: by its base class, or by the signature of its methods.

    >>> class Printer:
    ...     def on_step_end(self, args, state, control, **kwargs): ...
    >>> is_huggingface_callback(Printer()), is_huggingface_callback(object())
    (True, False)
    """
    if isinstance(callback, TrainerCallback):
        return True
    classes = type(callback).__mro__
    if any(c.__name__ == "TrainerCallback" and c.__module__.startswith("transformers") for c in classes):
        return True
    methods: list[Any] = [getattr(type(callback), name, None) for name in dir(type(callback)) if name.startswith("on_")]
    codes = [method.__code__ for method in methods if hasattr(method, "__code__")]
    if any(code.co_varnames[: code.co_argcount][1:4] == ("args", "state", "control") for code in codes):
        return True
    # Forgather passes everything by name, so methods may name only what they need.
    by_name = any(code.co_flags & inspect.CO_VARKEYWORDS for code in codes)
    return by_name and all(code.co_varnames[1 : code.co_argcount][:1] != ("trainer",) for code in codes)


class HuggingFaceCallback(CallbackAdapter):
    """Adapter of one HF callback. All adapters of a run share one state and one control, as in transformers."""

    def __init__(self, callback: Any, shared: dict[str, Any]) -> None:
        super().__init__(callback)
        self.bridge = Bridge.of(shared)
        self._epoch: int | None = None  # the epoch that has begun but not ended
        self._epoch_end_pending = False
        self._overridden: dict[str, bool] = {}
        self.sets_control = getattr(callback, "sets_control", True)

    # -- events --------------------------------------------------------------------------------------------

    def attach(self, trainer: Any) -> None:
        self._call(trainer, "on_init_end")

    def handlers(self, trainer: Any) -> dict[Event, Callable[..., None]]:
        """Handlers for the events the callback overrides, and for those after which an epoch end may be due."""
        call = self._call
        handlers: dict[Event, Callable[..., None]] = {
            Event.TRAIN_BEGIN: lambda: self._train_begin(trainer),
            Event.EPOCH_BEGIN: lambda epoch: self._epoch_begin(trainer),
            Event.LOG: lambda metrics: self._log(trainer, metrics),
            Event.EVAL_BEGIN: lambda: self._eval_begin(trainer),
            Event.EVAL_END: lambda metrics: self._eval_end(trainer, metrics),
            Event.EPOCH_END: lambda epoch, metrics: self._epoch_end(trainer),
            Event.SAVE: lambda path: self._save(trainer),
            Event.TRAIN_END: lambda: self._train_end(trainer),
        }
        simple: dict[Event, tuple[str, Callable[..., None]]] = {
            Event.STEP_BEGIN: ("on_step_begin", lambda step: call(trainer, "on_step_begin")),
            Event.SUBSTEP_END: ("on_substep_end", lambda step: self._substep_end(trainer)),
            Event.BEFORE_OPTIMIZER_STEP: ("on_pre_optimizer_step", lambda step: call(trainer, "on_pre_optimizer_step")),
            Event.AFTER_OPTIMIZER_STEP: ("on_optimizer_step", lambda step: call(trainer, "on_optimizer_step")),
            Event.STEP_END: ("on_step_end", lambda step, loss: call(trainer, "on_step_end")),
        }
        handlers |= {event: handler for event, (name, handler) in simple.items() if self.overrides(name)}
        if callable(getattr(self.wrapped, "on_error", None)):  # not in transformers; an addition of ours
            handlers[Event.ERROR] = lambda error: call(trainer, "on_error", error=error)
        self.bridge.sync_history(trainer)
        return handlers

    def on_validation_batch_end(self, trainer: Any, done: int, total: int | None) -> None:
        self._call(trainer, "on_prediction_step")

    def _train_begin(self, trainer: Any) -> None:
        self.bridge.begin(trainer)
        self._call(trainer, "on_train_begin")
        self._flush_epoch_end(trainer)  # pending if the checkpoint was saved between the save and the end of the epoch

    def _epoch_begin(self, trainer: Any) -> None:
        self._epoch = trainer.state.epoch
        self._call(trainer, "on_epoch_begin")

    def _substep_end(self, trainer: Any) -> None:
        if self.bridge.is_inside_step(trainer, self):
            self._call(trainer, "on_substep_end")

    def _log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self._note_epoch_end(trainer)
        if _strategy(trainer, "logging_strategy") is IntervalStrategy.EPOCH:
            self._flush_epoch_end(trainer)
        logs = self.bridge.logs_of(trainer, metrics)
        self._call(trainer, "on_log", logs=logs)
        add_new_entries(metrics, logs)

    def _eval_begin(self, trainer: Any) -> None:
        self._note_epoch_end(trainer)
        self.bridge.best_before = self.bridge.best(trainer)
        if _strategy(trainer, "eval_strategy") is IntervalStrategy.EPOCH:
            self._flush_epoch_end(trainer, due="should_evaluate")

    def _eval_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if getattr(trainer, "logs_evaluations", False):
            return
        # In `on_evaluate`, `best_metric` is still that of earlier evaluations: callbacks compare with it.
        self.bridge.shows_previous_best = True
        try:
            logs = self.bridge.logs_of(trainer, metrics)
            self._call(trainer, "on_log", logs=logs)
            self._call(trainer, "on_evaluate", metrics=logs)
        finally:
            self.bridge.shows_previous_best = False

    def _epoch_end(self, trainer: Any) -> None:
        self._note_epoch_end(trainer)
        if not self.bridge.save_follows(trainer) or _strategy(trainer, "save_strategy") is IntervalStrategy.EPOCH:
            self._flush_epoch_end(trainer)

    def _save(self, trainer: Any) -> None:
        self._note_epoch_end(trainer)
        if _strategy(trainer, "save_strategy") is IntervalStrategy.EPOCH:
            self._flush_epoch_end(trainer, due="should_save")
        self._call(trainer, "on_save")
        self._flush_epoch_end(trainer)

    def _train_end(self, trainer: Any) -> None:
        self._note_epoch_end(trainer)
        self._flush_epoch_end(trainer)
        self._call(trainer, "on_log", logs=self.bridge.summary(trainer))
        self._call(trainer, "on_train_end")

    # -- the end of an epoch, dispatched once and in HF's order --------------------------------------------

    def _note_epoch_end(self, trainer: Any) -> None:
        """Called at the first event after the last step of an epoch, or of a run that ends within an epoch."""
        run, planned = trainer.state, trainer.total_steps
        stopped = trainer.control.should_stop and trainer.control.signal is None  # a signal only interrupts the run
        is_over = stopped or (planned is not None and run.step >= planned)
        if self._epoch is not None and (run.epoch > self._epoch or is_over):
            self._epoch = None
            self._epoch_end_pending = True

    def _flush_epoch_end(self, trainer: Any, due: str | None = None) -> None:
        """Dispatch a pending `on_epoch_end`. In HF it comes before what is `due` at the end of an epoch."""
        if self._epoch_end_pending:
            self._epoch_end_pending = False
            if due is not None:
                setattr(trainer.control, due, True)
            self._call(trainer, "on_epoch_end")
            if due is not None:
                setattr(trainer.control, due, False)

    # -- dispatch ------------------------------------------------------------------------------------------

    def overrides(self, name: str) -> bool:
        """Whether the callback handles an event. One with its own `__getattribute__` is assumed to handle all."""
        if name not in self._overridden:
            kind = type(self.wrapped)
            bases = [c for c in kind.__mro__ if c.__name__ == "TrainerCallback"]
            method = getattr(kind, name, None) or getattr(self.wrapped, name, None)
            overridden = method is not None and all(method is not getattr(base, name, None) for base in bases)
            self._overridden[name] = overridden or kind.__getattribute__ is not object.__getattribute__
        return self._overridden[name]

    def _call(self, trainer: Any, name: str, **extra: Any) -> None:
        if self.overrides(name):
            self.bridge.call(trainer, self.wrapped, name, extra)

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the callback, by our protocol or HF's, and whether it has yet to receive an epoch end."""
        own: Any = {}
        if callable(getattr(self.wrapped, "state_dict", None)):
            own = self.wrapped.state_dict()
        elif callable(getattr(self.wrapped, "state", None)):
            own = self.wrapped.state().get("attributes", {})
        return {"own": own, "epoch_end_pending": self._epoch_end_pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch_end_pending = state["epoch_end_pending"]
        if callable(getattr(self.wrapped, "load_state_dict", None)):
            self.wrapped.load_state_dict(state["own"])
        elif callable(getattr(self.wrapped, "state", None)):
            for name, value in state["own"].items():
                setattr(self.wrapped, name, value)


class Bridge:
    """State and control that all HF callbacks of a run share, kept in sync with the run."""

    def __init__(self) -> None:
        self.state = TrainerState()
        self.control = TrainerControl()
        self._synced = 0  # records of the run's history that were translated
        self._logs: tuple[Any, dict[str, Any]] = (None, {})
        self.best_before: tuple[float | None, int | None] = (None, None)  # before the current evaluation
        self._save_due: tuple[int, bool] = (-1, False)
        self.shows_previous_best = False
        self._began = 0.0, 0  # time and step at which the run began
        self._ended = True
        self._substep: tuple[int, dict[int, int]] = (-1, {})

    @classmethod
    def of(cls, shared: dict[str, Any]) -> Bridge:
        """The bridge of a run."""
        return shared.setdefault("huggingface", cls())

    def begin(self, trainer: Any) -> None:
        """Called before the first callback receives `on_train_begin`."""
        if self._ended:
            self._began, self._ended = (time.perf_counter(), trainer.state.step), False
            self._save_due, self._substep = (-1, False), (-1, {})
        self.sync_history(trainer)

    # -- dispatch ------------------------------------------------------------------------------------------

    def call(self, trainer: Any, callback: Any, event: str, extra: dict[str, Any]) -> None:
        """Call one callback, and pass its requests on to the engine's control."""
        self.refresh(trainer)
        control, engine = self.control, trainer.control
        before = {flag: bool(getattr(engine, name)) for flag, name in _FLAGS.items()}
        before |= dict(zip(_STOP_FLAGS, (engine.should_stop, engine.aborted), strict=True))
        for name, value in before.items():
            setattr(control, name, value)
        keywords = {**_keywords(trainer), **extra}
        returned = call_handler(getattr(callback, event), arguments_of(trainer), self.state, control, keywords)
        changed = changed_flags(before, control, returned)
        # Abort wins over stop, and is reported.
        for flag in sorted(changed, key=lambda flag: flag != "should_abort_without_save"):
            if flag in _FLAGS:
                setattr(engine, _FLAGS[flag], not before[flag])
            elif before[flag]:
                engine.cancel_stop()
            else:
                stop = engine.abort if flag == "should_abort_without_save" else engine.stop
                stop(f"it set {flag} in {event}", by=type(callback).__name__)

    # -- state ---------------------------------------------------------------------------------------------

    def refresh(self, trainer: Any) -> None:
        """Update the state to the current position of the run."""
        run, state = trainer.state, self.state
        length = trainer.train_dataloader.batches_per_epoch
        state.global_step, state.raw_epoch = run.step, run.epoch
        state.epoch = run.epoch + (run.batch / length if length else 0.0)
        state.max_steps = trainer.total_steps or -1
        state.num_input_tokens_seen = run.tokens
        state.total_flos = getattr(trainer.task, "flos", 0.0)
        state.best_metric, state.best_global_step = self.best_before if self.shows_previous_best else self.best(trainer)
        state.is_world_process_zero, state.is_local_process_zero = trainer.is_main, trainer.is_local_main
        args = arguments_of(trainer)
        state.epoch_start_step = run.step - run.batch // args.gradient_accumulation_steps
        state.num_train_epochs = self._epochs(trainer, args)
        state.logging_steps, state.eval_steps = args.logging_steps, args.eval_steps or args.logging_steps
        state.save_steps, state.train_batch_size = args.save_steps, args.per_device_train_batch_size

    @staticmethod
    def _epochs(trainer: Any, args: Any) -> int:
        """The number of epochs, the last of which may be partial."""
        batches, planned = trainer.train_dataloader.batches_per_epoch, trainer.total_steps
        if getattr(args, "max_steps", -1) > 0 and batches and planned:
            return math.ceil(planned / math.ceil(batches / args.gradient_accumulation_steps))
        return math.ceil(args.num_train_epochs)

    def best(self, trainer: Any) -> tuple[float | None, int | None]:
        """The best value of the monitored metric, and its step."""
        run, args = trainer.state, arguments_of(trainer)
        if getattr(args, "metric_for_best_model", "loss") is None and not getattr(args, "preserve_best_model", False):
            return None, None
        value = run.best_metrics.get(trainer.monitor_metric)
        return value, (run.best_step if value is not None else None)

    def save_follows(self, trainer: Any) -> bool:
        """Whether a checkpoint was due at the end of the epoch before any callback asked for one there."""
        if self._save_due[0] != trainer.state.step:
            self._save_due = trainer.state.step, trainer.control.should_save and not trainer.control.aborted
        return self._save_due[1]

    def is_inside_step(self, trainer: Any, adapter: object) -> bool:
        """Whether the micro-batch that just ended is not the last one of its step."""
        run, args = trainer.state, arguments_of(trainer)
        length = trainer.train_dataloader.batches_per_epoch
        accumulation = args.gradient_accumulation_steps
        size = accumulation if length is None else min(accumulation, length - run.batch)
        if self._substep[0] != run.step:
            self._substep = run.step, {}
        done = self._substep[1].get(id(adapter), 0) % size + 1  # modulo: a step that is repeated starts from 0
        self._substep[1][id(adapter)] = done
        return done < size

    # -- metrics -------------------------------------------------------------------------------------------

    def sync_history(self, trainer: Any) -> None:
        """Translate the log history of the run; a resumed run has one from the start."""
        run = trainer.state
        if self._synced > run.log_records + 1:  # an earlier state was loaded; 1: a record was skipped in advance
            self._synced = 0
            self.state.log_history.clear()
        new = min(run.log_records - self._synced, len(run.log_history))
        for record in run.log_history[len(run.log_history) - new :]:
            append_record(self.state.log_history, to_hf_metrics(record))
        self._synced = run.log_records

    def skip_record(self) -> None:
        """The next record of the run is not translated: it is in the history already."""
        self._synced += 1

    def logs_of(self, trainer: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics under HF names, as one dict that all callbacks share and may add to. Also added to the history."""
        known, logs = self._logs
        if known is not metrics:
            self.sync_history(trainer)
            self.refresh(trainer)
            logs = {**to_hf_metrics(metrics), "epoch": self.state.epoch}
            if getattr(arguments_of(trainer), "include_num_input_tokens_seen", "no") != "no":
                logs["num_input_tokens_seen"] = trainer.state.tokens
            self._logs = metrics, logs
            history = self.state.log_history
            if not any(name.startswith("eval_") for name in logs):
                self._synced += 1  # the run adds this record to its own history after the callbacks
                append_record(history, {**logs, "step": trainer.state.step})
            elif history:
                history[-1] = {**logs, "step": trainer.state.step}
        return logs

    def summary(self, trainer: Any) -> dict[str, float]:
        """The metrics that are logged at the end of training."""
        self._ended = True
        self.refresh(trainer)
        return {**training_summary(trainer, *self._began), "epoch": self.state.epoch}


def _keywords(trainer: Any) -> dict[str, Any]:
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


def changed_flags(before: Mapping[str, bool], control: Any, returned: Any) -> list[str]:
    """Flags that a callback changed, in the control it received or in the one it returned."""
    controls = [control] if returned is None else [control, returned]
    return [name for name, value in before.items() if any(bool(getattr(c, name, value)) != value for c in controls)]


def add_new_entries(metrics: dict[str, Any], logs: Mapping[str, Any]) -> None:
    """Add entries of `logs`, which has HF names, that are not in `metrics` under our names."""
    known = {to_hf_name(name) for name in metrics} | {"epoch"}
    metrics.update({name: value for name, value in logs.items() if name not in known})


def training_summary(trainer: Any, began: float, first_step: int) -> dict[str, float]:
    """HF's metrics of a whole run: duration, throughput and mean loss."""
    run = trainer.state
    seconds = max(time.perf_counter() - began, 1e-9)
    steps = run.step - first_step
    samples = run.samples * steps / run.step if run.step else 0
    return {
        "train_runtime": seconds,
        "train_samples_per_second": samples / seconds,
        "train_steps_per_second": steps / seconds,
        "total_flos": getattr(trainer.task, "flos", 0.0),
        "train_loss": run.loss_sum / run.loss_steps if run.loss_steps else 0.0,
    }


def to_hf_name(name: str) -> str:
    """The name of one of our metrics in HF logs.

    >>> [to_hf_name(n) for n in ("train/loss", "train/lr", "val/accuracy", "step")]
    ['loss', 'learning_rate', 'eval_accuracy', 'step']
    """
    if name == "train/lr":
        return "learning_rate"
    if name.startswith("val/"):
        return f"eval_{name.removeprefix('val/')}"
    return name.removeprefix("train/")


def to_hf_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics under HF names, without those that HF does not log."""
    return {to_hf_name(name): value for name, value in metrics.items() if name not in _NOT_IN_HF}


def from_hf_name(name: str) -> str:
    """The name of a metric of HF logs in our logs.

    >>> [from_hf_name(n) for n in ("loss", "eval_accuracy", "my/metric")]
    ['train/loss', 'val/accuracy', 'my/metric']
    """
    if name.startswith("eval_"):
        return f"val/{name.removeprefix('eval_')}"
    if "/" in name or name.startswith(("test_", "train_")):
        return name
    return "train/lr" if name == "learning_rate" else f"train/{name}"


def _strategy(trainer: Any, name: str) -> IntervalStrategy:
    chosen = getattr(arguments_of(trainer), name)
    value = str(getattr(chosen, "value", chosen))
    if value == "best":  # saved after an evaluation
        return _strategy(trainer, "eval_strategy")
    return IntervalStrategy(value)
