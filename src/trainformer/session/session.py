"""A session wires everything together for one run: task, data, backend, engine, callbacks, loggers, checkpoints.

Every way into the library makes one of these. It decides nothing about training: when things happen is the loop's
business, how a step is computed the backend's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from trainformer.backends.torch import TorchBackend, TorchSettings, capture_random, restore_random
from trainformer.callbacks.base import CallbackList, handlers_of
from trainformer.context import PipelineContext
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.engine import Cadence, Control, Event, EventBus, Loop, Plan, RunState
from trainformer.loggers.base import BaseLogger, NoOpLogger
from trainformer.loggers.registry import make_loggers
from trainformer.session.console import messages_on
from trainformer.session.data import LoadOptions, Source, load, load_training_data, make_source, size_of
from trainformer.session.folder import RunFolder
from trainformer.session.inference import Inference
from trainformer.session.keeper import CheckpointKeeper
from trainformer.session.probe import Probe
from trainformer.session.provenance import record_config
from trainformer.session.settings import RunSettings
from trainformer.session.snapshot import check_fits, cloned, read_snapshot, write_snapshot
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
        seed_everything(settings.seed, deterministic=False)
        self.owner = owner
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
        self.folder: RunFolder | None = None
        self._keeper: CheckpointKeeper | None = None
        self._last_metrics: dict[str, float] = {}

        self._check_task()
        loaded = load_training_data(task, data, val_data, val_split, settings.seed)
        self.info = loaded.info
        if provides(task, "configure"):
            task.configure(loaded.info)
        self.backend = TorchBackend(task, self._torch_settings(), reduces_rows=provides(task, "on_eval_end"))
        self._inference = Inference(owner, task, self.backend, callbacks, settings.seed)
        self.train_source = make_source(task, loaded.train, self._load_options(), train=True)
        self.val_source = None if loaded.val is None else self._evaluation_source(loaded.val)
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
            save_every=Cadence.parse(s.save_every, "steps", "save_every"),
            eval_at_end=self.val_source is not None and s.eval_every is not None,
            monitor=s.monitor_metric,
            monitor_mode=s.monitor_mode,
        )

    # -- training ------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train from where the state is to the end of the plan."""
        folder = self._open()
        settings = self.settings
        settings.validate()
        self.control.reset()
        self.backend.schedule_for(self.total_steps())
        loop = Loop(
            self._plan(),
            self.state,
            backend=self.backend,
            source=self.train_source,
            bus=self.bus,
            control=self.control,
            services=self,
        )
        with ExitStack() as stack:
            stack.enter_context(folder.log_file())
            stack.enter_context(messages_on(self.console, wanted="console" in _as_list(settings.log)))
            stack.enter_context(self.backend.run_context())
            stack.enter_context(self._logging())
            self._announce()
            try:
                loop.run()
            except BaseException as error:
                self.backend.end_step()
                self.bus.emit(Event.ERROR, error)
                raise
            if self.control.should_stop:
                logger.info(
                    "stopped at step %d by %s: %s", self.state.step, self.control.stopped_by, self.control.stop_reason
                )

    def _open(self) -> RunFolder:
        """The run's folder; on the first call it is made, and the run resumed if there is something to resume."""
        settings = self.settings
        if self.folder is not None:
            return self.folder
        folder = RunFolder.choose(settings.run_dir, settings.name, type(self.task).__name__, settings.save_dir)
        self._keeper = CheckpointKeeper(
            folder.checkpoints,
            best=settings.save_best,
            last=settings.save_last,
            monitor=settings.monitor_metric,
            mode=settings.monitor_mode,
        )
        folder.open(anew=settings.resume is None and self.state.step == 0)
        self.loggers = make_loggers(
            settings.log, project=settings.project, name=settings.name, run_dir=folder.path, console=self.console
        )
        if self.state.step == 0:
            self._resume(self._keeper)
        folder.write_config(self.context.config.to_json())
        self.folder = folder
        return folder

    def _resume(self, keeper: CheckpointKeeper) -> None:
        if self.settings.resume is None:
            return
        if self.settings.resume != "auto":
            self.load(Path(self.settings.resume))
        elif (found := keeper.newest()) is not None:
            path, state = found
            self.restore(state)
            logger.info("going on from %s (step %d); pass resume=None to begin anew", path, self.state.step)

    @contextmanager
    def _logging(self) -> Iterator[None]:
        """Loggers are open inside; a run that goes on continues its old records."""
        if self.state.step > 0:
            self.loggers.load_state_dict(self.loggers.state_dict())
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
        self.loggers.finish("stopped" if self.control.should_stop else "finished")

    def _announce(self) -> None:
        state, total = self.state, self.total_steps()
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
        """Hand metrics to the loggers."""
        self.loggers.log(metrics, step)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data."""
        assert self.val_source is not None
        self._last_metrics = self._inference.evaluate(self.val_source)
        return self._last_metrics

    def worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is among the best."""
        return self._keeper is not None and self._keeper.worth_keeping(metrics)

    def save(self) -> str | None:
        """Write a checkpoint into the run folder."""
        if self._keeper is None:
            return None
        self.loggers.flush()
        self.state.saved_at = self.state.step
        fresh = self.state.evaluated_at == self.state.step
        path = self._keeper.save(self.state.step, self.capture(), self._last_metrics if fresh else {})
        logger.info("saved %s", path)
        return str(path)

    # -- evaluation and prediction -------------------------------------------------------------------------

    def evaluate_on(self, data: Any = None, batch_size: int | None = None) -> dict[str, float]:
        """Evaluate on the validation data, or on other data."""
        if data is not None:
            return self._inference.evaluate(self._evaluation_source(load(self.task, data), batch_size))
        if self.val_source is None:
            raise DataError(
                "There is no validation data to evaluate on. Pass val_data or val_split to the trainer, "
                "or data to evaluate()."
            )
        return self._inference.evaluate(self.val_source)

    def evaluate_first_batch(self) -> dict[str, float]:
        """The metrics of one validation batch, to see which there are."""
        assert self.val_source is not None
        return self._inference.evaluate(self.val_source, most=1)

    def predict(self, data: Any, batch_size: int | None = None) -> list[dict[str, torch.Tensor]]:
        """One dict per sample, in input order."""
        return self._inference.predict(self._evaluation_source(load(self.task, data), batch_size))

    def inference_model(self) -> nn.Module:
        """The model to evaluate, predict and export with."""
        return self._inference.model()

    # -- state ---------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here. Tensors are shared with the run: clone to keep them."""
        return {
            "model": self.task.model.state_dict(),
            "task": self.task.state_dict() if provides(self.task, "state_dict") else {},
            "backend": self.backend.state_dict(),
            "run": self.state.state_dict(),
            "random": capture_random(),
            "callbacks": self.callbacks.state_dict(),
            "loggers": self.loggers.state_dict(),
            "context": self.context.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state. Whether the model fits is seen before anything is changed."""
        self._restore_weights(state)
        self.state.load_state_dict(state["run"])
        self.callbacks.load_state_dict(state["callbacks"])
        self.loggers.load_state_dict(state["loggers"])
        self.context.load_state_dict(state["context"])

    def _restore_weights(self, state: dict[str, Any]) -> None:
        check_fits(self.task.model.state_dict(), state["model"], "model")
        self.task.model.load_state_dict(state["model"])
        if provides(self.task, "load_state_dict"):
            self.task.load_state_dict(state["task"])
        self.backend.load_state_dict(state["backend"])
        restore_random(state["random"])

    def save_file(self, path: Path) -> Path:
        """Write everything to one file of the user's choice."""
        write_snapshot(path, self.capture())
        return path

    def load(self, path: Path) -> None:
        """Go on from a file."""
        self.restore(read_snapshot(path))
        logger.info("going on from %s (step %d)", path, self.state.step)

    @contextmanager
    def sandbox(self) -> Iterator[Probe]:
        """A place for trial steps: on leaving, model, optimizer, random numbers and position are as before."""
        before = cloned(self.capture(), to_host=self.backend.device.type != "cpu")
        try:
            yield Probe(self)
        finally:
            self.backend.end_step()
            self.backend.guard.reset()
            self._restore_weights(before)

    def stop(self, reason: str) -> None:
        """End training after this step; whoever is being called is named as the one who asked."""
        self.control.stop(reason, by=self.bus.speaker or "the caller")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
