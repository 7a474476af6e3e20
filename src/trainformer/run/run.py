"""One run: how engine, backend, data, callbacks, loggers and checkpoints work together, whatever computes the steps.

Owns the course of a run around the loop: its folder, its loggers, going on from checkpoints, signals, requests from
outside, and how it ends. It decides nothing about training: when things happen is the loop's business, how a step is
computed the backend's, and what there is to train is said by the sessions that are made of this (`session.torch`,
`session.jax`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trainformer.callbacks.base import CallbackList
from trainformer.checkpointing import Checkpoint, CheckpointStore, Manifest, StateComponent
from trainformer.checkpointing.checkpointer import (
    Assets,
    Checkpointer,
    load_components,
    read_checkpoint,
    read_states,
    versions,
)
from trainformer.checkpointing.state_files import StateFiles
from trainformer.context import PipelineContext
from trainformer.engine import Control, Event, EventBus, Loop, RunState
from trainformer.engine.process_group import ProcessGroup
from trainformer.engine.protocols import Source
from trainformer.loggers.base import BaseLogger, MultiLogger, NoOpLogger
from trainformer.loggers.registry import make_loggers
from trainformer.run.announcing import announce_start, announce_stop
from trainformer.run.batches import Batches
from trainformer.run.console import messages_on
from trainformer.run.context import callbacks_from_around
from trainformer.run.folder import NoFolder, RunFolder
from trainformer.run.habits import FrontOptions
from trainformer.run.listeners import connect_listeners
from trainformer.run.live_control import LiveControl
from trainformer.run.meeting import choose_folder
from trainformer.run.memory import resident_gb
from trainformer.run.plans import plan, retention, why_saved
from trainformer.run.provenance import fingerprint, record_changes
from trainformer.run.records import RunRecords
from trainformer.run.settings import CommonSettings
from trainformer.run.signals import leave, obeying_signals

logger = logging.getLogger("trainformer")


class Run(ABC):
    """One run. `owner` is what callbacks get as `trainer`; `passed` are the settings the user named.

    A subclass sets, before the run begins, what there is to train: `backend`, `files`, `train_source`, `val_source`
    and `train_size`.
    """

    backend: Any
    files: StateFiles
    train_source: Source
    val_source: Source | None
    train_size: int | None

    def __init__(
        self,
        owner: Any,
        settings: CommonSettings,
        *,
        data: Any,
        process_group: ProcessGroup,
        callbacks: CallbackList,
        passed: frozenset[str] = frozenset(),
        console: Console | None = None,
        habits: FrontOptions | None = None,
    ) -> None:
        self.owner = owner
        self.owner_data = data
        self.settings: Any = settings
        self.process_group: Any = process_group
        self.passed = passed
        self.habits = habits or FrontOptions()
        self.state = RunState()
        self.control = Control()
        self.bus = EventBus()
        self.context = PipelineContext()
        self.console = console or Console()
        self.callbacks = callbacks
        self.loggers: BaseLogger = NoOpLogger()
        self._logger_state: dict[str, Any] = {}
        self.folder: RunFolder | NoFolder | None = None
        self._checkpointer: Checkpointer | None = None
        self._loop: Loop | None = None
        self._last_metrics: dict[str, float] = {}
        self._worth_keeping_at = -1
        self.records = RunRecords(self)
        self._live = LiveControl(self)

    # -- what a session says of itself -----------------------------------------------------------------------

    @property
    @abstractmethod
    def title(self) -> str:
        """What is trained, in one word: a folder without a name is named after it."""

    @abstractmethod
    def describe(self) -> str:
        """What is trained, on what, in which precision, and how large it is."""

    @abstractmethod
    def model_shapes(self) -> Any:
        """The shapes of all parameters by name."""

    @abstractmethod
    def components(self) -> list[StateComponent]:
        """Everything needed to go on exactly from here, in parts."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of the validation data, which there are."""

    @abstractmethod
    def record_derived(self) -> None:
        """Enter into the config what follows from the settings."""

    def assets(self) -> Assets | None:
        """What writes the files that belong beside the weights, if there are any."""
        return None

    def own_listeners(self) -> dict[Event, Any]:
        """What this session itself does on hearing of events, before any callback."""
        return {}

    def place(self) -> dict[str, Any]:
        """On which `device` it runs, and in which `precision`."""
        return {"device": None, "precision": self.settings.precision}

    def fault_counters(self) -> dict[str, int]:
        """Steps `skipped` so far, and `pieces` that batches are cut into, as far as is known without waiting."""
        return {}

    def memory_gb(self) -> float | None:
        """Peak memory of the device so far, or what the process holds where it has none of its own."""
        return resident_gb()

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """What there is to record of the latest evaluation besides its metrics, by kind."""
        return {}

    # -- who hears of it -------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Subscribe task, callbacks and context. The owner calls this once, when it can answer callbacks."""
        for callback in callbacks_from_around(self):
            self.callbacks.add(callback)
        for callback in self.callbacks:
            self._attach(callback)
        connect_listeners(self)

    def _attach(self, callback: Any) -> None:
        if hasattr(callback, "attach"):
            callback.attach(self.owner)

    def add_callback(self, callback: Any) -> None:
        """One more callback, after the others; also while the run goes on."""
        self._attach(self.callbacks.add(callback))
        connect_listeners(self)

    def remove_callback(self, callback: Any) -> Any:
        """Take out a callback, or the first of a class; what was taken out, if there was one."""
        removed = self.callbacks.remove(callback)
        connect_listeners(self)
        return removed

    @property
    def is_running(self) -> bool:
        """Whether the loop is at work."""
        return self._loop is not None

    # -- how long ------------------------------------------------------------------------------------------

    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch; the last window may hold fewer micro-batches."""
        batches = self.train_source.batches_per_epoch
        return None if batches is None else -(-batches // self.settings.accumulation_steps)

    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, where that is known."""
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        steps = self.steps_per_epoch()
        return None if steps is None else steps * self.settings.epochs

    # -- its batches -----------------------------------------------------------------------------------------

    def train_batches(self) -> Batches:
        """The batches of the training data, as a loader."""
        return Batches(self.train_source, self.settings.batch_size)

    def val_batches(self) -> Batches | None:
        """Those of the validation data, if there are any."""
        size = self.settings.eval_batch_size or self.settings.batch_size
        return None if self.val_source is None else Batches(self.val_source, size)

    # -- training ------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train from where the state is to the end of the plan."""
        settings = self.settings
        settings.validate()
        self.control.reset()
        if self.folder is not None:
            self.state.stopped = []  # called again on purpose: whoever stopped it then does not stop it now
        folder = self.folder or choose_folder(self)
        with ExitStack() as stack:
            stack.enter_context(folder.log_file())
            shown = self.habits.shows_messages or "console" in _as_list(settings.log)
            stack.enter_context(messages_on(self.console, wanted=shown and self.process_group.is_main))
            stack.enter_context(self.process_group.watching(settings.rank_timeout))
            if self.folder is None:
                self._prepare(folder)
                self.folder = folder
            self.backend.schedule_for(self.total_steps())
            record_changes(self)
            stack.enter_context(folder.recording(self.context.config))
            stack.enter_context(self.backend.run_context())
            stack.enter_context(self._live.serving(folder, self._checkpointer, self.outcome))
            stack.enter_context(folder.status(self.outcome))
            stack.enter_context(self.records.keeping(folder))
            stack.enter_context(self._logging())
            stack.enter_context(obeying_signals(self.control, self.habits.signals))
            if self.state.stopped:
                self.control.stop(self.state.stopped[1], by=self.state.stopped[0])
            announce_start(self)
            stack.enter_context(self._failing_loudly())
            self._loop = self._make_loop()
            self.backend.asks = self._loop.agreement.has_requests
            self._loop.run()
            if self._checkpointer is not None:
                self._checkpointer.conclude()
        self._leave()

    def _prepare(self, folder: RunFolder | NoFolder) -> None:
        """On the first call: what the run needs beside its folder, and its old state if there is one to resume."""
        settings = self.settings
        if isinstance(folder, NoFolder):
            self.loggers = MultiLogger([logger for logger in _as_list(settings.log) if isinstance(logger, BaseLogger)])
            return
        self._checkpointer = Checkpointer(
            folder.checkpoints,
            retention(settings),
            settings.save_async,
            self.habits.checkpoint_name,
            files=self.files,
            process_group=self.process_group,
            timeout=settings.rank_timeout,
        )
        if self.process_group.is_main:
            self._checkpointer.store.clean()
            self.loggers = make_loggers(
                settings.log, project=settings.project, name=settings.name, run_dir=folder.path, console=self.console
            )
        self.loggers.load_state_dict(self._logger_state)  # of a checkpoint that was loaded before the run began
        self.backend.schedule_for(self.total_steps())
        folder.fingerprint = fingerprint(self)
        if self.state.step == 0:
            self._resume(self._checkpointer.store, folder)
        if self.process_group.is_main:
            # Checkpoints after this step belong to a run that was given up; they would pass for the newest.
            self._checkpointer.store.set_aside(after=self.state.step)
            self._checkpointer.tidy()  # the run before may have been killed between a save and this

    def _resume(self, store: CheckpointStore, folder: RunFolder) -> None:
        if self.settings.resume is None:
            return
        own = self._newest_of(store, folder)
        if own is not None:
            # What was named for the start counts at the start only: a run that goes on has everything it needs.
            only = self.settings.load_components if self.settings.resume == "auto" else None
            load_components(self.components(), read_checkpoint(own, self.files, self.process_group.rank), only)
            self.records.went_on_from = str(own.path)
            logger.info("going on from %s (step %d); pass resume=None to begin anew", own.path, self.state.step)
        elif self.settings.resume != "auto":
            self.load(Path(self.settings.resume), self.settings.load_components)

    def _newest_of(self, store: CheckpointStore, folder: RunFolder) -> Checkpoint | None:
        """The newest valid checkpoint of this very run. Rank 0 looks: all must take the same one."""
        found = None
        if self.process_group.is_main and (self.settings.resume == "auto" or folder.was_cut_short()):
            found = store.newest()
        path = self.process_group.broadcast(None if found is None else str(found.path))
        return found if path is None or found is not None else Checkpoint(Path(path), Manifest.read(Path(path)))

    def _make_loop(self) -> Loop:
        return Loop(
            replace(plan(self.settings, evaluates=self.val_source is not None), **self.habits.plan),
            self.state,
            backend=self.backend,
            source=self.train_source,
            bus=self.bus,
            control=self.control,
            services=self,
            process_group=self.process_group,
        )

    @contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        """Around the loop: tell callbacks of an error, say who stopped the run."""
        try:
            yield
        except BaseException as error:
            self.backend.drop_step()
            self.bus.emit(Event.ERROR, error)
            raise
        finally:
            self._loop = None
        announce_stop(self)

    def _leave(self) -> None:
        """After a signal the program ends here, with everything saved and closed."""
        number = self.control.ending_signal
        if number is not None and self.settings.exit_on_signal:
            leave(number, self.habits.signals)

    def outcome(self) -> str:
        """How the run has ended, in a word; asked when it did not fail."""
        if self.control.ending_signal is not None:
            return "interrupted"
        if self.control.aborted:
            return "aborted"
        return "stopped" if self.control.should_stop else "finished"

    @contextmanager
    def _logging(self) -> Iterator[None]:
        """Loggers are open inside; a run that goes on continues its old records."""
        if self.state.step > 0:
            self.loggers.load_state_dict(self.loggers.state_dict())
        # Also at step 0: a run that was killed before its first checkpoint begins again, its old records do not count.
        self.loggers.continue_from(self.state.step)
        self.loggers.init(self.context.config.to_wandb_config())
        try:
            yield
        except KeyboardInterrupt:
            self.loggers.finish("interrupted")
            raise
        except BaseException:
            self.loggers.finish("failed")
            raise
        self.loggers.finish(self.outcome())

    # -- what the loop asks for ----------------------------------------------------------------------------

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the loggers; a training record also has memory, and how long saves have blocked the loop."""
        if "train/loss" in metrics:
            checkpointer, memory = self._checkpointer, self.memory_gb()
            if memory is not None:
                metrics["train/memory_gb"] = memory
            if checkpointer is not None and checkpointer.blocked:
                metrics["train/save_seconds"], checkpointer.blocked = checkpointer.blocked, 0.0
            self.records.notice(metrics["train/loss"])
        self.loggers.log(metrics, step)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data."""
        if self.val_source is None:
            logger.warning("an evaluation was asked for, but there is no validation data")
            return {}
        metrics = self.validate()
        for kind, content in self.evaluation_records().items():  # at once: a callback may evaluate something else
            self.records.add(kind, content)
        for callback in self.callbacks:
            if hasattr(callback, "measure"):
                metrics |= callback.measure(self.owner, metrics) or {}
        self._last_metrics = metrics
        return metrics

    def poll(self) -> None:
        """Report a save that failed in the background; answer those whose requests are done."""
        if self.settings.save_async and self._checkpointer is not None:
            self._checkpointer.poll()
        if self._live.waiting:
            self._live.settle()

    def has_requests(self) -> bool:
        """Whether somebody asks something of the run from outside."""
        return self._live.has_requests()

    def take_requests(self) -> list[Any]:
        """What was asked for."""
        return self._live.take()

    def carry_out(self, requests: list[Any]) -> None:
        """Enter it into the control."""
        self._live.carry_out(requests)

    def worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is among the best."""
        checkpointer = self._checkpointer
        if (
            checkpointer is None or not self.process_group.is_main
        ):  # who looks at the folder at another time finds another one
            return False
        is_worth = checkpointer.is_worth_keeping(metrics)
        if is_worth:
            self._worth_keeping_at = self.state.step
        return is_worth

    def save(self) -> str | None:
        """Write a checkpoint into the run folder."""
        if self._checkpointer is None:
            return None
        self.loggers.flush()
        state = self.state
        before, state.saved_at = state.saved_at, state.step
        manifest = Manifest(
            step=state.step,
            epoch=state.epoch,
            components={},
            metrics=self._last_metrics if state.evaluated_at == state.step else {},
            versions=versions(self.files),
            world_size=self.process_group.world_size,
        )
        path = self._checkpointer.store.path_of(state.step)
        if not self._checkpointer.save(self.components(), manifest, self.assets(), self.records.expect_save(path.name)):
            state.saved_at = before
            return None
        return str(path)

    def why_saved(self) -> str | None:
        """Why a checkpoint is written at this step."""
        is_best = self._worth_keeping_at == self.state.step
        return None if self._loop is None else why_saved(self._loop.plan, self.state, self.control, is_best)

    # -- state ---------------------------------------------------------------------------------------------

    def take_logger_state(self, state: dict[str, Any]) -> None:
        """Where the loggers of a loaded run were; kept for those that do not exist yet."""
        self._logger_state = state
        self.loggers.load_state_dict(state)

    def run_state(self) -> dict[str, Any]:
        """Where the run is, with what the next log record is to be made of."""
        pending = self._loop.pending_values() if self._loop is not None else []
        control = self.control
        # A signal ends the process; a callback ends the run, also for the next process with the same command.
        ended = control.should_stop and control.signal is None
        stopped = [control.stopped_by, control.stop_reason] if ended else []
        return {**self.state.state_dict(), "pending": pending, "stopped": stopped}

    def load(self, path: Path, only: Collection[str] | None = None) -> None:
        """Go on from a file, a checkpoint's folder, or a run's folder (its newest checkpoint)."""
        load_components(self.components(), read_states(path, self.files, self.process_group.rank), only)
        self.state.stopped = []  # loaded on purpose, to go on
        self.records.went_on_from = str(path)
        logger.info("going on from %s (step %d)", path, self.state.step)

    def stop(self, reason: str) -> None:
        """End training after this step; whoever is being called is named as the one who asked."""
        self.control.stop(reason, by=self.bus.speaker or "the caller")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
