"""A session wires everything together for one run: task, data, backend, engine, callbacks, loggers, checkpoints.

Every way into the library makes one of these. It decides nothing about training: when things happen is the loop's
business, how a step is computed the backend's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from trainformer.backends.torch import TorchBackend
from trainformer.backends.torch.distribution import make_strategy
from trainformer.backends.torch.state_trees import cloned, gathered
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.ema import EMA
from trainformer.context import PipelineContext
from trainformer.engine import Control, Event, EventBus, Loop, RunState
from trainformer.engine.checkpoint import Checkpoint, CheckpointStore, Manifest, SharingPattern, StateComponent
from trainformer.loggers.base import BaseLogger, NoOpLogger
from trainformer.loggers.multi import MultiLogger
from trainformer.loggers.registry import make_loggers
from trainformer.session.announcing import announce_start, announce_stop
from trainformer.session.checkpoints import Checkpointer, give_back, read_checkpoint, read_states, versions
from trainformer.session.components import TRAINED, state_components
from trainformer.session.console import messages_on
from trainformer.session.data import Batches, load_training_data, make_source, size_of
from trainformer.session.evaluation import Evaluation
from trainformer.session.folder import NoFolder, RunFolder
from trainformer.session.habits import Habits
from trainformer.session.inference import Inference
from trainformer.session.listeners import connect_listeners
from trainformer.session.live_control import LiveControl
from trainformer.session.meeting import choose_folder, refuse_to_part
from trainformer.session.parts import load_options, plan, retention, torch_settings
from trainformer.session.probe import Probe
from trainformer.session.provenance import declared_arguments, fingerprint, record_changes, record_config
from trainformer.session.settings import RunSettings
from trainformer.session.signals import leave, obeying_signals
from trainformer.session.snapshot import write_snapshot
from trainformer.session.suiting import can_be_indexed, check_task, suit_to_loader, suit_to_task, without_vain_sampler
from trainformer.tasks.base import provides
from trainformer.utils.helpers import seed_everything

logger = logging.getLogger("trainformer")


class Session:
    """One run. `owner` is what callbacks get as `trainer`; `passed` are the settings the user named."""

    def __init__(
        self,
        owner: Any,
        task: Any,
        settings: RunSettings,
        *,
        data: Any,
        val_data: Any = None,
        val_split: float | int | None = None,
        callbacks: CallbackList,
        passed: frozenset[str] = frozenset(),
        console: Console | None = None,
        habits: Habits | None = None,
    ) -> None:
        settings.validate()
        make_loggers(settings.log, project=settings.project, name=settings.name, run_dir=Path("runs"))  # known names?
        strategy = make_strategy(settings.strategy)
        strategy.join(settings.device, settings.rank_timeout)
        self.ranks = strategy.ranks
        seed_everything(settings.seed, deterministic=False)
        self.owner = owner
        self.owner_data = data
        self.task = task
        self.settings = settings
        self.passed = passed
        self.habits = habits or Habits()
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
        self._live = LiveControl(self)

        check_task(task)
        suited = suit_to_loader(settings, data, passed) | suit_to_task(settings, task, passed)
        if settings.ema is not None and not any(isinstance(callback, EMA) for callback in callbacks):
            callbacks.add(EMA(decay=settings.ema))
        with self.ranks.main_first():  # what it reads and caches is there for the others
            loaded = load_training_data(task, data, val_data, val_split, settings.seed)
        self.info = loaded.info
        # Settings that follow from task or data, where the user chose none.
        self.suited = without_vain_sampler(settings, suited, loaded.train)
        self.declared = declared_arguments(task)
        if provides(task, "look_at") and can_be_indexed(loaded.train):
            task.look_at(loaded.train)
        if provides(task, "configure"):
            task.configure(loaded.info)
        self.backend = TorchBackend(task, torch_settings(settings), provides(task, "on_eval_end"), strategy)
        options = load_options(settings, self.backend.device, self.ranks)
        with self.ranks.main_first():
            self.train_source = make_source(task, loaded.train, options, train=True)
            inference = Inference(owner, task, self.backend, callbacks, settings.seed)
            self._evaluation = Evaluation(inference, settings, loaded)
        if not self.ranks.is_alone:  # until here all ranks have drawn the same numbers: they have the same weights
            seed_everything(settings.seed + 1 + strategy.random_stream, deterministic=False)
        self.val_source = self._evaluation.val_source
        self.labels_comparable = loaded.comparable
        self.train_size = size_of(getattr(self.train_source, "dataset", loaded.train))
        self.backend.schedule_for(self.total_steps())
        record_config(self)

    def connect(self) -> None:
        """Subscribe task, callbacks and context. The owner calls this once, when it can answer callbacks."""
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

    # -- training ------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train from where the state is to the end of the plan."""
        settings = self.settings
        settings.validate()
        refuse_to_part(self.backend.strategy)
        self.control.reset()
        if self.folder is not None:
            self.state.stopped = []  # called again on purpose: whoever stopped it then does not stop it now
        folder = self.folder or choose_folder(self)
        with ExitStack() as stack:
            stack.enter_context(folder.log_file())
            shown = self.habits.shows_messages or "console" in _as_list(settings.log)
            stack.enter_context(messages_on(self.console, wanted=shown and self.ranks.is_main))
            stack.enter_context(self.ranks.watching(settings.rank_timeout))
            if self.folder is None:
                self._prepare(folder)
                self.folder = folder
            self.backend.schedule_for(self.total_steps())
            record_changes(self)
            stack.enter_context(folder.recording(self.context.config))
            stack.enter_context(self.backend.run_context())
            stack.enter_context(self._live.serving(folder, self._checkpointer, self._outcome))
            stack.enter_context(folder.status(self._outcome))
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
            ranks=self.ranks,
            timeout=settings.rank_timeout,
        )
        if self.ranks.is_main:
            self._checkpointer.store.clean()
            self.loggers = make_loggers(
                settings.log, project=settings.project, name=settings.name, run_dir=folder.path, console=self.console
            )
        self.loggers.load_state_dict(self._logger_state)  # of a checkpoint that was loaded before the run began
        self.backend.schedule_for(self.total_steps())
        folder.fingerprint = fingerprint(self)
        if self.state.step == 0:
            self._resume(self._checkpointer.store, folder)
        if self.ranks.is_main:
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
            give_back(self.components(), read_checkpoint(own, rank=self.ranks.rank), only)
            logger.info("going on from %s (step %d); pass resume=None to begin anew", own.path, self.state.step)
        elif self.settings.resume != "auto":
            self.load(Path(self.settings.resume), self.settings.load_components)

    def _newest_of(self, store: CheckpointStore, folder: RunFolder) -> Checkpoint | None:
        """The newest valid checkpoint of this very run. Rank 0 looks: all must take the same one."""
        found = None
        if self.ranks.is_main and (self.settings.resume == "auto" or folder.was_cut_short()):
            found = store.newest()
        path = self.ranks.from_main(None if found is None else str(found.path))
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
            peers=self.ranks,
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

    def _outcome(self) -> str:
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
        self.loggers.finish(self._outcome())

    # -- what the loop asks for ----------------------------------------------------------------------------

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the loggers; a training record also says how long saves have blocked the loop since."""
        checkpointer = self._checkpointer
        if checkpointer is not None and checkpointer.blocked and "train/loss" in metrics:
            metrics["train/save_seconds"], checkpointer.blocked = checkpointer.blocked, 0.0
        self.loggers.log(metrics, step)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data."""
        if self.val_source is None:
            logger.warning("an evaluation was asked for, but there is no validation data")
            return {}
        metrics = self._evaluation.validate()
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
        if checkpointer is None or not self.ranks.is_main:  # who looks at the folder at another time finds another one
            return False
        return checkpointer.is_worth_keeping(metrics)

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
            versions=versions(),
            world_size=self.ranks.world,
        )
        on_device = self.backend.device.type != "cpu"
        assets = self.task.save_assets if provides(self.task, "save_assets") else None
        if not self._checkpointer.save(self.components(), manifest, on_device, assets):
            state.saved_at = before
            return None
        return str(self._checkpointer.store.path_of(state.step))

    # -- evaluation and prediction -------------------------------------------------------------------------

    def evaluate_on(self, data: Any = None, batch_size: int | None = None, most: int | None = None) -> dict[str, float]:
        """Evaluate on the validation data, or on other data; on the first `most` batches, if that is given."""
        return self._evaluation.evaluate(data, batch_size, most)

    def train_batches(self) -> Batches:
        """The batches of the training data, as a loader."""
        return Batches(self.train_source, self.settings.batch_size)

    def val_batches(self) -> Batches | None:
        """Those of the validation data, if there are any."""
        size = self.settings.eval_batch_size or self.settings.batch_size
        return None if self.val_source is None else Batches(self.val_source, size)

    def evaluate_trained(self) -> dict[str, float]:
        """Evaluate the weights that are trained, also where a callback offers others (an average) for evaluation."""
        return self._evaluation.validate(model=self.task.model)

    def evaluate_first_batches(self, most: int) -> dict[str, float]:
        """The metrics of a few validation batches, to see which there are."""
        return self._evaluation.validate(most)

    def embed(self, data: Any = "val", most: int | None = None) -> dict[str, torch.Tensor]:
        """Embeddings (and labels) of data: "train", "val", or anything that can be predicted for."""
        return self._evaluation.embed(data, most)

    def judging(self) -> AbstractContextManager[None]:
        """Evaluation mode, the model to be judged, and random numbers of its own."""
        return self._evaluation.inference.apart()

    def predict(self, data: Any, batch_size: int | None = None) -> list[dict[str, torch.Tensor]]:
        """One dict per sample, in input order."""
        return self._evaluation.predict(data, batch_size)

    def inference_model(self) -> nn.Module:
        """The model to evaluate, predict and export with."""
        return self._evaluation.inference.model()

    # -- state ---------------------------------------------------------------------------------------------

    def components(self) -> list[StateComponent]:
        """Everything needed to go on exactly from here, in parts."""
        return state_components(self)

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

    def save_file(self, path: Path) -> Path:
        """Write everything to one file of the user's choice. Every rank takes part, rank 0 writes."""
        states = {c: gathered(c.stateful.state_dict()) for c in self.components()}
        own = {c.key: state for c, state in states.items() if c.sharing_pattern is SharingPattern.PER_RANK}
        of_ranks = self.ranks.gather(own)
        content = {c.key: state for c, state in states.items()}
        self.ranks.done_by_main(lambda: write_snapshot(path, content, of_ranks))
        return path

    def whole_model(self) -> nn.Module:
        """The model to evaluate, predict and export with, all of it on this rank. Every rank takes part."""
        judged, model = self.inference_model(), self.backend.strategy.whole_model()
        if model is self.task.model:  # nothing is divided
            return judged
        if judged is not self.task.model:
            model.load_state_dict(gathered(judged.state_dict()))
        return model

    def load(self, path: Path, only: Collection[str] | None = None) -> None:
        """Go on from a file, a checkpoint's folder, or a run's folder (its newest checkpoint)."""
        give_back(self.components(), read_states(path, rank=self.ranks.rank), only)
        self.state.stopped = []  # loaded on purpose, to go on
        logger.info("going on from %s (step %d)", path, self.state.step)

    @contextmanager
    def sandbox(self) -> Iterator[Probe]:
        """A place for trial steps: on leaving, model, optimizer, random numbers and position are as before."""
        before = self.trained_state()
        try:
            yield Probe(self)
        finally:
            self.backend.drop_step()
            self.backend.guard.reset()
            self.restore_trained(before)

    def trained_state(self) -> dict[str, Any]:
        """A copy of what steps change."""
        to_host = self.backend.device.type != "cpu"
        return {c.key: cloned(c.stateful.state_dict(), to_host) for c in self.components() if c.key in TRAINED}

    def restore_trained(self, state: dict[str, Any]) -> None:
        """Put it back."""
        give_back([c for c in self.components() if c.key in state], state)

    def stop(self, reason: str) -> None:
        """End training after this step; whoever is being called is named as the one who asked."""
        self.control.stop(reason, by=self.bus.speaker or "the caller")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
