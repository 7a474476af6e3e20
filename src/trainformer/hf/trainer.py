"""`Trainer` in HuggingFace's style: a model, arguments, data sets, callbacks. It runs on the project's one engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainformer.adapters.base import is_adapted
from trainformer.adapters.state import adapter_state_dict
from trainformer.backends.torch.optimizers import make_optimizer
from trainformer.callbacks.compat.huggingface import our_name, training_summary
from trainformer.callbacks.compat.huggingface_types import TrainerControl, TrainerState
from trainformer.checkpointing import CheckpointStore, StateComponent
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.distributed import TorchProcessGroup, make_strategy
from trainformer.hf.base_trainer import TrainOutput
from trainformer.hf.callbacks import InfoCallback, ProgressCallback
from trainformer.hf.collate import as_dataset, collator_for
from trainformer.hf.compat import refuse_dead_overrides, refuse_foreign_checkpoint
from trainformer.hf.distributed import strategy_choice
from trainformer.hf.evaluation import EvaluatingTrainer, is_stream
from trainformer.hf.handle import HfHandle, HfRun, LogRelay
from trainformer.hf.settings import InOrder, habits_of, optimizer_spec, schedule_factory, settings_of
from trainformer.hf.task import ModelTask, can_be_smoothed, default_loss
from trainformer.run.fit import fit
from trainformer.run.torch.data import is_loader
from trainformer.run.torch.preflight import CheckReport, check_run

logger = logging.getLogger("trainformer")

#: Strategies that leave the model as it is, so that it can be trained again.
_REPEATABLE = ("single", "ddp", "accelerate")


class Trainer(EvaluatingTrainer):
    """Trains a model of transformers, or any other.

    >>> import torch
    >>> from trainformer.hf import TrainingArguments
    >>> data = [{"x": torch.tensor([float(i)]), "labels": torch.tensor([2.0 * i])} for i in range(8)]
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale = nn.Linear(1, 1)
    ...     def forward(self, x):
    ...         return self.scale(x)
    >>> import tempfile
    >>> args = TrainingArguments(tempfile.mkdtemp(), max_steps=3, save_strategy="no", disable_tqdm=True, use_cpu=True)
    >>> Trainer(model=Line(), args=args, train_dataset=data).train().global_step
    3
    """

    #: How several processes train together: a name, or ``{"name": ..., options}``. Subclasses choose.
    strategy: Any = "auto"

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """A progress bar, and a summary of the run when it begins."""
        return [ProgressCallback(), InfoCallback()]

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        model_init: Callable[[], nn.Module] | None = None,
        callbacks: Iterable[Any] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        refuse_dead_overrides(type(self))
        self._run: HfRun | None = None
        self._handle = HfHandle(self)
        self._began_run = False  # the session's run has begun: another train() needs another session
        self._eval_data: Any = None
        self._resume: str | None = None
        self._recording: dict[str, Any] | None = None
        self._said: set[str] = set()
        self._process_group: TorchProcessGroup | None = None  # once they have met
        self._divided_by: str | None = None
        super().__init__(
            args,
            model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            callbacks=callbacks,
            compute_loss_func=compute_loss_func,
        )
        if self.args.disable_tqdm:
            self._callbacks.remove(ProgressCallback)
        if self._overrides("log"):
            self._callbacks.callbacks.insert(0, LogRelay(self))
        self.data_collator = collator_for(data_collator, processing_class)
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._given_optimizer, self._given_scheduler = optimizers
        self._dispatch_event("on_init_end")

    # -- training ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> TrainOutput:
        """Train; a second call begins a new run from the weights as they are.

        `resume_from_checkpoint` (or the argument of that name): the path of a checkpoint, True for the newest in
        `output_dir`, or "auto" for the newest if there is one.
        """
        if kwargs:
            raise BadArgument(expected("no further arguments to train()", ", ".join(kwargs), "Set them in args."))
        if self.train_dataset is None and not self._overrides("get_train_dataloader"):
            raise BadArgument("Expected a train_dataset to train on, received none. Pass it to the trainer.")
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        self._resume = self._resumed_from(wanted)
        return super().train()

    def check(self, raise_on_failure: bool = True) -> CheckReport:
        """See in seconds whether this run will work; model, optimizer, random numbers and position stay as they are."""
        with self._process_settings():
            self._prepare(None, self.eval_dataset)
            assert self._run is not None
            return check_run(self._run, raise_on_failure)

    def _resumed_from(self, wanted: Any) -> str | None:
        if wanted in (None, False, "False", "false"):
            return None
        if wanted in (True, "True", "true", "auto"):
            folder = Path(self.args.output_dir)
            newest = CheckpointStore(folder).newest()
            if newest is None:
                refuse_foreign_checkpoint(*sorted(folder.glob("checkpoint-*")))
            if newest is None and wanted != "auto":
                do = "Pass 'auto' to go on only where there is one."
                raise DataError(expected("a checkpoint to resume from", f"none in {self.args.output_dir}", do))
            return "auto"
        refuse_foreign_checkpoint(Path(wanted))
        return str(wanted)

    def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """A session for what is to be done: a new one for a new run, the one there is for an evaluation."""
        self._eval_data = eval_dataset
        if self._run is None or (train_dataset is not None and self._began_run):
            self._run = self._make_run()
            self._began_run = False

    def _make_run(self) -> HfRun:
        self._refuse_divided()
        model = self.make_model()
        task = ModelTask(self, model, self._label_names(model))
        task.keeps_rows = self.compute_metrics is not None and not self.args.prediction_loss_only
        choice, parts = self._meet(), self._parts()
        train, evaluation = self._training_data(), self._evaluation_data()
        settings = settings_of(self.args, self._batches_of(train), self._resume, choice, parts)
        if train is not None and (is_loader(train) or (settings.sampler is InOrder and is_stream(train))):
            settings.sampler = None  # they have an order of their own
        self._bring_optimizer(settings, model)
        self._handle = HfHandle(self)
        run = HfRun(
            self._handle,
            task,
            settings,
            data=train if train is not None else evaluation,
            val_data=evaluation,
            callbacks=self._callbacks,
            passed=frozenset(settings.values()),
            options=habits_of(self.args),
        )
        self._note_division(run)
        self._handle._run = run
        run.connect()
        self.optimizer, self.lr_scheduler = run.backend.optimizer, run.backend.schedule
        self.train_dataloader, self.eval_dataloader = self._handle.train_dataloader, self._handle.val_dataloader
        return run

    def _meet(self) -> Any:
        """Meet the processes that train together; the strategy that is wanted, in words."""
        choice = strategy_choice(self.strategy, self.args)
        strategy = make_strategy(choice)
        strategy.setup_environment("cpu" if self.args.use_cpu else self.args.device, self.args.ddp_timeout)
        self._process_group = strategy.process_group
        self.args.logging_dir = self._process_group.broadcast(self.args.logging_dir)  # it has the time in its name
        return choice

    def _parts(self) -> int:
        if self._process_group is None:
            self._meet()
        assert self._process_group is not None
        return self._process_group.dp_world_size

    def _note_division(self, run: HfRun) -> None:
        name = run.backend.strategy.name
        if not run.process_group.is_single_process and name not in _REPEATABLE:
            self._divided_by = name

    def _refuse_divided(self) -> None:
        """A model that a run has divided over processes is in pieces; it cannot be divided once more."""
        if self._divided_by is not None:
            raise BadArgument(
                f"A run before has divided the model over processes ({self._divided_by}), and it cannot be divided "
                "again. Make a new trainer with a new model, and give it the weights or a checkpoint."
            )

    def _join(self) -> TorchProcessGroup:
        self._prepare(None, self.eval_dataset)
        assert self._run is not None
        return self._run.process_group

    def _train_loop(self) -> TrainOutput:
        run = self._run
        assert run is not None
        self._began_run = True
        run.settings.resume = self._resume
        if self.args.eval_on_start:
            self.evaluate()
        began, first_step = time.perf_counter(), run.state.step
        fit(run)
        metrics: dict[str, Any] = training_summary(self._handle, began, first_step)
        metrics["epoch"] = self.state.epoch
        self.state.log_history.append({**metrics, "step": run.state.step})
        control = run.control
        if control.should_stop:
            metrics |= {"stopped_by": control.stopped_by, "stop_reason": control.stop_reason}
        if self.args.load_best_model_at_end:
            self._load_best()
        return TrainOutput(run.state.step, metrics["train_loss"], metrics)

    def _load_best(self) -> None:
        run = self._run
        assert run is not None
        best = run.settings.retention().ranked(CheckpointStore(Path(self.args.output_dir)).checkpoints())
        path = run.process_group.broadcast(str(best[0].path) if best else None)
        if path is None:
            logger.warning("load_best_model_at_end: there is no checkpoint with %s", run.settings.monitor_metric)
            return
        run.load(Path(path), only=["model"])
        self.state.best_model_checkpoint = path

    # -- what is trained, and on what ----------------------------------------------------------------------

    def _training_data(self) -> Any:
        if self._overrides("get_train_dataloader"):
            return self.get_train_dataloader()
        return as_dataset(self.train_dataset)

    def _evaluation_data(self) -> Any:
        if self._overrides("get_eval_dataloader"):
            return self.get_eval_dataloader()
        given = self.eval_dataset if self._eval_data is None else self._eval_data
        return as_dataset(next(iter(given.values())) if isinstance(given, dict) else given)

    def _batches_of(self, data: Any) -> int | None:
        if data is None or not hasattr(data, "__len__"):
            return None
        if is_loader(data):
            return len(data)
        size = self.args.per_device_train_batch_size * self._parts()
        return len(data) // size if self.args.dataloader_drop_last else math.ceil(len(data) / size)

    def _bring_optimizer(self, settings: Any, model: nn.Module) -> None:
        """Put into the settings what the user passed, or makes in methods of his own."""
        if self._overrides("create_optimizer_and_scheduler"):
            self.create_optimizer_and_scheduler(settings.max_steps or -1)
            settings.optimizer, settings.scheduler = self.optimizer, self.lr_scheduler
            return
        if self._given_optimizer is not None:
            settings.optimizer = self._given_optimizer
        elif self._overrides("create_optimizer"):
            settings.optimizer = self.create_optimizer() or self.optimizer
        if self._given_scheduler is not None:
            settings.scheduler = self._given_scheduler
        elif self._overrides("create_scheduler"):
            settings.scheduler = lambda optimizer, total: self.create_scheduler(total, optimizer) or self.lr_scheduler

    def _say_once(self, message: str, *values: Any) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message, *values)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Trainer, name)

    def create_optimizer(self) -> Any:
        """The optimizer that the arguments ask for. Override it to bring another."""
        task = ModelTask(self, self.make_model(), [])
        self.optimizer = make_optimizer(
            optimizer_spec(self.args), task, self.args.learning_rate, self.args.weight_decay
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule that the arguments ask for. Override it to bring another."""
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = schedule_factory(self.args)(optimizer, num_training_steps)
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Both of them."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    # -- steps that users override -------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a batch over its supervised items, of which there are `num_items_in_batch`."""
        name, smoothing = self._label_names(model)[0], self.args.label_smoothing_factor
        if smoothing and isinstance(inputs, Mapping) and not can_be_smoothed(name, inputs.get(name)):
            self._say_once("label_smoothing_factor does nothing: %s are no classes", name)
        loss, outputs = default_loss(model, inputs, name, smoothing, self.loss_fn, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    # -- callbacks and state -------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """One more, of any dialect; a class is instantiated."""
        if self._run is None:
            super().add_callback(callback)
        else:
            self._run.add_callback(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take out a callback, or the first of a class, and return it; None if there is none."""
        return super().pop_callback(callback) if self._run is None else self._run.remove_callback(callback)

    @property
    def state(self) -> TrainerState:
        """Where the run is."""
        if self._run is not None:
            self._bridge.refresh(self._handle)
            self._bridge.take_history(self._handle)
        return self._bridge.state

    def log(self, logs: dict[str, float], start_time: float | None = None) -> TrainerControl:
        """Record metrics: with the loggers, in the history, and with every callback that hears `on_log`."""
        if self._recording is not None:
            self._recording.update(logs)  # called for a record that the run is writing: what is added goes into it
            return self.control
        if self._run is not None and self._run.is_running:
            self._run.log({our_name(name): value for name, value in logs.items()}, self._run.state.step)
        return super().log(logs)

    def recorded(self, logs: dict[str, Any]) -> dict[str, Any]:
        """What a `log` that the user has overridden makes of a record of the run."""
        self._recording = {}
        try:
            self.log({**logs, "epoch": self.state.epoch})
            return self._recording
        finally:
            self._recording = None

    def _tell(self, callback: Any, event: str, extra: dict[str, Any]) -> None:
        if self._run is None:
            super()._tell(callback, event, extra)
        else:
            self._bridge.call(self._handle, callback, event, extra)

    def unsharded_model(self) -> nn.Module:
        """The model with all of its weights on the first process. Every process has to ask where it is divided."""
        return self.make_model() if self._run is None else self._run.backend.strategy.unsharded_model()

    def _weights(self) -> dict[str, Any]:
        model = self.unsharded_model()
        return adapter_state_dict(model) if is_adapted(model) else model.state_dict()

    def get_state_components(self) -> list[StateComponent]:
        """Everything that belongs into a checkpoint."""
        self._prepare(None, self.eval_dataset)
        assert self._run is not None
        return self._run.components()

    def load_checkpoint(self, checkpoint_path: Any = None) -> None:
        """Go on from a checkpoint with the next `train()`; without a path from the newest in `output_dir`."""
        path = self._checkpoint_at(checkpoint_path)
        if self._began_run:
            self._run = None
        self._prepare(None, self.eval_dataset)
        assert self._run is not None
        self._run.load(path)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back how far the run was."""
        super().load_state_dict(state_dict)
        self._prepare(None, self.eval_dataset)
        assert self._run is not None
        run = self._run.state
        run.step, run.epoch = state_dict["global_step"], state_dict["raw_epoch"]
        run.tokens = state_dict["num_input_tokens_seen"]
        run.batch = (run.step - state_dict["epoch_start_step"]) * self._run.settings.accumulation_steps
        run.position = run.batch * self._run.settings.batch_size
