"""A trial from the inside: what the swept function can report and query, and how its runs are set up.

Owns `current_trial()`, the context of runs created in a trial (their folder, the `PruneTrial` callback), and the call
of the function. Messages go to the process that holds the study, through `send`.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.callbacks.base import TrainerLike, was_left_out
from trainformer.core.errors import BadArgument, expected
from trainformer.run.context import run_context
from trainformer.run.signals import SignalStop

if TYPE_CHECKING:
    from trainformer.run.run import Run

logger = logging.getLogger("trainformer")

#: Sends a message to the process that holds the study: "report" with (step, value), or "run" with the folder of a run.
#: The reply to a report says whether the trial should stop.
Send = Callable[[str, Any], bool]


@dataclass
class CurrentTrial:
    """The running trial. Outside a sweep, a stand-in that ignores reports."""

    number: int | None = None
    attempt: int = 1
    folder: Path | None = None  # for whatever the trial writes; a retry gets the same folder
    direction: str = "maximize"
    send: Send = field(default=lambda kind, content: False, repr=False)
    should_stop: bool = field(default=False, init=False)  # the pruner has stopped this trial: return
    reports: int = field(default=0, init=False)
    _unnamed: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def report(self, value: float, step: int | None = None) -> None:
        """Report an intermediate value. `step` counts up from 1 by default; check `should_stop` afterwards."""
        value = as_metric(value, "the reported value")
        if step is not None and step < 0:
            raise BadArgument(expected("the step of a report to be at least 0", step))
        self.reports = self.reports + 1 if step is None else int(step)
        if self.send("report", (self.reports, value)):
            self.should_stop = True

    # -- for runs created inside the trial (see trainformer.run.context) -----------------------------------------

    def callbacks_for(self, run: Run) -> list[Any]:
        """`PruneTrial`, unless the run has one."""
        if any(isinstance(callback, PruneTrial) for callback in run.callbacks):
            return []
        return [PruneTrial(run.settings.monitor_metric, run.settings.monitor_mode)]

    def folder_for(self, wanted: Path | None, title: str) -> Path:
        """A run folder inside the trial's folder, the same one in a retry."""
        assert self.folder is not None
        if wanted is None:
            number = self._unnamed[title] = self._unnamed.get(title, 0) + 1
            path = self.folder / (title if number == 1 else f"{title}-{number}")
        elif wanted.absolute().is_relative_to(self.folder.absolute()):
            path = wanted
        else:
            parts = [part for part in wanted.parts if part not in (wanted.anchor, "..")]
            path = self.folder.joinpath(*(parts[1:] if parts[:1] == ["runs"] and len(parts) > 1 else parts))
        self.send("run", str(path))
        return path


_NO_TRIAL = CurrentTrial()
_CURRENT: ContextVar[CurrentTrial | None] = ContextVar("trial", default=None)


def current_trial() -> CurrentTrial:
    """The running trial, to report to from a hand-written loop.

    >>> trial = current_trial()  # outside a sweep reports are ignored, so the function can also be called directly
    >>> trial.report(0.5)
    >>> trial.number, trial.should_stop
    (None, False)
    """
    return _CURRENT.get() or _NO_TRIAL


@dataclass
class PruneTrial:
    """Reports a metric to the sweep after each evaluation, and stops the run if the pruner says so.

    Every run in a trial gets one automatically, for its `monitor_metric`. Reports are numbered by evaluation, not by
    step, so trials with different batch sizes can be compared. If the metric is minimized and the sweep maximizes (or
    vice versa), its negative is reported.

    >>> PruneTrial("val/accuracy", mode="max")
    PruneTrial(monitor='val/accuracy', mode='max')
    """

    monitor: str = "val/loss"
    mode: str = "min"

    _evaluations: int = field(init=False, default=0, repr=False)
    _offset: int | None = field(init=False, default=None, repr=False)  # reports of earlier runs of the same trial

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise BadArgument(expected("PruneTrial's mode to be 'min' or 'max'", self.mode))

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Report the metric; stop the run if the trial is pruned."""
        trial, value = current_trial(), metrics.get(self.monitor)
        if trial.number is None or not trainer.is_main:
            return
        if value is None and was_left_out(trainer, self.monitor):
            return
        if self._offset is None:
            self._offset = trial.reports
        self._evaluations += 1
        if value is None or value != value:
            logger.warning("nothing is reported to the sweep: the evaluation has no %s", self.monitor)
            return
        same_direction = (self.mode == "max") == (trial.direction == "maximize")
        trial.report(value if same_direction else -value, self._offset + self._evaluations)
        if trial.should_stop:
            trainer.stop(f"{self.monitor} {value:g} at evaluation {self._evaluations}: pruned by the sweep")

    def state_dict(self) -> dict[str, Any]:
        """The number of evaluations so far."""
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of evaluations."""
        self._evaluations = state["evaluations"]


class SweepStopped(SystemExit):
    """A signal stopped the sweep; its unfinished trials are queued for the next call."""


@dataclass
class Outcome:
    """How a trial ended: completed, pruned, failed (it raised an exception), or lost (its process died)."""

    status: str
    value: float | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None


def run_trial(function: Callable[..., Any], config: dict[str, Any], trial: CurrentTrial) -> Outcome:
    """Call the swept function. An exception is a failed trial; signals and Ctrl-C propagate."""
    start = time.perf_counter()
    try:
        if trial.folder is not None:
            trial.folder.mkdir(parents=True, exist_ok=True)
        token = _CURRENT.set(trial)
        try:
            with run_context(trial):
                value = function(**config)
        finally:
            _CURRENT.reset(token)
        if trial.should_stop:  # the return value of a pruned trial is ignored
            outcome = Outcome("pruned")
        else:
            outcome = Outcome("completed", as_metric(value, "the return value of the function"))
    except (SignalStop, SweepStopped):  # raised by the trial's run, or by a nested sweep
        raise
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "TrialPruned":  # Optuna's own way to prune
            outcome = Outcome("pruned")
        else:
            outcome = Outcome("failed", None, error_summary(error), traceback.format_exc())
    outcome.seconds = time.perf_counter() - start
    return outcome


def as_metric(value: Any, what: str) -> float:
    """A metric as a float; NaN is refused.

    >>> as_metric(1, "the metric")
    1.0
    """
    try:
        if hasattr(value, "item"):  # a tensor or array with one element
            value = value.item()
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if math.isnan(number):
        do = "Return the metric to maximize (or to minimize, with direction='minimize')."
        raise BadArgument(expected(f"{what} to be a number", value, do))
    return number


def error_summary(error: BaseException) -> str:
    """An exception on one line.

    >>> error_summary(ValueError("two\\n lines"))
    'ValueError: two lines'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
