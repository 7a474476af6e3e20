"""`ProgressCallback`: the progress bar of `trainformer.callbacks`, for trainers that speak HuggingFace's dialect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rich.console import Console

from trainformer.callbacks.compat import original
from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.callbacks.progress import ProgressBar
from trainformer.hf.callbacks.names import as_native, is_evaluation, numbers
from trainformer.loggers.console import ConsoleLogger


class ProgressCallback(TrainerCallback):
    """A bar while training, a second one while evaluating, and a line for each log record.

    Where the output is no terminal, or with ``args.disable_tqdm``, there are only the lines. Only the main process
    shows anything, and only the first of several does: a trainer that has a bar by default gets no second one.
    """

    sets_control = False

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bar = ProgressBar(self.console)
        self._lines = ConsoleLogger(self.console, train_lines=True)
        self._is_shown = True
        self._draws = True
        self._is_training = False
        self._evaluated = 0  # batches of the evaluation that goes on

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the bar."""
        self._is_shown = state.is_world_process_zero and self._is_the_one(kwargs.get("trainer"))
        self._draws = self._is_shown and not getattr(args, "disable_tqdm", False)
        self._is_training = True
        if self._draws:
            view = _view(state)
            metric = getattr(args, "metric_for_best_model", None) or "loss"
            view.monitor_metric = f"val/{metric.removeprefix('eval_')}"  # whose curve a notebook shows
            self._bar.on_train_begin(view)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Name the epoch."""
        self._bar.on_epoch_begin(_view(state), int(state.epoch or 0))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move on."""
        self._bar.on_step_end(_view(state), state.global_step, None)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Show the values at the bar, and print a line above it."""
        if not self._is_shown or not logs or not state.is_world_process_zero:
            return
        known = {"epoch"} if is_evaluation(logs) else set()  # the line of training said it
        metrics = as_native(numbers({name: value for name, value in logs.items() if name not in known}))
        if "train/loss" in metrics:  # not the record of an evaluation, nor the summary of the run
            self._bar.on_log(_view(state), metrics)
        elif is_evaluation(logs):
            self._bar.on_validation_end(_view(state), metrics)
        self._lines.init({})
        self._lines.log(metrics, state.global_step)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the bar of an evaluation on. Outside of training it goes away after the last batch."""
        if not self._draws or not state.is_world_process_zero:
            return
        self._evaluated += 1
        total = _length(eval_dataloader)
        if self._is_training or (total is not None and self._evaluated <= total):
            self._bar.on_validation_batch_end(_view(state), self._evaluated, total)
        if not self._is_training and self._evaluated == total:
            self._evaluation_ended(state)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take that bar away."""
        self._evaluation_ended(state)

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take it away."""
        self._evaluation_ended(state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the bar in its last state."""
        self._is_training = False
        self._bar.on_train_end(_view(state))

    def on_error(
        self, args: Any, state: TrainerState, control: TrainerControl, error: BaseException, **kwargs: Any
    ) -> None:
        """Give the terminal back."""
        self._is_training = False
        self._bar.on_error(_view(state), error)

    def _is_the_one(self, trainer: Any) -> bool:
        """Whether nobody else shows the progress of this run."""
        present = [original(callback) for callback in getattr(trainer, "_callbacks", None) or ()]
        if any(isinstance(callback, ProgressBar) for callback in present):
            return False
        return next((callback for callback in present if isinstance(callback, ProgressCallback)), self) is self

    def _evaluation_ended(self, state: TrainerState) -> None:
        self._evaluated = 0
        self._bar.on_validation_cleanup(_view(state))


def _view(state: TrainerState) -> Any:
    """What the bar looks at in a trainer."""
    planned = state.max_steps if state.max_steps > 0 else None
    return SimpleNamespace(total_steps=planned, state=SimpleNamespace(step=state.global_step))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
