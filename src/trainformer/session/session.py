"""A session wires everything together for one run: task, data, backend, engine, callbacks, loggers, checkpoints.

Every way into the library makes one of these. It decides nothing about training: when things happen is the loop's
business, how a step is computed the backend's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from trainformer.backends.torch import TorchBackend, TorchSettings
from trainformer.callbacks.base import CallbackList, handlers_of
from trainformer.callbacks.ema import EMA
from trainformer.context import PipelineContext
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.align import align_classes
from trainformer.data.targets import is_stream
from trainformer.engine import Cadence, Control, Event, EventBus, Loop, Plan, RunState
from trainformer.engine.checkpoint import CheckpointStore, Manifest, Retention, StateComponent
from trainformer.loggers.base import BaseLogger, NoOpLogger
from trainformer.loggers.registry import make_loggers
from trainformer.session.checkpoints import Checkpointer, give_back, read_checkpoint, read_states, versions
from trainformer.session.components import TRAINED, state_components
from trainformer.session.console import messages_on
from trainformer.session.data import (
    LoadOptions,
    Source,
    is_loader,
    is_open,
    load,
    load_training_data,
    make_source,
    size_of,
)
from trainformer.session.folder import RunFolder
from trainformer.session.inference import Inference
from trainformer.session.probe import Probe
from trainformer.session.provenance import declared_arguments, fingerprint, record_changes, record_config
from trainformer.session.settings import RunSettings
from trainformer.session.signals import SignalStop, obeying_signals
from trainformer.session.snapshot import cloned, write_snapshot
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
    ) -> None:
        settings.validate()
        make_loggers(settings.log, project=settings.project, name=settings.name, run_dir=Path("runs"))  # known names?
        seed_everything(settings.seed, deterministic=False)
        self.owner = owner
        self.owner_data = data
        self.task = task
        self.settings = settings
        self.passed = passed
        self.state = RunState()
        self.control = Control()
        self.bus = EventBus()
        self.context = PipelineContext()
        self.console = console or Console()
        self.callbacks = callbacks
        self.loggers: BaseLogger = NoOpLogger()
        self._logger_state: dict[str, Any] = {}
        self.folder: RunFolder | None = None
        self._checkpointer: Checkpointer | None = None
        self._loop: Loop | None = None
        self._last_metrics: dict[str, float] = {}
        self.suited: dict[str, Any] = {}  # settings that follow from task or data, where the user chose none

        self._check_task()
        self._learn_batch_size(data)
        self.suited |= self._suit_to_task()
        if settings.ema is not None and not any(isinstance(callback, EMA) for callback in callbacks):
            callbacks.add(EMA(decay=settings.ema))
        loaded = load_training_data(task, data, val_data, val_split, settings.seed)
        self.info = loaded.info
        if "sampler" in self.suited and (is_loader(loaded.train) or is_stream(loaded.train)):
            del self.suited["sampler"]  # the task's wish, not the user's: nobody can sample there
            self.settings.sampler = None
        self.declared = declared_arguments(task)
        if provides(task, "configure"):
            task.configure(loaded.info)
        self.backend = TorchBackend(task, self._torch_settings(), reduces_rows=provides(task, "on_eval_end"))
        self._inference = Inference(owner, task, self.backend, callbacks, settings.seed)
        self.train_source = make_source(task, loaded.train, self._load_options(), train=True)
        self.val_source = None if loaded.val is None else self._evaluation_source(loaded.val)
        self._train_data, self._val_data = loaded.train, loaded.val
        self.labels_comparable = loaded.comparable
        self._train_size = size_of(loaded.train)
        self.backend.schedule_for(self.total_steps())
        record_config(self)

    # -- set-up --------------------------------------------------------------------------------------------

    def _check_task(self) -> None:
        missing = [name for name in ("train_step", "eval_step") if not callable(getattr(self.task, name, None))]
        if missing or isinstance(self.task, type):
            what = f"the class {self.task.__name__}" if isinstance(self.task, type) else type(self.task).__name__
            raise BadArgument(
                expected("a task: an object with `model`, `train_step` and `eval_step`", what, "See trainformer.tasks.")
            )

    def _learn_batch_size(self, data: Any) -> None:
        """A loader of the user's has a batch size of its own, from which others may derive."""
        size = getattr(data, "batch_size", None)
        if is_loader(data) and isinstance(size, int) and "batch_size" not in self.passed:
            self.suited["batch_size"] = self.settings.batch_size = size

    def _suit_to_task(self) -> dict[str, Any]:
        """Settings that the user left alone, as the task wants them."""
        if not provides(self.task, "training_defaults"):
            return {}
        wanted = self.task.training_defaults(self.settings, self.passed)
        unknown = sorted(set(wanted) - set(RunSettings.defaults()))
        if unknown:
            raise BadArgument(expected("training_defaults to name settings of the run", ", ".join(unknown)))
        suited = {name: value for name, value in wanted.items() if name not in self.passed}
        for name, value in suited.items():
            setattr(self.settings, name, value)
        self.settings.validate()
        return suited

    def _torch_settings(self) -> TorchSettings:
        names = TorchSettings.__dataclass_fields__
        return TorchSettings(**{name: getattr(self.settings, name) for name in names})

    def _load_options(self, batch_size: int | None = None) -> LoadOptions:
        settings = self.settings
        return LoadOptions(
            batch_size=batch_size or settings.batch_size,
            seed=settings.seed,
            num_workers=settings.num_workers,
            pin_memory=self.backend.device.type == "cuda",
            skip_bad=settings.bad_samples == "skip",
            sampler=settings.sampler,
            drop_last=settings.drop_last,
        )

    def _evaluation_source(self, data: Any, batch_size: int | None = None) -> Source:
        size = batch_size or self.settings.eval_batch_size
        return make_source(self.task, data, self._load_options(size), train=False)

    def connect(self) -> None:
        """Subscribe everybody: the task first, then the callbacks in their order, then the context.

        Called once by the owner as soon as it can answer callbacks that look at it.
        """
        self.bus.add(type(self.task).__name__, self._task_handlers())
        for name, callback in self.callbacks.named().items():
            self._add_listener(name, callback)
        self.bus.add(
            "context",
            {
                Event.STEP_END: lambda step, loss: self.context.on_step_end(),
                Event.EPOCH_END: lambda epoch, metrics: self.context.on_epoch_end(),
            },
        )

    def _add_listener(self, name: str, callback: Any) -> None:
        if hasattr(callback, "attach"):
            callback.attach(self.owner)
        self.bus.add(name, handlers_of(callback, self.owner))

    def _task_handlers(self) -> dict[Event, Any]:
        task = self.task
        handlers = {
            "on_train_begin": (Event.TRAIN_BEGIN, lambda: task.on_train_begin()),
            "on_train_end": (Event.TRAIN_END, lambda: task.on_train_end()),
            "on_epoch_begin": (Event.EPOCH_BEGIN, lambda epoch: task.on_epoch_begin(epoch)),
            "on_epoch_end": (Event.EPOCH_END, lambda epoch, metrics: task.on_epoch_end(epoch, metrics)),
            "on_step_end": (Event.STEP_END, lambda step, loss: task.on_step_end(step, self.total_steps() or 0)),
            "on_validation_end": (Event.EVAL_END, lambda metrics: task.on_validation_end(metrics)),
        }
        return {event: handler for name, (event, handler) in handlers.items() if provides(task, name)}

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

    def _plan(self) -> Plan:
        s = self.settings
        return Plan(
            max_steps=s.max_steps,
            epochs=None if s.max_steps is not None else s.epochs,
            accumulation=s.accumulation_steps,
            log_every=Cadence.parse(s.log_every, "steps", "log_every"),
            eval_every=Cadence.parse(s.eval_every, "epochs", "eval_every") if self.val_source is not None else None,
            save_every=Cadence.parse(s.save_every, s.save_strategy, "save_every"),
            eval_on_save=s.eval_on_save and self.val_source is not None,
            eval_at_end=self.val_source is not None and s.eval_every is not None,
            monitor=s.monitor_metric,
            monitor_mode=s.monitor_mode,
        )

    # -- training ------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train from where the state is to the end of the plan."""
        settings = self.settings
        settings.validate()
        self.control.reset()
        if self.folder is not None:
            self.state.stopped = []  # called again on purpose: whoever stopped it then does not stop it now
        folder = self.folder or self._choose_folder()
        with ExitStack() as stack:
            stack.enter_context(folder.log_file())
            stack.enter_context(messages_on(self.console, wanted="console" in _as_list(settings.log)))
            if self.folder is None:
                self._prepare(folder)
                self.folder = folder
            self.backend.schedule_for(self.total_steps())
            record_changes(self)
            stack.enter_context(folder.recording(self.context.config))
            stack.enter_context(self.backend.run_context())
            stack.enter_context(folder.status(self._outcome))
            stack.enter_context(self._logging())
            stack.enter_context(obeying_signals(self.control))
            if self.state.stopped:
                self.control.stop(self.state.stopped[1], by=self.state.stopped[0])
            self._announce()
            stack.enter_context(self._failing_loudly())
            self._loop = self._make_loop()
            self._loop.run()
        self._leave()

    def _choose_folder(self) -> RunFolder:
        settings = self.settings
        folder = RunFolder.choose(
            settings.run_dir,
            settings.name,
            type(self.task).__name__,
            settings.save_dir,
            unfinished=fingerprint(self) if settings.resume == "auto" else None,
        )
        folder.open(anew=settings.resume is None and self.state.step == 0)
        return folder

    def _prepare(self, folder: RunFolder) -> None:
        """On the first call: what the run needs beside its folder, and its old state if there is one to resume."""
        settings = self.settings
        retention = Retention(
            last=settings.save_last,
            best=settings.save_best,
            every=settings.keep_every,
            monitor=settings.monitor_metric,
            mode=settings.monitor_mode,
        )
        self._checkpointer = Checkpointer(folder.checkpoints, retention, settings.save_async)
        self._checkpointer.store.clean()
        self.loggers = make_loggers(
            settings.log, project=settings.project, name=settings.name, run_dir=folder.path, console=self.console
        )
        self.loggers.load_state_dict(self._logger_state)  # of a checkpoint that was loaded before the run began
        self.backend.schedule_for(self.total_steps())
        folder.fingerprint = fingerprint(self)
        if self.state.step == 0:
            self._resume(self._checkpointer.store, folder)
        # Checkpoints after this step belong to a run that was given up; they would pass for the newest.
        self._checkpointer.store.set_aside(after=self.state.step)
        self._checkpointer.tidy()  # the run before may have been killed between a save and this

    def _resume(self, store: CheckpointStore, folder: RunFolder) -> None:
        if self.settings.resume is None:
            return
        own = store.newest() if self.settings.resume == "auto" or folder.was_cut_short() else None
        if own is not None:
            # What was named for the start counts at the start only: a run that goes on has everything it needs.
            only = self.settings.load_components if self.settings.resume == "auto" else None
            give_back(self.components(), read_checkpoint(own), only)
            logger.info("going on from %s (step %d); pass resume=None to begin anew", own.path, self.state.step)
        elif self.settings.resume != "auto":
            self.load(Path(self.settings.resume), self.settings.load_components)

    def _make_loop(self) -> Loop:
        return Loop(
            self._plan(),
            self.state,
            backend=self.backend,
            source=self.train_source,
            bus=self.bus,
            control=self.control,
            services=self,
        )

    @contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        """Around the loop: wait for the last save, tell callbacks of an error, say who stopped the run."""
        assert self._checkpointer is not None
        try:
            yield
            self._checkpointer.conclude()
        except BaseException as error:
            self.backend.drop_step()
            self.bus.emit(Event.ERROR, error)
            raise
        finally:
            self._loop = None
        if self.control.should_stop:
            reason, who = self.control.stop_reason, self.control.stopped_by
            logger.info("stopped at step %d by %s: %s", self.state.step, who, reason)

    def _leave(self) -> None:
        """After a signal the program ends here, with everything saved and closed."""
        number = self.control.signal
        if number is not None and self.settings.exit_on_signal:
            raise SignalStop(number)

    def _outcome(self) -> str:
        if self.control.signal is not None:
            return "interrupted"
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

    def _announce(self) -> None:
        state, total = self.state, self.total_steps()
        if state.stopped:
            logger.warning(
                "nothing left to train: the run was stopped at step %d by %s: %s. Call fit() again or load the "
                "checkpoint to go on all the same, or pass resume=None to begin anew.", state.step, *state.stopped,
            )  # fmt: skip
            return
        if total is not None and state.step >= total:
            logger.warning(
                "nothing left to train: %d of %d steps are done. Raise epochs or max_steps to go on, "
                "or pass resume=None to begin anew.", state.step, total,
            )  # fmt: skip
            return
        parameters = sum(p.numel() for p in self.backend.parameters)
        logger.info(
            "training %s on %s in %s: %s trainable parameters, %s samples, %s steps",
            type(self.task).__name__, self.backend.device, self.backend.precision.name, f"{parameters:,}",
            self._train_size if self._train_size is not None else "?", total if total is not None else "?",
        )  # fmt: skip

    # -- what the loop asks for ----------------------------------------------------------------------------

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the loggers; a training record also says how long saves have blocked the loop since."""
        checkpointer = self._checkpointer
        if checkpointer is not None and checkpointer.blocked and "train/loss" in metrics:
            metrics["train/save_seconds"], checkpointer.blocked = checkpointer.blocked, 0.0
        self.loggers.log(metrics, step)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data."""
        assert self.val_source is not None
        metrics = self._inference.evaluate(self.val_source)
        for callback in self.callbacks:
            if hasattr(callback, "measure"):
                metrics |= callback.measure(self.owner, metrics) or {}
        self._last_metrics = metrics
        return metrics

    def poll(self) -> None:
        """Report a save that failed in the background."""
        if self.settings.save_async and self._checkpointer is not None:
            self._checkpointer.poll()

    def worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is among the best."""
        checkpointer = self._checkpointer
        return checkpointer is not None and checkpointer.is_worth_keeping(metrics)

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
        )
        on_device = self.backend.device.type != "cpu"
        assets = self.task.save_assets if provides(self.task, "save_assets") else None
        if not self._checkpointer.save(self.components(), manifest, on_device, assets):
            state.saved_at = before
            return None
        return str(self._checkpointer.store.root / f"step_{state.step:08d}")

    # -- evaluation and prediction -------------------------------------------------------------------------

    def evaluate_on(self, data: Any = None, batch_size: int | None = None) -> dict[str, float]:
        """Evaluate on the validation data, or on other data."""
        if data is not None:
            labelled = align_classes(load(self.task, data), self.info.class_names, is_open(self.task))
            return self._inference.evaluate(self._evaluation_source(labelled, batch_size))
        if self.val_source is None:
            raise DataError(
                "There is no validation data to evaluate on. Pass val_data or val_split to the trainer, "
                "or data to evaluate()."
            )
        return self._inference.evaluate(self.val_source)

    def evaluate_trained(self) -> dict[str, float]:
        """Evaluate the weights that are trained, also where a callback offers others (an average) for evaluation."""
        assert self.val_source is not None
        return self._inference.evaluate(self.val_source, model=self.task.model)

    def embed(self, data: Any = "val", most: int | None = None) -> dict[str, torch.Tensor]:
        """Embeddings (and labels) of data: "train", "val", or anything that can be predicted for."""
        known = {"train": self._train_data, "val": self._val_data}
        chosen = known[data] if isinstance(data, str) and data in known else load(self.task, data)
        if chosen is None:
            raise DataError("There is no validation data to embed. Pass val_data or val_split, or data to embed().")
        if most is not None and not is_loader(chosen) and not is_stream(chosen) and len(chosen) > most:
            # Evenly over the set, which may be sorted by class.
            places = torch.linspace(0, len(chosen) - 1, most, dtype=torch.float64).round().long().tolist()
            chosen = torch.utils.data.Subset(chosen, places)
        source = make_source(self.task, chosen, self._load_options(self.settings.eval_batch_size), train=False)
        rows = self._inference.rows(source)
        if "embedding" not in rows:
            raise BadArgument(
                f"{type(self.task).__name__} gives no embeddings: its predict_step returns {', '.join(rows)}. Return "
                "the embeddings of a batch as 'embedding', and the labels as 'label' where there are any."
            )
        return rows

    def evaluate_first_batches(self, most: int) -> dict[str, float]:
        """The metrics of a few validation batches, to see which there are."""
        assert self.val_source is not None
        return self._inference.evaluate(self.val_source, most=most)

    def predict(self, data: Any, batch_size: int | None = None) -> list[dict[str, torch.Tensor]]:
        """One dict per sample, in input order."""
        # Every input has a row: what cannot be read is an error here, whatever training does with it.
        size = batch_size or self.settings.eval_batch_size
        options = replace(self._load_options(size), skip_bad=False)
        return self._inference.predict(make_source(self.task, load(self.task, data), options, train=False))

    def inference_model(self) -> nn.Module:
        """The model to evaluate, predict and export with."""
        return self._inference.model()

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
        """Write everything to one file of the user's choice."""
        write_snapshot(path, {c.key: c.stateful.state_dict() for c in self.components()})
        return path

    def load(self, path: Path, only: Collection[str] | None = None) -> None:
        """Go on from a file, a checkpoint's folder, or a run's folder (its newest checkpoint)."""
        give_back(self.components(), read_states(path), only)
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
