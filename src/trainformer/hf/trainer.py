"""`Trainer` with the interface of HF, on trainformer's engine; and one subclass per distributed strategy.

Start distributed runs with ``trainformer launch --nproc 4 script.py`` or torchrun. A single process works, too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD

from trainformer.adapters.base import is_adapted
from trainformer.adapters.state import adapter_state_dict
from trainformer.callbacks.compat.huggingface import from_hf_name, training_summary
from trainformer.callbacks.compat.huggingface_types import TrainerControl, TrainerState
from trainformer.checkpointing import CheckpointStore, StateComponent
from trainformer.core.errors import BadArgument, expected
from trainformer.data.mixture.mixture import Mixture
from trainformer.distributed import TorchProcessGroup
from trainformer.engine.state import append_record
from trainformer.hf.callbacks import InfoCallback, PrinterCallback, ProgressCallback
from trainformer.hf.checkpoint_manager import TrainerCheckpoints
from trainformer.hf.checkpoints import find_checkpoint
from trainformer.hf.collate import as_dataset, collator_for
from trainformer.hf.compat import check_overrides
from trainformer.hf.dataloaders import is_stream, mixture_sampler
from trainformer.hf.evaluation import EvaluatingTrainer
from trainformer.hf.features import MemoryMetrics, callbacks_of, prepare_model, set_log_level, training_features
from trainformer.hf.forgather import check_environment, check_pair, combined_callbacks, factories, takes_outputs
from trainformer.hf.hub import HubMixin
from trainformer.hf.optimizers import OptimizerMixin
from trainformer.hf.outputs import TrainOutput
from trainformer.hf.run import HfHandle, HfRun, LogRelay, native_name
from trainformer.hf.search import SearchMixin
from trainformer.hf.settings import front_options, planned_steps, settings_of
from trainformer.hf.task import ModelTask, align_special_tokens
from trainformer.run.check_report import CheckReport
from trainformer.run.fit import fit
from trainformer.run.torch.data import is_loader
from trainformer.run.torch.preflight import check_run
from trainformer.utils.helpers import seed_everything

logger = logging.getLogger("trainformer")

#: Strategies that do not shard the model, so that it can be trained again.
_UNSHARDED = ("single", "ddp", "accelerate")


class Trainer(OptimizerMixin, SearchMixin, HubMixin, EvaluatingTrainer):
    """Trains a model of transformers, or any other torch module.

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
    >>> output = Trainer(model=Line(), args=args, train_dataset=data).train()  # doctest: +ELLIPSIS
    {'train_runtime': ...}
    >>> output.global_step
    3
    """

    #: The distributed strategy: a name, or ``{"name": ..., **options}``.
    strategy: Any = "auto"

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """A progress bar, and a summary when training begins."""
        return [ProgressCallback(), InfoCallback()]

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., Mapping[str, Any] | None] | None = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        optimizer_factory: Callable[[Any], Any] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        distributed_env: Any = None,
    ) -> None:
        check_overrides(type(self))
        check_environment(distributed_env)
        self._run: HfRun | None = None
        self._handle = HfHandle(self)
        self._has_trained = False  # whether the run has begun: another train() needs a new one
        self._evaluates_only = False  # whether the run has no training data, so that it cannot be trained
        self._eval_data: Any = None
        self._ignore_keys_for_eval: Any = None
        self.is_in_train = self._begins_training = False  # the latter until the run is prepared
        self._resume: str | None = None
        self._record: dict[str, Any] | None = None  # the log record that is passing through an overridden `log`
        self._sharded_by: str | None = None
        self.checkpoint_manager = TrainerCheckpoints(self)
        super().__init__(
            args,
            model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            callbacks=callbacks,
            compute_loss_func=takes_outputs(compute_loss_func),
        )
        if self.args.disable_tqdm and self._callbacks.remove(ProgressCallback) is not None:
            self.add_callback(PrinterCallback())
            callbacks = self._callbacks.callbacks
            callbacks.insert(0, callbacks.pop())  # in place of the progress bar
        if self._overrides("log"):
            self._callbacks.callbacks.insert(0, LogRelay(self))
        self.data_collator = collator_for(data_collator, processing_class)
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        check_pair(optimizers)
        self.optimizer, self.lr_scheduler = optimizers
        self._given_optimizer, self._given_scheduler = factories(
            optimizers, optimizer_factory, lr_scheduler_factory, self.make_model
        )
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        if model_init is not None and (optimizers[0] is not None or optimizers[1] is not None):
            do = "Override create_optimizer_and_scheduler instead."
            raise BadArgument(expected("no optimizers with model_init, which makes a new model", "both", do))
        if model is None:
            self._init_model()
        prepare_model(self.make_model(), self.args)
        self._inspect_model()
        set_log_level(self.args)
        for callback in callbacks_of(self.args):
            self.add_callback(callback)
        if self.args.push_to_hub:
            self.init_hf_repo()
        self._dispatch_event("on_init_end")

    def _initial_callbacks(self, given: Iterable[Any] | None) -> list[Any]:
        return combined_callbacks(self.default_callbacks(), given)

    def _init_model(self, trial: Any = None) -> None:
        """Make the model with `model_init`, after seeding: each `train()` starts from the same weights."""
        seed_everything(self.args.seed, deterministic=False)
        self.model = None
        self.make_model(trial)

    # -- training ------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train. A second call starts a new run from the current weights, or from those of `model_init`.

        `resume_from_checkpoint` (default: the argument of that name) is the path of a checkpoint, True for the newest
        in `output_dir`, or "auto" for the newest if there is one. `ignore_keys_for_eval` are outputs of the model that
        evaluations do not collect.
        """
        if kwargs:
            raise BadArgument(expected("no further arguments to train()", ", ".join(kwargs), "Set them in args."))
        if self.train_dataset is None and not self._overrides("get_train_dataloader"):
            raise BadArgument("Expected a train_dataset to train on, received none. Pass it to the trainer.")
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        self._resume = find_checkpoint(wanted, self.args.output_dir)
        self._ignore_keys_for_eval = ignore_keys_for_eval
        self.is_in_train = self._begins_training = True
        try:
            if self.model_init is not None:
                self._init_model(trial)
                self._run = self.optimizer = self.lr_scheduler = None
            align_special_tokens(self.make_model(), self.processing_class)
            memory = MemoryMetrics(self.args, "train")
            with training_features(self.make_model(), self.args):
                output = super().train()
            output.metrics.update(memory.collect())
            return output
        finally:
            self.is_in_train = self._begins_training = False

    def check(self, raise_on_failure: bool = True) -> CheckReport:
        """Check within seconds whether this run will work, without changing model, optimizer or random state."""
        with self._process_settings():
            return check_run(self._ready_run(), raise_on_failure)

    def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Build a run if there is none, or if training starts again; evaluations use the current one."""
        self._eval_data = eval_dataset
        trains, self._begins_training = self._begins_training, False
        if self._run is None or (trains and (self._has_trained or self._evaluates_only)):
            if self._run is not None:  # another run starts with an optimizer of its own
                self.optimizer = self.lr_scheduler = None
            self._run = self._make_run(trains)
            self._has_trained = False

    def _make_run(self, trains: bool) -> HfRun:
        if self._sharded_by is not None:
            raise BadArgument(
                f"An earlier run has sharded the model ({self._sharded_by}), and it cannot be sharded again. Create a "
                "new trainer with a new model, and load the weights or a checkpoint."
            )
        model = self.make_model()
        strategy, replicas = self._join_strategy(), self._num_replicas()
        if replicas > 1 and self._overrides("training_step"):
            do = "Override compute_loss instead: gradients are all-reduced with the last loss of a step."
            raise BadArgument(expected("training_step to be overridden in a single process", f"{replicas} ranks", do))
        train = self._train_data() if trains or self.train_dataset is not None else None
        evaluation = self._first_eval_data()
        self._evaluates_only = train is None or (
            not trains and planned_steps(self.args, self._batches_of(train)) is None
        )
        if self._evaluates_only:
            train = None
        settings = settings_of(self.args, self._batches_of(train), self._resume, strategy, replicas)
        if train is None or is_loader(train) or is_stream(train) or isinstance(train, Mixture):
            settings.sampler = None  # loaders, streams and mixtures define their own order
        if train is None:
            settings.scheduler = None  # needs the number of steps
            if not any(p.requires_grad for p in model.parameters()):
                settings.optimizer = SGD(model.parameters(), lr=0.0)  # a frozen model can be evaluated
        if train is not None:
            self._set_optimizer(settings, settings.max_steps or planned_steps(self.args, self._batches_of(train)))
        if isinstance(self.eval_dataset, dict):
            settings.monitor_metric = self._monitored_of_several(settings.monitor_metric, trains)
        self._handle = HfHandle(self)
        run = HfRun(
            self._handle,
            ModelTask(self, model),
            settings,
            data=train if train is not None else evaluation,
            val_data=evaluation,
            callbacks=self._callbacks,
            passed=frozenset(settings.values()),
            options=front_options(self.args),
        )
        if not run.process_group.is_single_process and run.backend.strategy.name not in _UNSHARDED:
            self._sharded_by = run.backend.strategy.name
        self._handle._run = run
        run.connect()
        if train is not None:
            self.optimizer = run.backend.optimizer
            self.lr_scheduler = getattr(run.backend.schedule, "scheduler", run.backend.schedule)
        self.train_dataloader, self.eval_dataloader = self._handle.train_dataloader, self._handle.val_dataloader
        return run

    def _monitored_of_several(self, monitor: str, trains: bool) -> str:
        """The monitored metric with several evaluation datasets, whose names are part of those of their metrics."""
        names, wanted = list(map(str, self.eval_dataset)), self.args.metric_for_best_model
        found = native_name(monitor.replace("val/", "eval_", 1), names)
        is_ours = not self._overrides("evaluate", "_evaluate", "evaluation_loop")
        if trains and wanted is not None and is_ours and found == monitor and self.args.eval_strategy != "no":
            metric = wanted.removeprefix("eval_")
            do = f"Such as {', '.join(f'eval_{name}_{metric}' for name in names[:4])}."
            what = "metric_for_best_model to name a metric of one of the evaluation datasets"
            raise BadArgument(expected(what, wanted, do))
        return found

    def _train_data(self) -> Any:
        """What the run trains on: the dataset, or the loader of a user who overrides how it is made."""
        if self._overrides("get_train_dataloader", "_get_train_sampler", "_get_dataloader"):
            return self.get_train_dataloader()
        return as_dataset(self.train_dataset)

    def _first_eval_data(self) -> Any:
        """The evaluation data that the run keeps a source for: the only dataset, or the first of several."""
        given = self.eval_dataset if self._eval_data is None else self._eval_data
        return as_dataset(next(iter(given.values())) if isinstance(given, dict) else given)

    def _join(self) -> TorchProcessGroup:
        return self._ready_run().process_group

    def _train_loop(self) -> TrainOutput:
        run = self._run
        assert run is not None
        self._has_trained = True
        run.settings.resume = self._resume
        if self.args.eval_on_start:
            self.evaluate()
        began, first_step = time.perf_counter(), run.state.step
        fit(run)
        metrics = dict(self._bridge.last_summary or training_summary(self._handle, began, first_step))
        metrics["epoch"] = self.state.epoch
        append_record(self.state.log_history, {**metrics, "step": run.state.step})
        if self.args.load_best_model_at_end:
            self._load_best_model()
        return TrainOutput(run.state.step, metrics["train_loss"], metrics)

    @property
    def stopped_by(self) -> str | None:
        """The name of the callback that stopped the latest run; None if it was not stopped."""
        control = None if self._run is None else self._run.control
        return control.stopped_by if control is not None and control.should_stop else None

    @property
    def stop_reason(self) -> str | None:
        """Why the latest run was stopped; None if it was not."""
        control = None if self._run is None else self._run.control
        return control.stop_reason if control is not None and control.should_stop else None

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Write a checkpoint. Override it to do more; the files of `save_model` are part of it."""
        assert self._run is not None
        self._run.save_now()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint. Override it to load what an overridden `_save` has written."""
        self._ready_run().load(Path(resume_from_checkpoint), only=["model"])

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, for `load_best_model_at_end`."""
        run = self._run
        assert run is not None
        best = run.settings.retention().ranked(CheckpointStore(Path(self.args.output_dir)).checkpoints())
        path = run.process_group.broadcast(str(best[0].path) if best else None)
        if path is None:
            logger.warning("load_best_model_at_end: no checkpoint has the metric %s", run.settings.monitor_metric)
            return
        self._bridge.state.best_model_checkpoint = path
        self._load_from_checkpoint(path)

    # -- data and optimizer --------------------------------------------------------------------------------

    def _batches_of(self, data: Any) -> int | None:
        if isinstance(data, Mixture):
            data = mixture_sampler(data, self.args, self._num_replicas())
        if data is None or not hasattr(data, "__len__"):
            return None
        if is_loader(data):
            return len(data)
        size = self.args.per_device_train_batch_size * self._num_replicas()
        return len(data) // size if self.args.dataloader_drop_last else math.ceil(len(data) / size)

    def _get_output_dir(self, trial: Any = None) -> str:
        """Where checkpoints are written."""
        return self.args.output_dir

    # -- callbacks and state -------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback: an object, a class to instantiate, or a name."""
        if self._run is None:
            super().add_callback(callback)
        else:
            self._run.add_callback(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first instance of a class, and return it; None if there is none."""
        return super().pop_callback(callback) if self._run is None else self._run.remove_callback(callback)

    @property
    def state(self) -> TrainerState:
        """The progress of the run."""
        if self._run is not None:
            self._bridge.refresh(self._handle)
            self._bridge.sync_history(self._handle)
        return self._bridge.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._bridge.state = state

    def log(self, logs: dict[str, float], start_time: float | None = None) -> TrainerControl:
        """Add the epoch to metrics, send them to the loggers, add them to the log history, and dispatch `on_log`."""
        logs.setdefault("epoch", self.state.epoch)
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        if self._record is not None:
            self._record.update(logs)  # an override of `log` adds to the record that the run is writing
            return self.control
        if self._run is not None and self._run.loop is not None and not self._called_by_run:
            self._run.log({from_hf_name(name): value for name, value in logs.items()}, self._run.state.step)
        return super().log(logs)

    def _call_callback(self, callback: Any, event: str, extra: dict[str, Any]) -> None:
        if self._run is None:
            super()._call_callback(callback, event, extra)
        else:
            self._bridge.call(self._handle, callback, event, extra)

    def unsharded_model(self) -> nn.Module:
        """The model with all weights on rank 0. A collective operation if the model is sharded."""
        return self.make_model() if self._run is None else self._run.backend.strategy.unsharded_model()

    def _weights(self) -> dict[str, Any]:
        model = self.unsharded_model()
        return adapter_state_dict(model) if is_adapted(model) else model.state_dict()

    def get_state_components(self) -> list[StateComponent]:
        """The components of a checkpoint, under Forgather's names."""
        names = {"schedule": "scheduler", "run": "trainer", "data": "dataset"}
        return [replace(part, key=names.get(part.key, part.key)) for part in self._components()]

    def _components(self) -> list[StateComponent]:
        return self._ready_run().components()

    def load_checkpoint(self, checkpoint_path: Any = None) -> None:
        """Load a checkpoint, by default the newest in `output_dir`; the next `train()` resumes from it."""
        path = self._checkpoint_at(checkpoint_path)
        if self._has_trained:
            self._run = None
        self._ready_run().load(path)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the progress of a run."""
        super().load_state_dict(state_dict)
        run = self._ready_run()
        state, settings = run.state, run.settings
        state.step, state.epoch = state_dict["global_step"], state_dict["raw_epoch"]
        state.tokens = state_dict["num_input_tokens_seen"]
        state.batch = (state.step - state_dict["epoch_start_step"]) * settings.accumulation_steps
        state.position = state.batch * settings.batch_size


class DDPTrainer(Trainer):
    """Every rank has a copy of the model and computes a part of each batch. The default of `Trainer`, too."""

    strategy = "ddp"


class FSDPTrainer(Trainer):
    """Parameters, gradients and optimizer states are sharded over the ranks (FSDP2)."""

    strategy = "fsdp"


class TPTrainer(Trainer):
    """The layers of the model are sharded over the ranks (tensor parallelism)."""

    strategy = "tp"


class PipelineTrainer(Trainer):
    """Each rank holds some layers of the model; micro-batches pass through the ranks (pipeline parallelism)."""

    strategy = "pipeline"


class AccelTrainer(Trainer):
    """Trains with an `Accelerator` of accelerate: the one passed, or one created from `strategy_options`."""

    strategy: Any = "accelerate"

    def __init__(self, *args: Any, accelerator: Any = None, **kwargs: Any) -> None:
        if accelerator is not None:
            if type(accelerator).__name__ != "Accelerator":
                raise BadArgument(
                    expected("accelerator to be an Accelerator of accelerate", type(accelerator).__name__)
                )
            self.strategy = accelerator
        super().__init__(*args, **kwargs)

    @property
    def accelerator(self) -> Any:
        """The `Accelerator`, or None before the first run has created one."""
        if not isinstance(self.strategy, str):
            return self.strategy
        return None if self._run is None else getattr(self._run.backend.strategy, "accelerator", None)
