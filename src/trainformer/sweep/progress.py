"""What a sweep shows of itself, on stderr: a line for each trial that ended, and below them a bar on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from trainformer.sweep.spaces import in_words

if TYPE_CHECKING:
    from trainformer.sweep.study import Job
    from trainformer.sweep.trials import Outcome


class Progress:
    """The display of one call. `bar`: trials are made elsewhere, so that nothing else draws on the terminal."""

    def __init__(self, wanted: bool, bar: bool, direction: str, done: list[float | None], n_trials: int) -> None:
        self._console = Console(stderr=True, quiet=not wanted, highlight=False, markup=False)
        self._sign = 1.0 if direction == "maximize" else -1.0
        self._best = max((value for value in done if value is not None), key=self._goodness, default=None)
        self._bar: Bar | None = None
        self._done, self._of, self._running = len(done), n_trials, 0
        if wanted and bar and self._console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=n_trials, completed=self._done)

    def _goodness(self, value: float) -> float:
        return self._sign * value

    def __enter__(self) -> Progress:
        if self._done:
            self._console.print(f"going on: {self._done} of {self._of} trials are done")
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def began(self, job: Job) -> None:
        """A trial begins."""
        self._running += 1
        self._draw()

    def ended(self, job: Job, outcome: Outcome, will_be_made_again: bool) -> None:
        """A trial has ended."""
        self._running -= 1
        self._done += not will_be_made_again
        status = "failed" if outcome.status == "lost" else outcome.status
        if status == "completed" and job.pruned:
            status = "pruned"
        value = outcome.value if status == "completed" else job.last
        mark = ""
        is_best = self._best is None or (value is not None and self._goodness(value) > self._goodness(self._best))
        if status == "completed" and is_best:
            self._best, mark = value, " (best so far)"
        text = outcome.error if outcome.error is not None else f"{number_in_words(value)}{mark}"
        again = "; it is made again" if will_be_made_again else ""
        took = "" if outcome.seconds is None else f", {outcome.seconds:.1f} s"
        self._console.print(
            f"trial {job.number} {status}: {text}{again} [{config_in_words(job.config)}{took}]", soft_wrap=True
        )
        self._draw()

    def warn_if_vain(self, metrics: list[float]) -> None:
        """A metric that is infinite whatever is tried says nothing; often nothing was evaluated."""
        if metrics and not any(map(math.isfinite, metrics)):
            self._console.print(
                f"all metrics are {metrics[0]}: trials cannot be compared. Does the run evaluate? It needs val_data or "
                "val_split, and the function must return one of its metrics.", soft_wrap=True,
            )  # fmt: skip

    def _draw(self) -> None:
        if self._bar is not None:
            best = "" if self._best is None else f", best {number_in_words(self._best)}"
            self._bar.update(self._task, completed=self._done, description=f"{self._running} running{best}")


def config_in_words(config: Mapping[str, Any]) -> str:
    """The settings of a trial in one line.

    >>> config_in_words({"lr": 0.000123456, "r": 8})
    'lr=0.0001235, r=8'
    """
    return ", ".join(f"{name}={setting_in_words(value)}" for name, value in config.items())


def setting_in_words(value: Any) -> str:
    """One setting; a text without its quotation marks."""
    if isinstance(value, float):
        return number_in_words(value)
    return value if isinstance(value, str) else in_words(value)


def number_in_words(value: float | None) -> str:
    """A metric, to four digits."""
    if value is None:
        return "no value"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
