"""One run: its parts, and what the loop triggers: logging, evaluation, checkpoints.

`Run` decides nothing about training: the loop decides when things happen and the backend how a step is computed.
`run.fit` leads it from start to end. What is trained is up to the subclasses, `TorchRun` and `JaxRun`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trainformer.callbacks.base import handlers_of
from trainformer.checkpointing import Checkpoint, StateComponent
from trainformer.checkpointing.checkpointer import Assets, Checkpointer, load_components, read_states
from trainformer.context import PipelineContext
from trainformer.engine import Control, DataSource, Event, EventBus, Loop, RunState
from trainformer.loggers.base import BaseLogger, NoOpLogger
from trainformer.run.context import current_context
from trainformer.run.devices import RunDevices
from trainformer.run.failed_evaluation import saved_if_it_fails
from trainformer.run.folder import NoFolder, RunFolder
from trainformer.run.live_control import LiveControl
from trainformer.run.logging import RunRecords
from trainformer.run.setup import RunParts

logger = logging.getLogger("trainformer")


class Run(RunDevices, ABC):
    """One run, built from its parts. `owner` is the trainer that callbacks receive."""

    def __init__(self, owner: Any, parts: RunParts) -> None:
        self.owner = owner
        self.parts = parts
        self.settings = parts.settings
        self.options = parts.options
        self.process_group = parts.process_group
        self.backend = parts.backend
        self.files = parts.files
        self.callbacks = parts.callbacks
        self.train_source = parts.train_source
        self.val_sources = parts.val_sources
        self.evaluated_sets: tuple[str, ...] = ()  # of the current or latest evaluation
        self.train_size = parts.train_size
        self.passed = parts.passed
        self.console = parts.console
        self.state = RunState()
        self.control = Control()
        self.bus = EventBus()
        self.context = PipelineContext()
        self.loggers: BaseLogger = NoOpLogger()
        self.folder: RunFolder | NoFolder | None = None
        self.checkpointer: Checkpointer | None = None
        self.loop: Loop | None = None
        self.records = RunRecords(self)
        self.live_control = LiveControl(self)
        self.logger_state: dict[str, Any] = {}
        self._last_metrics: dict[str, float] = {}
        self.best_at_step = -1
        self.backend.schedule_for(self.total_steps())
        self.record_config()

    # -- what subclasses provide -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def title(self) -> str:
        """What is trained, in one word: the default name of the run folder starts with it."""

    @abstractmethod
    def describe(self) -> str:
        """What is trained, on which device, in which precision, and how large it is."""

    @abstractmethod
    def model_shapes(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of all parameters."""

    @abstractmethod
    def components(self) -> list[StateComponent]:
        """Everything needed to resume exactly."""

    @abstractmethod
    def validate(self, name: str) -> dict[str, float]:
        """Metrics on the validation set of this name, named ``val/...``."""

    @abstractmethod
    def record_config(self) -> None:
        """Record the configuration and where each value came from."""

    @abstractmethod
    def record_derived(self) -> None:
        """Record what follows from the settings."""

    def assets(self) -> Assets | None:
        """A function that writes files beside the weights of a checkpoint, if there are any."""
        return None

    def check_monitored(self) -> None:
        """Raise if something is monitored that no evaluation will have."""

    def backend_handlers(self) -> dict[Event, Any]:
        """Event handlers of the backend; they run first."""
        return {}

    def task_handlers(self) -> dict[Event, Any]:
        """Event handlers of what is trained; they run before any callback."""
        return {}

    def device_info(self) -> dict[str, Any]:
        """The `device` and the `precision` of the run."""
        return {"device": None, "precision": None}

    def fault_counters(self) -> dict[str, int]:
        """Steps `skipped` so far, and `pieces` that batches are split into, as far as known without a sync."""
        return {}

    def check_launch(self) -> None:
        """Raise if the run cannot train as it was started: its processes not together, or too few steps for a part."""

    def newest_checkpoint(self, checkpointer: Checkpointer) -> Checkpoint | None:
        """The checkpoint to resume from, if there is one."""
        return checkpointer.newest()

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """What to record about the latest evaluation besides its metrics, by kind."""
        return {}

    # -- callbacks ---------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Attach the callbacks and subscribe all listeners. The owner calls this once it can answer callbacks."""
        context = current_context()
        for callback in [] if context is None else context.callbacks_for(self):
            self.callbacks.add(callback)
        for callback in self.callbacks:
            self._attach(callback)
        self._subscribe()

    def _attach(self, callback: Any) -> None:
        if hasattr(callback, "attach"):
            callback.attach(self.owner)

    def _subscribe(self) -> None:
        """In this order: the backend, the task, callbacks, records, context."""
        bus, context = self.bus, self.context
        bus.clear()
        bus.add("backend", self.backend_handlers(), makes_requests=False)
        bus.add(self.title, self.task_handlers(), makes_requests=False)
        for name, callback in self.callbacks.named().items():
            bus.add(name, handlers_of(callback, self.owner), makes_requests=getattr(callback, "sets_control", True))
        bus.add("records", self.records.handlers(), makes_requests=False)
        steps = {
            Event.STEP_END: lambda step, loss: context.on_step_end(),
            Event.EPOCH_END: lambda epoch, metrics: context.on_epoch_end(),
        }
        bus.add("context", steps, makes_requests=False)

    def add_callback(self, callback: Any) -> None:
        """Add a callback after the others; also during the run."""
        self._attach(self.callbacks.add(callback))
        self._subscribe()

    def remove_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class; returns it, if there was one."""
        removed = self.callbacks.remove(callback)
        self._subscribe()
        return removed

    # -- length ------------------------------------------------------------------------------------------------

    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch; the last one may accumulate fewer micro-batches."""
        batches = self.train_source.batches_per_epoch
        return None if batches is None else -(-batches // self.settings.accumulation_steps)

    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, if known."""
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        steps = self.steps_per_epoch()
        return None if steps is None else steps * self.settings.epochs

    def outcome(self) -> str:
        """How the run ended, if it did not fail."""
        if self.control.ending_signal is not None:
            return "interrupted"
        if self.control.aborted:
            return "aborted"
        return "stopped" if self.control.should_stop else "finished"

    # -- services of the loop ----------------------------------------------------------------------------------

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Pass metrics to the loggers; training records also get memory and the time that saves blocked the loop."""
        if "train/loss" in metrics:
            checkpointer, memory = self.checkpointer, self.memory_gb()
            if memory is not None:
                metrics["train/memory_gb"] = memory
            if checkpointer is not None and checkpointer.blocked_seconds:
                metrics["train/save_seconds"], checkpointer.blocked_seconds = checkpointer.blocked_seconds, 0.0
            self.records.check_faults(metrics["train/loss"])
        self.loggers.log(metrics, step)

    @property
    def val_source(self) -> DataSource | None:
        """The validation batches, of the first set if there are several."""
        return next(iter(self.val_sources.values()), None)

    @property
    def val_sets(self) -> tuple[str, ...]:
        """The names of the validation sets, if they have names."""
        return tuple(name for name in self.val_sources if name)

    def evaluate(self, names: Sequence[str] = ()) -> dict[str, float]:
        """Evaluate on the validation data, or on the sets of these names."""
        if not self.val_sources:
            logger.warning("an evaluation was requested, but there is no validation data")
            return {}
        with saved_if_it_fails(self):
            metrics: dict[str, float] = {}
            for name in names or self.val_sources:
                metrics |= self.validate(name)
                for kind, content in self.evaluation_records().items():  # at once: the next set has records of its own
                    self.records.add(kind, {**content, "key": name} if name else content)
            return self.add_callback_metrics(metrics, names)

    def add_callback_metrics(self, metrics: dict[str, float], names: Sequence[str] = ()) -> dict[str, float]:
        """The metrics of an evaluation, with those that callbacks compute."""
        self.evaluated_sets = tuple(names) or self.val_sets
        metrics = self.callbacks.compute_metrics(self.owner, metrics)
        self._last_metrics = metrics
        return metrics

    def poll(self) -> None:
        """Report a save that failed in the background; answer live requests that are done."""
        if self.settings.save_async and self.checkpointer is not None:
            self.checkpointer.poll()
        if self.live_control.waiting:
            self.live_control.answer_finished()

    def has_requests(self) -> bool:
        return self.live_control.has_requests()

    def take_requests(self) -> list[Any]:
        return self.live_control.take()

    def apply_requests(self, requests: list[Any]) -> None:
        self.live_control.apply_requests(requests)

    def is_worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is among the best. Rank 0 decides: ranks may see the folder at different times."""
        if self.checkpointer is None or not self.process_group.is_main:
            return False
        kept = self.checkpointer.store.checkpoints()
        is_best = self.checkpointer.retention.is_worth_keeping(metrics, kept)
        if is_best:
            self.best_at_step = self.state.step
        return is_best

    def save(self) -> str | None:
        """Write a checkpoint to the run folder."""
        if self.checkpointer is None:
            return None
        self.loggers.flush()
        state = self.state
        previous, state.saved_at = state.saved_at, state.step
        metrics = self._last_metrics if state.evaluated_at == state.step else {}
        on_written = self.records.begin_save(self.checkpointer.store.path_of(state.step).name)
        path = self.checkpointer.save(state.step, state.epoch, metrics, on_written)
        if path is None:
            state.saved_at = previous
        return None if path is None else str(path)

    # -- state -------------------------------------------------------------------------------------------------

    def load(self, path: Path, only: Collection[str] | None = None) -> None:
        """Load a file, a checkpoint folder, or a run folder (its newest checkpoint)."""
        states = read_states(path, self.files, self.process_group.rank, self.options.skips_deleted)
        self.load_states(self.components(), states, path, only)

    def load_states(
        self, components: Sequence[StateComponent], states: dict[str, Any], path: Path, only: Collection[str] | None
    ) -> None:
        """Load states that were read from a path."""
        load_components(components, states, only)
        self.state.stopped = []  # loaded on purpose, to continue
        self.records.resumed_from = str(path)
        logger.info("loaded %s (step %d)", path, self.state.step)

    def stop(self, reason: str) -> None:
        """Stop training after this step; the current listener is reported as the one who stopped it."""
        self.control.stop(reason, by=self.bus.current_listener or "the caller")
