"""A run on torch: task, data and backend, and what can be asked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch import TorchBackend
from trainformer.backends.torch.flops import count_flops
from trainformer.backends.torch.gradient_norms import GradientNorms
from trainformer.backends.torch.state import cloned, gathered
from trainformer.checkpointing import SharingPattern, StateComponent
from trainformer.checkpointing.checkpointer import Assets, load_components
from trainformer.checkpointing.components import callback_states
from trainformer.checkpointing.torch_components import is_trained, torch_components
from trainformer.checkpointing.torch_files import write_single_file
from trainformer.core.optional import require
from trainformer.core.types import DataSource
from trainformer.distributed import TorchProcessGroup
from trainformer.engine import Event
from trainformer.run.components import common_components
from trainformer.run.predictions import Columns, format_of, write_file
from trainformer.run.run import Run
from trainformer.run.torch.dry_run import DryRun
from trainformer.run.torch.evaluation import Inputs
from trainformer.run.torch.exporting import Export
from trainformer.run.torch.monitors import check_evaluated, check_monitored, check_monitors
from trainformer.run.torch.provenance import record_config, record_derived
from trainformer.run.torch.record import RecordedData, with_record
from trainformer.run.torch.settings import RunSettings
from trainformer.run.torch.setup import TorchParts, build_run, check_launch
from trainformer.tasks.base import provides
from trainformer.utils.files import check_local


class TorchRun(Run):
    """One run on torch. Takes the arguments of `build_run`; `owner` is what callbacks receive as `trainer`."""

    parts: TorchParts
    settings: RunSettings
    process_group: TorchProcessGroup
    backend: TorchBackend
    train_source: DataSource

    def __init__(self, owner: Any, task: Any, settings: RunSettings, **options: Any) -> None:
        parts = build_run(owner, task, settings, **options)
        self.task = task
        self.info = parts.info
        self.same_classes = parts.same_classes
        self._evaluation = parts.evaluation
        self._began_at = 0  # the step at which `fit` was called
        self._gradient_norms: list[GradientNorms] = []
        super().__init__(owner, parts)

    # -- description -------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return type(self.task).__name__

    def describe(self) -> str:
        backend = self.backend
        parameters = backend.strategy.count_parameters(backend.parameters)
        together = "" if self.process_group.is_single_process else f" ({backend.strategy.describe()})"
        name = getattr(self.task, "title", self.title)
        return (
            f"{name} on {backend.device}{together} in {backend.precision.name}: {parameters:,} trainable parameters"
            f"{_low_precision(backend.parameters)}"
        )

    def model_shapes(self) -> list[tuple[str, list[int]]]:
        return [(name, list(p.shape)) for name, p in self.task.model.named_parameters()]

    def assets(self) -> Assets | None:
        save_assets = self.task.save_assets if provides(self.task, "save_assets") else None
        return with_record(self, save_assets) if self.options.records_task else save_assets

    def backend_handlers(self) -> dict[Event, Any]:
        # At the beginning, too: a state may have been saved after the epoch was counted and before its end was handled.
        recorders = {Event.BEFORE_OPTIMIZER_STEP: self._record_gradients} if self._gradient_norms else {}
        return recorders | {
            Event.EPOCH_BEGIN: lambda epoch: self.backend.end_epoch(epoch),
            Event.EPOCH_END: lambda epoch, metrics: self._end_epoch(epoch + 1),
            Event.TRAIN_BEGIN: self._begin_training,
            Event.TRAIN_END: lambda: self._warn_of_idle(is_end=not self.control.should_stop),
        }

    def gradient_norms(self, every: int) -> GradientNorms:
        """Records gradient norms from now on, those of single parameters in every `every`-th step."""
        made = GradientNorms(lambda: self.task.model, self.backend, every)
        self._gradient_norms.append(made)
        return made

    def _record_gradients(self, step: int) -> None:
        for norms in self._gradient_norms:
            norms.record(step)

    def _begin_training(self) -> None:
        self._began_at = self.state.step

    def _end_epoch(self, epochs: int) -> None:
        self.backend.end_epoch(epochs)
        self._warn_of_idle(is_end=False)

    def _warn_of_idle(self, is_end: bool) -> None:
        self.backend.warn_of_idle(self.state.step - self._began_at, is_end)

    def total_steps(self) -> int | None:
        # Without its data a run does not train, but the schedules that a task declares are still built.
        return 1 if isinstance(self.parts.data, RecordedData) else super().total_steps()

    def connect(self) -> None:
        super().connect()
        self.check_monitors()

    def check_monitors(self) -> None:
        """Raise if something monitors a metric that cannot exist; a run without its data monitors nothing."""
        if not isinstance(self.parts.data, RecordedData):
            check_monitors(self)

    def check_monitored(self) -> None:
        check_monitored(self)

    def task_handlers(self) -> dict[Event, Any]:
        task = self.task
        handlers = {
            "on_train_begin": (Event.TRAIN_BEGIN, lambda: task.on_train_begin()),
            "on_train_end": (Event.TRAIN_END, lambda: task.on_train_end()),
            "on_epoch_begin": (Event.EPOCH_BEGIN, lambda epoch: task.on_epoch_begin(epoch)),
            "on_epoch_end": (Event.EPOCH_END, lambda epoch, metrics: task.on_epoch_end(epoch, metrics)),
            "on_step_end": (Event.STEP_END, lambda step, loss: task.on_step_end(step, self.total_steps() or 0)),
            "training_records": (Event.LOG, lambda metrics: self._record_training()),
            "on_validation_end": (Event.EVAL_END, lambda metrics: task.on_validation_end(metrics)),
        }
        return {event: handler for name, (event, handler) in handlers.items() if provides(task, name)}

    def _record_training(self) -> None:
        for kind, content in self.task.training_records().items():
            self.records.add(kind, content)

    def device_info(self) -> dict[str, Any]:
        return {"device": str(self.backend.device), "precision": self.backend.precision.name}

    def fault_counters(self) -> dict[str, int]:
        return {"skipped": self.backend.guard.skipped, "pieces": self.backend.splitter.pieces}

    @property
    def peak_memory_gb(self) -> float | None:
        device = self.backend.device  # the CUDA allocator counts on the host: no sync
        return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        return self.task.evaluation_records() if provides(self.task, "evaluation_records") else {}

    @property
    def accelerator(self) -> str | None:
        device = self.backend.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else None

    @property
    def num_devices(self) -> int:
        return self.process_group.world_size

    def flops_per_sample(self) -> float | None:
        with self.sandbox() as dry_run:
            batch = next(dry_run.batches())
            flops = count_flops(lambda: dry_run.step(batch))
        if flops is None:
            return None
        # Ranks that hold parts of one model count their parts. 0 samples: this rank computes a borrowed one.
        parts = self.process_group.world_size // self.process_group.dp_world_size
        return flops * parts / max(batch.size, 1)

    def check_launch(self) -> None:
        check_launch(self.backend.strategy)
        self.backend.check_due(self.total_steps())

    def record_config(self) -> None:
        record_config(self)

    def record_derived(self) -> None:
        record_derived(self)

    # -- evaluation and prediction -----------------------------------------------------------------------------

    def evaluate(self, names: Sequence[str] = ()) -> dict[str, float]:
        metrics = super().evaluate(names)
        if metrics:
            check_evaluated(self, metrics)
        self.backend.observe(metrics, self.settings.monitor_metric)
        return metrics

    def validate(self, name: str) -> dict[str, float]:
        return self._evaluation.validate([name])

    def evaluate_on(self, data: Any = None, batch_size: int | None = None, most: int | None = None) -> dict[str, float]:
        """Evaluate on the validation data, or on other data; on the first `most` batches, if given."""
        return self._evaluation.evaluate(data, batch_size, most)

    def evaluate_without_ema(self, names: Sequence[str] = ()) -> dict[str, float]:
        """Evaluate the trained weights, even if a callback provides others (an EMA) for evaluation."""
        return self._evaluation.validate(names, model=self.task.model)

    def evaluate_first_batches(self, most: int, names: Sequence[str] = ()) -> dict[str, float]:
        """Metrics of a few batches of each validation set, or of the sets of these names."""
        return self._evaluation.validate(names, most)

    @property
    def measures_more(self) -> bool:
        """Whether evaluations may have metrics that `evaluate_first_batches` does not know."""
        return False

    def can_repeat_evaluations(self, names: Sequence[str] = ()) -> bool:
        """Whether an additional evaluation changes nothing: a stream may not begin again at its first batch."""
        return self._evaluation.can_repeat(names)

    def dry_evaluation(self, names: Sequence[str], most: int | None) -> dict[str, float]:
        """Metrics of the first `most` batches of validation sets, which no callback hears of."""
        return self._evaluation.validate(names, most, quiet=True)

    def embed(self, data: Any = "val", max_samples: int | None = None) -> dict[str, Tensor]:
        """Embeddings (and labels) of "train", "val", "val/NAME", or anything that `predict` accepts."""
        return self._evaluation.embed(data, max_samples)

    def sample_predictions(self, max_samples: int, inputs: Inputs, val_set: str | None = None) -> dict[str, Tensor]:
        """Inputs and predictions of some validation samples."""
        return self._evaluation.sample_predictions(max_samples, inputs, val_set)

    def eval_mode(self) -> AbstractContextManager[None]:
        """Eval mode with the model to evaluate and its own random numbers."""
        return self._evaluation.inference.eval_mode()

    def predict(self, data: Any, batch_size: int | None = None, **options: Any) -> list[dict[str, Any]]:
        """One dict per sample, in input order."""
        return self._evaluation.predict(data, batch_size, **options)

    def predicted_columns(self, data: Any, batch_size: int | None = None, **options: Any) -> Iterator[Columns]:
        """Predictions with ids and class names, batch by batch. A collective: every rank must take all of them."""
        return self._evaluation.predicted_columns(data, batch_size, **options)

    def write_predictions(
        self, data: Any, path: Path, batch_size: int | None = None, format: str | None = None, **options: Any
    ) -> int:
        """Write predictions to a file as they are made; returns their number. A collective: rank 0 writes."""
        form = format or format_of(path)
        if form == "parquet":
            require("pyarrow", "datasets", "to write Parquet")
        batches = self.predicted_columns(data, batch_size, **options)
        return self.consume_on_main(batches, lambda b: write_file(b, path, form))

    def consume_on_main(self, batches: Iterator[Columns], function: Callable[[Iterator[Columns]], int]) -> int:
        """Call a function with batches on rank 0, and return its result. If it fails there, all ranks fail."""
        if not self.process_group.is_main:
            _exhaust(batches)

        def consume() -> int:
            try:
                return function(batches)
            except Exception:
                if not self.process_group.is_single_process:
                    _exhaust(batches)  # the other ranks predict on
                raise

        return int(self.process_group.run_on_main(consume))

    def exported(self, input_shape: tuple[int, ...] | None, preprocess: bool) -> Export:
        """The model to export, with its preprocessing. A collective."""
        return Export(self, input_shape, preprocess)

    def inference_model(self) -> nn.Module:
        """The model to evaluate, predict and export with."""
        return self._evaluation.inference.model()

    # -- state -------------------------------------------------------------------------------------------------

    def components(self) -> list[StateComponent]:
        return torch_components(
            self.task,
            self.backend,
            self.train_source,
            common_components(self),
            callback_states(self.callbacks.named()),
        )

    def save_file(self, path: Path) -> Path:
        """Write everything to a single file. A collective: rank 0 writes."""
        check_local("the file", path)
        states = {c: gathered(c.stateful.state_dict()) for c in self.components()}
        own = {c.key: state for c, state in states.items() if c.sharing_pattern is SharingPattern.PER_RANK}
        per_rank = self.process_group.all_gather_object(own)
        content = {c.key: state for c, state in states.items()}
        self.process_group.run_on_main(lambda: write_single_file(path, content, per_rank))
        return path

    def unsharded_model(self) -> nn.Module:
        """The model to evaluate, predict and export with, all of it on this rank. A collective."""
        chosen, model = self.inference_model(), self.backend.strategy.unsharded_model()
        if model is self.task.model:  # not sharded
            return chosen
        if chosen is not self.task.model:
            model.load_state_dict(gathered(chosen.state_dict()))
        return model

    @contextmanager
    def sandbox(self) -> Iterator[DryRun]:
        """For trial steps: afterwards model, optimizer, random numbers and position are as before."""
        before = self.trained_state()
        preserved = getattr(self.train_source, "preserved_position", nullcontext)
        try:
            with preserved():
                yield DryRun(self)
        finally:
            self.backend.drop_step()
            self.backend.guard.reset()
            self.restore_trained(before)

    def trained_state(self) -> dict[str, Any]:
        """A copy of everything that steps change."""
        to_host = self.backend.device.type != "cpu"
        return {c.key: cloned(c.stateful.state_dict(), to_host) for c in self.components() if is_trained(c)}

    def restore_trained(self, state: dict[str, Any]) -> None:
        """Restore what `trained_state` returned."""
        load_components([c for c in self.components() if c.key in state], state)


def _exhaust(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def _low_precision(parameters: Iterable[Tensor]) -> str:
    """Which dtypes other than float32 and float64 the parameters have."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters} - {"float32", "float64"})
    return f" ({', '.join(dtypes)})" if dtypes else ""
