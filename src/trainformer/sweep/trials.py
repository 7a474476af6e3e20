"""One trial from inside: what the function of a sweep can say and ask, and what its runs get.

Owns `current_trial()`, the surroundings of runs that are made in a trial (a folder of their own, the callback that
prunes), and the call of the function. What is said goes to the process that holds the study, through `tell`.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.run.context import run_context
from trainformer.run.signals import SignalStop
from trainformer.sweep.pruning import PruneTrial

#: What a trial says to the process that holds the study: "report" (step, value), or "run" (folder). The answer to a
#: report is whether the trial should stop.
Tell = Callable[[str, Any], bool]


@dataclass
class CurrentTrial:
    """The trial that is going on. Outside of a sweep there is a stand-in, to which nothing matters."""

    number: int | None = None
    attempt: int = 1
    folder: Path | None = None  # for whatever the trial writes; an attempt that is made again has the same
    direction: str = "maximize"
    tell: Tell = field(default=lambda kind, content: False, repr=False)
    should_stop: bool = field(default=False, init=False)  # the trial is not worth going on with: return
    reports: int = field(default=0, init=False)
    _unnamed: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def report(self, value: float, step: int | None = None) -> None:
        """Say how good it is so far. `step` counts from 1, by itself unless given; look at `should_stop` afterwards."""
        value = as_number(value, "what is reported")
        if step is not None and step < 0:
            raise BadArgument(expected("the step of a report to be at least 0", step))
        self.reports = self.reports + 1 if step is None else int(step)
        if self.tell("report", (self.reports, value)):
            self.should_stop = True

    # -- what runs get that are made meanwhile ---------------------------------------------------------------

    def callbacks_for(self, run: Any) -> list[Any]:
        """The callback that prunes, unless the run has one."""
        if any(isinstance(callback, PruneTrial) for callback in run.callbacks):
            return []
        return [PruneTrial(run.settings.monitor_metric, run.settings.monitor_mode)]

    def folder_for(self, wanted: Path | None, title: str) -> Path:
        """A folder inside that of the trial, the same when the trial is made again."""
        assert self.folder is not None
        if wanted is None:
            number = self._unnamed[title] = self._unnamed.get(title, 0) + 1
            path = self.folder / (title if number == 1 else f"{title}-{number}")
        elif wanted.absolute().is_relative_to(self.folder.absolute()):
            path = wanted
        else:
            parts = [part for part in wanted.parts if part not in (wanted.anchor, "..")]
            path = self.folder.joinpath(*(parts[1:] if parts[:1] == ["runs"] and len(parts) > 1 else parts))
        self.tell("run", str(path))
        return path


_OUTSIDE = CurrentTrial()
_CURRENT: ContextVar[CurrentTrial | None] = ContextVar("trial", default=None)


def current_trial() -> CurrentTrial:
    """The trial that is going on, to report to in a loop of one's own.

    >>> trial = current_trial()  # outside of a sweep reports go nowhere, so that the function can be called as it is
    >>> trial.report(0.5)
    >>> trial.number, trial.should_stop
    (None, False)
    """
    return _CURRENT.get() or _OUTSIDE


@contextmanager
def _going_on(trial: CurrentTrial) -> Iterator[None]:
    token = _CURRENT.set(trial)
    try:
        with run_context(trial):
            yield
    finally:
        _CURRENT.reset(token)


class SweepStopped(SystemExit):
    """The sweep was asked by a signal to end; its trials are there to be taken up again."""


@dataclass
class Outcome:
    """How a trial ended: completed, pruned, failed (it raised), or lost (its process is gone)."""

    status: str
    value: float | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None


def execute(function: Callable[..., Any], config: dict[str, Any], trial: CurrentTrial) -> Outcome:
    """Call the function of a sweep. What it raises is a failed trial; signals and Ctrl-C go through."""
    began = time.perf_counter()
    try:
        if trial.folder is not None:
            trial.folder.mkdir(parents=True, exist_ok=True)
        with _going_on(trial):
            value = function(**config)
        if trial.should_stop:  # what it returns does not matter any more
            outcome = Outcome("pruned")
        else:
            outcome = Outcome("completed", as_number(value, "what the function returns"))
    except (SignalStop, SweepStopped):  # of the trial's run, or of a sweep inside it
        raise
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "TrialPruned":  # as those who know Optuna write it
            outcome = Outcome("pruned")
        else:
            outcome = Outcome("failed", None, in_short(error), traceback.format_exc())
    outcome.seconds = time.perf_counter() - began
    return outcome


def as_number(value: Any, what: str) -> float:
    """A metric as a float, which is not NaN."""
    try:
        if hasattr(value, "item"):  # of a tensor or an array that holds one number
            value = value.item()
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if math.isnan(number):
        do = "Return the metric that is to be made large (or small, with direction='minimize')."
        raise BadArgument(expected(f"{what} to be a number", value, do))
    return number


def in_short(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
