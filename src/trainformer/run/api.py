"""What callbacks may use of a run, whatever way it was begun and whatever computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainformer.context import PipelineContext
from trainformer.engine import Control, RunState


class TrainerApi:
    """The `trainer` that callbacks get (see `callbacks.base.TrainerLike`), over the session of the run."""

    _run: Any

    def stop(self, reason: str) -> None:
        """Ask the run to end after the current step."""
        self._run.stop(reason)

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Hand further metrics to the loggers, at the current step."""
        self._run.log(metrics, self.state.step)

    def record(self, kind: str, **content: Any) -> None:
        """Write a line to the run's ``records.jsonl``: something that happened, or a result that is no number.

        `kind` is a word of your own, or one that reports know (see docs/trainer.md). Content must be JSON-able.
        """
        self._run.records.add_asked(kind, content)

    # -- looking -------------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """Where the run is."""
        return self._run.state

    @property
    def control(self) -> Control:
        """Requests to the loop: log, evaluate, save, stop."""
        return self._run.control

    @property
    def context(self) -> PipelineContext:
        """Config with provenance, and state that components share."""
        return self._run.context

    @property
    def best_metrics(self) -> dict[str, float]:
        """Metrics of the best evaluation, as told by `monitor_metric`."""
        return self.state.best_metrics

    @property
    def active_optimizer(self) -> Any:
        """The optimizer at work; the field `optimizer` is what was asked for."""
        return self._run.backend.optimizer

    @property
    def active_scheduler(self) -> Any:
        """The learning-rate schedule at work."""
        return self._run.backend.schedule

    @property
    def grad_norm(self) -> Any:
        """Norm of the last gradients before clipping, still on the device."""
        return self._run.backend.grad_norm

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and records."""
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
        """The folder of the run, once it has begun."""
        return None if self._run.folder is None else self._run.folder.path

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, or None if unknown."""
        return self._run.total_steps()

    @property
    def train_dataloader(self) -> Any:
        """The training batches of this run, as an iterable with a length."""
        return self._run.train_batches()

    @property
    def val_dataloader(self) -> Any:
        """The validation batches, or None without validation data."""
        return self._run.val_batches()

    def add_callback(self, callback: Any) -> None:
        """One more callback, after the others; also while the run goes on."""
        self._run.add_callback(callback)

    def remove_callback(self, callback: Any) -> Any:
        """Take out a callback, or the first of a class; what was taken out, if there was one."""
        return self._run.remove_callback(callback)

    # -- names that callbacks written for the reference plan use -------------------------------------------

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
    >>> trainer = trainformer.Trainer(Line(), (torch.ones(4, 1),), log="none")
    >>> run_of(trainer).process_group.world_size
    1
    """
    return trainer._run
