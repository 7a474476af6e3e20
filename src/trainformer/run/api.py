"""What users and callbacks see of a trainer, whatever the entry point and the framework."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.context import PipelineContext
from trainformer.engine import Control, DataSource, LazyScalar, RunState

if TYPE_CHECKING:
    from trainformer.run.run import Run


class BatchLoader:
    """The batches of a source, as callbacks written for other trainers expect them: a loader with a length."""

    def __init__(self, source: DataSource, batch_size: int) -> None:
        self._source = source
        self.batch_size = batch_size

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches, if known."""
        return self._source.batches_per_epoch

    @property
    def dataset(self) -> Any:
        """The dataset behind the batches."""
        loader = getattr(self._source, "loader", None)
        return getattr(self._source, "dataset", None) or getattr(loader, "dataset", loader)

    def __bool__(self) -> bool:
        return True  # also for a stream, which has no length

    def __len__(self) -> int:
        length = self.batches_per_epoch
        if length is None:
            raise TypeError("these batches come from a stream, which has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        return (batch.data for batch in self._source.batches(0))


class TrainerApi:
    """The `trainer` that callbacks get (see `callbacks.base.TrainerLike`), for any entry point."""

    _run: Run

    def stop(self, reason: str) -> None:
        """Stop training after the current step."""
        self._run.stop(reason)

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Log further metrics at the current step."""
        self._run.log(metrics, self.state.step)

    def record(self, kind: str, **content: Any) -> None:
        """Write a line to the run's ``records.jsonl``: an event, or a result that is not a number.

        `kind` is your own name, or one that reports know (see docs/trainer.md). The content must be JSON-serialisable.
        """
        self._run.records.add_custom(kind, content)

    # -- state -------------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """The progress of the run."""
        return self._run.state

    @property
    def control(self) -> Control:
        """Requests to the loop: log, evaluate, save, stop."""
        return self._run.control

    @property
    def context(self) -> PipelineContext:
        """Config with provenance, and shared state."""
        return self._run.context

    @property
    def best_metrics(self) -> dict[str, float]:
        """Metrics of the best evaluation, by `monitor_metric`."""
        return self.state.best_metrics

    @property
    def active_optimizer(self) -> Any:
        """The optimizer in use; the field `optimizer` is what was configured. Of several, the one updated last."""
        backend: Any = self._run.backend
        return backend.optimizer

    @property
    def active_scheduler(self) -> Any:
        """The learning-rate schedule in use."""
        backend: Any = self._run.backend
        return backend.schedule

    @property
    def current_loss(self) -> LazyScalar | None:
        """The loss of the last step, still on the device; None before the first."""
        return None if self._run.loop is None else self._run.loop.loss

    @property
    def current_lr(self) -> float | None:
        """The learning rate of the last step; None before the first, or if only the device knows it."""
        return None if self._run.loop is None else self._run.loop.lr

    @property
    def grad_norm(self) -> Any:
        """Gradient norm of the last step before clipping, still on the device."""
        return self._run.backend.grad_norm

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self._run.process_group.is_main

    @property
    def is_local_main(self) -> bool:
        """Whether this process has local rank 0."""
        return getattr(self._run.process_group, "local_rank", 0) == 0

    @property
    def logger(self) -> Any:
        """The loggers of the run."""
        return self._run.loggers

    @property
    def run_folder(self) -> Path | None:
        """The run folder, once the run has started."""
        return None if self._run.folder is None else self._run.folder.path

    @property
    def output_folder(self) -> Path:
        """Where callbacks write files: the run folder, else that of the checkpoints, else the working directory."""
        run = self._run
        return self.run_folder or (Path() if run.checkpointer is None else run.checkpointer.store.root)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, or None if unknown."""
        return self._run.total_steps()

    @property
    def accelerator(self) -> str | None:
        """The vendor's name of the accelerator, such as "NVIDIA H200", or None on a CPU."""
        return self._run.accelerator

    @property
    def num_devices(self) -> int:
        """Over how many devices the run is spread."""
        return self._run.num_devices

    @property
    def peak_memory_gb(self) -> float | None:
        """Peak memory of the accelerator so far, or None on a CPU."""
        return self._run.peak_memory_gb

    def flops_per_sample(self) -> float | None:
        """FLOPs of an optimizer step per sample, over all devices; None if they cannot be counted."""
        return self._run.flops_per_sample()

    @property
    def train_dataloader(self) -> Any:
        """The training batches of this run, as an iterable with a length."""
        return BatchLoader(self._run.train_source, self._run.settings.batch_size)

    @property
    def val_dataloader(self) -> Any:
        """The validation batches, or None without validation data; of several sets, those of the first."""
        return next(iter(self.val_dataloaders.values()), None)

    @property
    def val_dataloaders(self) -> dict[str, Any]:
        """The validation batches by the name of the set; validation data without a name has the empty one."""
        settings = self._run.settings
        size = settings.eval_batch_size or settings.batch_size
        return {name: BatchLoader(source, size) for name, source in self._run.val_sources.items()}

    @property
    def val_sets(self) -> tuple[str, ...]:
        """The names of the validation sets; empty if the validation data has no name, or if there is none."""
        return self._run.val_sets

    @property
    def evaluated_sets(self) -> tuple[str, ...]:
        """The names of those that the current or latest evaluation includes."""
        return self._run.evaluated_sets

    def add_callback(self, callback: Any) -> None:
        """Add a callback after the others; also during the run."""
        self._run.add_callback(callback)

    def remove_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class; returns it, if there was one."""
        return self._run.remove_callback(callback)

    # -- names used by callbacks written for the reference plan -------------------------------------------

    _ctx = property(lambda self: self.context)
    _step = property(lambda self: self.state.step)
    _epoch = property(lambda self: self.state.epoch)
    _max_steps = property(lambda self: self.total_steps or 0)
    _logger = property(lambda self: self.logger)
    _optimizer = property(lambda self: self.active_optimizer)
    _scheduler = property(lambda self: self.active_scheduler)
    _callbacks = property(lambda self: self._run.callbacks)
    _should_stop = property(
        lambda self: self.control.should_stop,
        lambda self, value: self.stop("a callback set _should_stop") if value else self.control.reset(),
    )


def run_of(trainer: Any) -> Any:
    """The `Run` behind a trainer of any entry point: its backend, sources, checkpointer and process group.

    For tests, debuggers and tools; callbacks should keep to `TrainerLike`.

    >>> import torch, trainformer
    >>> class Line:
    ...     def __init__(self):
    ...         self.model = torch.nn.Linear(1, 1)
    ...     def train_step(self, batch):
    ...         return (self.model(batch[0]) ** 2).mean()
    ...     def eval_step(self, batch):
    ...         return {"loss": self.train_step(batch)}
    >>> trainer = trainformer.Trainer(Line(), (torch.ones(4, 1),), log="none")
    >>> run_of(trainer).process_group.world_size
    1
    """
    return trainer._run
