"""What the engine asks of the parts it does not own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from trainformer.core.types import DeviceBatch, EvalResult, HostBatch, StepResult


class Backend(Protocol):
    """What a framework does. One optimizer step is: `accumulate` per micro-batch, `finish`, `update`."""

    @property
    def may_repeat(self) -> bool:
        """Whether a window may be asked for again, so that its batches have to be kept."""
        ...

    @property
    def wants_lookahead(self) -> bool:
        """Whether it matters if a micro-batch is the last of its step (see `DeviceBatch.more`)."""
        ...

    def others_ask(self) -> bool:
        """Whether a rank asks something of all of them: the same answer on every rank, once per step."""
        ...

    def feed(self, batches: Iterable[HostBatch], train: bool) -> Iterator[DeviceBatch]:
        """Put batches where the model is, one ahead where that can overlap with computing."""
        ...

    def begin_training(self) -> None:
        """Switch the model to training; called before each epoch and after each evaluation."""
        ...

    def accumulate(self, batch: DeviceBatch) -> bool:
        """Forward and backward of one micro-batch, its gradients added up. False: dropped, begin the window again."""
        ...

    def finish(self) -> bool:
        """Divide by the window's weight and clip. False: the gradients were dropped, repeat the window."""
        ...

    def update(self, step: int) -> StepResult:
        """Change the weights. `step` is the number of steps done before."""
        ...

    def end_step(self) -> None:
        """Drop the gradients."""
        ...

    def verify(self, step: int) -> dict[str, float]:
        """Raise if a step since the last call was not finite; counts to log otherwise. Waits for the device."""
        ...

    def eval_step(self, batch: DeviceBatch) -> EvalResult:
        """Metrics of one batch, without gradients."""
        ...

    def read(self, scalars: Sequence[Any]) -> list[float]:
        """Values of device scalars (and plain numbers) in one transfer."""
        ...

    def fold(self, scalars: Sequence[Any]) -> Any:
        """Their sum, still on the device."""
        ...

    def join_rows(self, pieces: list[Any]) -> Any:
        """Rows of several batches as one, on the host."""
        ...


class Services(Protocol):
    """What the loop decides on but does not do itself."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the loggers."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data; metrics with the prefix ``val/``."""
        ...

    def poll(self) -> None:
        """Asked after every step: raise what went wrong in the background. Must cost next to nothing."""
        ...

    def has_requests(self) -> bool:
        """Whether somebody asks something of the run from outside. Must cost next to nothing."""
        ...

    def take_requests(self) -> list[Any]:
        """What was asked for since the last call."""
        ...

    def carry_out(self, requests: list[Any]) -> None:
        """Enter such requests into the control."""
        ...

    def worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation was good enough to keep a checkpoint of it."""
        ...

    def save(self) -> str | None:
        """Write a checkpoint; where it is, or None if nothing was written."""
        ...
