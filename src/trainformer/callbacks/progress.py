"""Progress bar for terminals and notebooks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from trainformer.callbacks.base import TrainerLike

if TYPE_CHECKING:
    from trainformer.callbacks.notebook import NotebookDisplay

# Redrawing costs about 20 us; ten times a second is smooth and costs nothing measurable.
_SECONDS_BETWEEN_UPDATES = 0.1


class ProgressBar:
    """Progress bar with steps, time left, loss, learning rate and throughput, and a second bar while evaluating.

    Draws nothing if the output is not a terminal; the console logger writes lines to log files instead. In a notebook
    it also plots the training loss and the monitored metric.
    """

    sets_control = False

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bar: Progress | None = None
        self._training: TaskID | None = None
        self._evaluating: TaskID | None = None
        self._drawn = 0.0
        self._display: NotebookDisplay | None = None

    @property
    def is_open(self) -> bool:
        """Whether a bar is on the screen."""
        return self._bar is not None

    def on_train_begin(self, trainer: TrainerLike) -> None:
        if self.console.is_jupyter and not self.console.quiet:
            from trainformer.callbacks.notebook import NotebookDisplay

            self._display = NotebookDisplay(getattr(trainer, "monitor_metric", None) or "val/loss")
            self._display.begin(trainer.state.step, trainer.total_steps, getattr(trainer.state, "log_history", ()))
        if not self._can_draw():
            return
        self._open(transient=False)
        assert self._bar is not None
        total = trainer.total_steps
        self._training = self._bar.add_task("training", total=total, completed=trainer.state.step, values="")

    def on_epoch_begin(self, trainer: TrainerLike, epoch: int) -> None:
        if self._display is not None:
            self._display.move(trainer.state.step, epoch)
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, description=f"epoch {epoch + 1}")

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        if self._display is not None:
            self._display.move(step)
        if self._bar is None or self._training is None:
            return
        now = time.perf_counter()
        if now - self._drawn >= _SECONDS_BETWEEN_UPDATES:
            self._drawn = now
            self._bar.update(self._training, completed=step)

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        if self._display is not None:
            self._display.log(trainer.state.step, metrics)
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, completed=trainer.state.step, values=summary(metrics))

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        if self._display is not None:
            self._display.log(trainer.state.step, metrics)

    def on_validation_batch_end(self, trainer: TrainerLike, done: int, total: int | None) -> None:
        """Show a bar for an evaluation or prediction, during training or outside of it."""
        if self._display is not None:
            self._display.evaluate(done, total)
        if self._bar is None:
            if not self._can_draw():
                return
            self._open(transient=True)
        assert self._bar is not None
        if self._evaluating is None:
            self._evaluating = self._bar.add_task("evaluating", total=total, values="")
        self._bar.update(self._evaluating, completed=done)

    def on_validation_cleanup(self, trainer: TrainerLike) -> None:
        """Remove that bar, also after an error."""
        if self._display is not None:
            self._display.evaluate(0, None)
        if self._bar is not None and self._evaluating is not None:
            self._bar.remove_task(self._evaluating)
            self._evaluating = None
        if self._training is None and self._display is None:
            self._close()

    def on_train_end(self, trainer: TrainerLike) -> None:
        if self._display is not None:
            control: Any = getattr(trainer, "control", None)  # missing in hf.ProgressCallback's view of a trainer
            stopped = control is not None and control.should_stop
            reason = f"by {control.stopped_by}: {control.stop_reason}" if stopped else None
            self._display.end(trainer.state.step, reason)
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, completed=trainer.state.step)
        self._close()

    def on_error(self, trainer: TrainerLike, error: BaseException) -> None:
        if self._display is not None:
            self._display.fail(error)
        self._close()

    def _can_draw(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def _open(self, transient: bool) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[values]}"),
            console=self.console,
            transient=transient,
        )
        self._bar.start()

    def _close(self) -> None:
        self._display = None
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._training = self._evaluating = None


def summary(metrics: Mapping[str, float]) -> str:
    """Loss, learning rate and throughput of a log record in one line."""
    parts = []
    if "train/loss" in metrics:
        parts.append(f"loss {metrics['train/loss']:.4f}")
    if "train/lr" in metrics:
        parts.append(f"lr {metrics['train/lr']:.1e}")
    for key, unit in (("train/tokens_per_second", "tok/s"), ("train/samples_per_second", "samples/s")):
        if key in metrics:
            parts.append(f"{metrics[key]:,.0f} {unit}")
            break
    return "  ".join(parts)
