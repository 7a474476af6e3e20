"""Progress bar for terminals and notebooks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from trainformer.callbacks.base import TrainerLike
from trainformer.callbacks.pace import Pace, Point, clock

if TYPE_CHECKING:
    from trainformer.callbacks.notebook import NotebookDisplay
    from trainformer.engine.metrics import Poll

# Redrawing costs about 20 us; ten times a second is smooth and costs nothing measurable.
_SECONDS_BETWEEN_UPDATES = 0.1


class ProgressBar:
    """Progress bar with steps, time left, loss, learning rate and throughput, and a second bar while evaluating.

    The loss is that of a step a moment ago: its copy to the host is started and polled, so that nothing waits for the
    device. Throughput is that of the last ten seconds. Draws nothing if the output is not a terminal; the console
    logger writes lines to log files instead. In a notebook it also plots the training loss and the monitored metric.
    """

    sets_control = False

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bar: Progress | None = None
        self._training: TaskID | None = None
        self._evaluating: TaskID | None = None
        self._drawn = self._stepped = 0.0
        self._pace = Pace()
        self._poll: Poll | None = None  # for the loss that is on its way to the host
        self._values: dict[str, float] = {}
        self._display: NotebookDisplay | None = None

    @property
    def is_open(self) -> bool:
        """Whether a bar is on the screen."""
        return self._bar is not None

    def on_train_begin(self, trainer: TrainerLike) -> None:
        self._pace, self._poll, self._values = Pace(), None, {}
        self._stepped = time.perf_counter()
        if self.console.is_jupyter and not self.console.quiet:
            from trainformer.callbacks.notebook import NotebookDisplay

            self._display = NotebookDisplay(getattr(trainer, "monitor_metric", None) or "val/loss")
            self._display.begin(trainer.state.step, trainer.total_steps, getattr(trainer.state, "log_history", ()))
        if not self._can_draw():
            return
        self._open(transient=False)
        assert self._bar is not None
        total = trainer.total_steps
        self._training = self._bar.add_task("training", total=total, completed=trainer.state.step, values="", left="")

    def on_epoch_begin(self, trainer: TrainerLike, epoch: int) -> None:
        if self._display is not None:
            self._display.move(trainer.state.step, epoch)
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, description=f"epoch {epoch + 1}")

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        if self._training is None and self._display is None:
            return
        self._stepped = now = time.perf_counter()
        if now - self._drawn >= _SECONDS_BETWEEN_UPDATES:
            self._drawn = now
            self._measure(trainer, step, loss)
            self._show(trainer)

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        self._values |= metrics  # the only values where the device cannot be polled
        self._poll = None
        self._measure(trainer, trainer.state.step, None)
        if self._display is not None:
            self._display.log(trainer.state.step, metrics)
        self._show(trainer)

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
            self._evaluating = self._bar.add_task("evaluating", total=total, values="", left=None)
        self._bar.update(self._evaluating, completed=done)

    def on_validation_cleanup(self, trainer: TrainerLike) -> None:
        """Remove that bar, also after an error."""
        now = time.perf_counter()
        self._pace.pause(now - self._stepped)
        self._stepped = now
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
            elapsed = clock(self._bar.tasks[0].elapsed or 0.0)
            self._bar.update(self._training, completed=trainer.state.step, left=f"{elapsed} elapsed")
        self._close()

    def on_error(self, trainer: TrainerLike, error: BaseException) -> None:
        if self._display is not None:
            self._display.fail(error)
        self._close()

    # -- values --------------------------------------------------------------------------------------------------

    def _measure(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        """The newest loss that has arrived, the learning rate, and the throughput. Waits for nothing."""
        state: Any = trainer.state
        self._pace.add(Point(self._stepped, step, getattr(state, "samples", 0), getattr(state, "tokens", 0)))
        if self._poll is None and hasattr(loss, "start_read"):
            self._poll = loss.start_read()
        arrived = self._poll() if self._poll is not None else None
        if arrived is not None:
            self._values["train/loss"], self._poll = arrived, None
        lr = getattr(trainer, "current_lr", None)
        if lr is not None:
            self._values["train/lr"] = lr
        for name in ("samples_per_second", "tokens_per_second"):
            speed = getattr(self._pace, name)
            if speed:
                self._values[f"train/{name}"] = speed

    def _show(self, trainer: TrainerLike) -> None:
        step, total = trainer.state.step, trainer.total_steps
        left = self._pace.seconds_left(total)
        if self._display is not None:
            self._display.move(step, values=self._values, left=left)
        if self._bar is None or self._training is None:
            return
        time_left = "" if left is None else f"{clock(left)} left"
        taken = 26 + len(time_left) + 2 * len(f"{total or step}")  # spinner, epoch, bar, steps
        shown = fitting(values_of(self._values), self.console.width - taken)
        self._bar.update(self._training, completed=step, values=shown, left=time_left)

    # -- drawing -------------------------------------------------------------------------------------------------

    def _can_draw(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def _open(self, transient: bool) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=max(8, min(40, self.console.width - 80))),
            _Steps(),
            _TimeLeft(),
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


class _Steps(ProgressColumn):
    """Steps or batches done, and their total if it is known."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f"/{int(task.total)}"
        return Text(f"{int(task.completed)}{total}", style="progress.download")


class _TimeLeft(ProgressColumn):
    """The time left; of an evaluation as rich estimates it."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.fields["left"]
        if left is None:
            seconds = task.time_remaining
            left = "" if seconds is None else f"{clock(seconds)} left"
        return Text(left, style="progress.remaining")


def fitting(parts: Sequence[str], width: int) -> str:
    """As many parts as fit, in one line.

    >>> fitting(["loss 0.2", "lr 1e-3", "12 samples/s"], 20)
    'loss 0.2  lr 1e-3'
    """
    while parts and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)


def values_of(metrics: Mapping[str, float]) -> list[str]:
    """Loss, learning rate and throughput.

    >>> values_of({"train/loss": 0.25, "train/lr": 1e-3, "train/samples_per_second": 1234.5})
    ['loss 0.2500', 'lr 1.0e-03', '1,234 samples/s']
    """
    parts = []
    if "train/loss" in metrics:
        loss = metrics["train/loss"]
        parts.append(f"loss {loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"loss {loss:.2e}")
    if "train/lr" in metrics:
        parts.append(f"lr {metrics['train/lr']:.1e}")
    for key, unit in (("train/tokens_per_second", "tok/s"), ("train/samples_per_second", "samples/s")):
        if key in metrics:
            speed = metrics[key]
            parts.append(f"{speed:,.0f} {unit}" if speed >= 10 else f"{speed:.2g} {unit}")
            break
    return parts
