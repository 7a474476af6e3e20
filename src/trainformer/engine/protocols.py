"""Protocols of the parts that the loop drives: data source, backend, services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from trainformer.core.types import DeviceBatch, EvalResult, HostBatch, StepResult


class Backend(Protocol):
    """The framework. One update of an optimizer is: `accumulate` per micro-batch, `finish`, `update`, `end_step`."""

    @property
    def may_repeat(self) -> bool:
        """Whether a step may have to be repeated, so that its micro-batches have to be kept."""

    @property
    def wants_lookahead(self) -> bool:
        """Whether it matters if a micro-batch is the last of its step (see `DeviceBatch.more`)."""

    @property
    def wants_window(self) -> bool:
        """Whether all micro-batches of a step are passed to `begin_window` before the first is accumulated."""

    def begin_window(self, batches: Sequence[DeviceBatch]) -> None:
        """The micro-batches of the next step, if `wants_window`."""

    def any_rank_has_request(self) -> bool:
        """Whether any rank has a request for all ranks: the same answer on every rank, once per step."""

    def feed(self, batches: Iterable[HostBatch], train: bool) -> Iterator[DeviceBatch]:
        """Move batches to the device, prefetching one where the copy can overlap with compute."""

    def begin_training(self) -> None:
        """Put the model into training mode; called before each epoch and after each evaluation."""

    def updates(self, step: int, window: Iterable[DeviceBatch]) -> Iterable[Any]:
        """The updates of a step over a window of micro-batches: one, or one for each of several optimizers."""

    def accumulate(self, batch: DeviceBatch) -> bool:
        """Forward and backward of one micro-batch; gradients accumulate. False: dropped, restart the step."""

    def finish(self) -> bool:
        """Divide gradients by the total weight and clip. False: gradients were dropped, repeat the step."""

    def update(self, step: int) -> StepResult:
        """The optimizer step. `step` is the number of steps done before. The result is that of all updates so far."""

    def end_step(self) -> None:
        """Zero the gradients."""

    def verify(self, step: int) -> dict[str, float]:
        """Raise if a step since the last call was not finite; else counters to log. Syncs with the device."""

    def eval_step(self, batch: DeviceBatch) -> EvalResult:
        """Metrics of one batch, without gradients."""

    def read(self, scalars: Sequence[Any]) -> list[float]:
        """Values of device scalars (and plain numbers) in one transfer."""

    def fold(self, scalars: Sequence[Any]) -> Any:
        """Their sum, still on the device."""

    def join_rows(self, pieces: list[Any]) -> Any:
        """Rows of several batches as one, on the host."""


class Services(Protocol):
    """What the loop triggers but does not do itself. Implemented by `run.Run`."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the loggers."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data; metrics with the prefix ``val/``."""

    def poll(self) -> None:
        """Called after every step: raise errors of background work. Must cost next to nothing."""

    def has_requests(self) -> bool:
        """Whether an external request (`trainformer ctl`) is waiting. Must cost next to nothing."""

    def take_requests(self) -> list[Any]:
        """External requests since the last call."""

    def apply_requests(self, requests: list[Any]) -> None:
        """Apply such requests to the control."""

    def is_worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation was good enough to keep a checkpoint of it."""

    def save(self) -> str | None:
        """Write a checkpoint; its path, or None if nothing was written."""
