"""The loop of a sweep: start trials while there are free slots, record what they report, and how they end.

Owns the loop, its progress display, and how signals interrupt it. An executor runs the trials (in this process, in
worker processes, on Ray); `SweepStudy` stores them.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, Protocol

from optuna.exceptions import UpdateFinishedTrialError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from trainformer.core.secrets import mask, mask_text
from trainformer.sweep.spaces import format_metric, format_setting
from trainformer.sweep.study import Job, SweepStudy
from trainformer.sweep.trials import CurrentTrial, Outcome, SweepStopped, run_trial
from trainformer.utils.files import write_atomically

logger = logging.getLogger("trainformer")

HEARTBEAT_SECONDS = 30.0  # between heartbeats, on storages that other machines may share

#: Handles a message of a trial; see `trials.Send`.
OnMessage = Callable[[Job, str, Any], bool]


class Executor(Protocol):
    """Runs trials; `is_isolated` says whether in other processes."""

    is_isolated: ClassVar[bool]

    @property
    def free_slots(self) -> int: ...
    def submit(self, job: Job) -> None: ...
    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]: ...
    def shutdown(self) -> None: ...


class InProcessExecutor:
    """Runs one trial at a time in this process. A crash takes the sweep down; it resumes when it is run again."""

    is_isolated: ClassVar[bool] = False

    def __init__(self, function: Callable[..., Any], direction: str, on_message: OnMessage) -> None:
        self._function = function
        self._direction = direction
        self._on_message = on_message
        self._job: Job | None = None

    @property
    def free_slots(self) -> int:
        return int(self._job is None)

    def submit(self, job: Job) -> None:
        self._job = job

    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """Run the submitted trial."""
        job = self._job
        assert job is not None
        trial = CurrentTrial(
            job.number, job.attempt, job.folder, self._direction, lambda kind, value: self._on_message(job, kind, value)
        )
        outcome = run_trial(self._function, job.config, trial)
        self._job = None
        return [(job, outcome)]

    def shutdown(self) -> None:
        pass


class SweepRunner:
    """One call of `Sweep.run`."""

    def __init__(self, study: SweepStudy, n_trials: int, timeout: float | None, progress: Progress) -> None:
        self._study = study
        self._n_trials = n_trials
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._progress = progress
        self._running: dict[int, Job] = {}

    def on_message(self, job: Job, kind: str, content: Any) -> bool:
        """Record a message of a trial; the reply is whether it should stop."""
        with deferred_signals():
            try:
                if kind == "run":
                    self._study.record_run(job, content)
                    return False
                step, value = content
                return self._study.report(job, step, value)
            except UpdateFinishedTrialError:  # another process took this one for dead
                return True

    def run(self, executor: Executor) -> None:
        """Run trials until all are done, or until the timeout has passed and the running ones have ended."""
        with self._study.active(), self._heartbeats(), _sigterm_stops_sweep():
            try:
                self._fill(executor)
                while self._running:
                    for job, outcome in executor.wait(1.0):
                        self._finish(job, outcome)
                    self._fill(executor)
            except BaseException:
                self._interrupt(executor)
                raise
            executor.shutdown()

    def _fill(self, executor: Executor) -> None:
        while executor.free_slots and (self._deadline is None or time.monotonic() < self._deadline):
            with deferred_signals():
                job = self._study.next_job(self._n_trials, executor.is_isolated)
                if job is None:
                    return
                self._running[job.trial.number] = job
            self._progress.trial_started()
            executor.submit(job)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if outcome.error is not None:
            outcome.error = mask_text(outcome.error)
        if outcome.traceback is not None:
            write_atomically(job.folder / "error.txt", mask_text(outcome.traceback).encode())
        with deferred_signals():
            del self._running[job.trial.number]
            try:
                will_retry = self._study.finish(job, outcome)
            except UpdateFinishedTrialError:
                logger.warning("trial %d is not counted: another process took this one for dead", job.number)
                will_retry = True
        self._progress.trial_ended(job, outcome, will_retry)

    def _interrupt(self, executor: Executor) -> None:
        """Stop the running trials and enqueue them again."""
        try:
            executor.shutdown()
        finally:
            for job in self._running.values():
                try:
                    with deferred_signals():
                        self._study.requeue(job)
                except Exception as error:  # the next call requeues stale trials anyway
                    logger.warning("trial %d could not be requeued: %s", job.number, error)

    @contextmanager
    def _heartbeats(self) -> Iterator[None]:
        """On a shared storage, tell other machines that this one is alive."""
        if not self._study.is_shared:
            yield
            return
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT_SECONDS):
                for job in list(self._running.values()):
                    try:
                        self._study.heartbeat(job)
                    except Exception as error:  # the trial has just ended, or the storage is down for a while
                        logger.debug("no heartbeat for trial %d: %s", job.number, error)

        thread = threading.Thread(target=beat, name="sweep-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


# -- signals -------------------------------------------------------------------------------------------------


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until a write to the storage is complete; a second signal is not delayed.

    Ctrl-C inside a transaction would leave the database locked, also for the trials that are then requeued.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


@contextmanager
def _sigterm_stops_sweep() -> Iterator[None]:
    """SIGTERM requeues the running trials and exits. Python allows handlers in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    process, received = os.getpid(), []

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            received.append(number)
            raise KeyboardInterrupt  # which all code in between lets through, Ray included
        signal.signal(number, signal.SIG_DFL)  # a forked child: die from the signal as it would have without us
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SweepStopped(128 + received[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


# -- progress ------------------------------------------------------------------------------------------------


class Progress:
    """What a sweep prints to stderr: a line per finished trial and, on a terminal, a progress bar.

    `bar` is False for trials in this process, which draw on the terminal themselves.
    """

    def __init__(self, enabled: bool, bar: bool, direction: str, done: list[float | None], n_trials: int) -> None:
        self._console = Console(stderr=True, quiet=not enabled, highlight=False, markup=False)
        self._sign = 1.0 if direction == "maximize" else -1.0
        finished = [value for value in done if value is not None]
        self._best = max(finished, key=lambda value: self._sign * value, default=None)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._done, self._total, self._running = len(done), n_trials, 0
        if enabled and bar and self._console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=n_trials, completed=self._done)

    def __enter__(self) -> Progress:
        if self._done:
            self._console.print(f"resuming: {self._done} of {self._total} trials are done")
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def trial_started(self) -> None:
        self._running += 1
        self._draw()

    def trial_ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        self._running -= 1
        self._done += not will_retry
        status = "failed" if outcome.status == "lost" else outcome.status
        if status == "completed" and job.pruned:
            status = "pruned"
        value = outcome.value if status == "completed" else job.last_value
        mark = ""
        is_best = self._best is None or (value is not None and self._sign * value > self._sign * self._best)
        if status == "completed" and is_best:
            self._best, mark = value, " (best so far)"
        text = outcome.error if outcome.error is not None else f"{format_metric(value)}{mark}"
        retrying = "; retrying" if will_retry else ""
        took = "" if outcome.seconds is None else f", {outcome.seconds:.1f} s"
        line = f"trial {job.number} {status}: {text}{retrying} [{_format_config(job.config)}{took}]"
        self._console.print(line, soft_wrap=True)
        self._draw()

    def warn_if_all_infinite(self, metrics: list[float]) -> None:
        """A metric that is always infinite says nothing; usually the runs do not evaluate."""
        if metrics and not any(map(math.isfinite, metrics)):
            self._console.print(
                f"all metrics are {metrics[0]}: trials cannot be compared. Does the run evaluate? It needs val_data or "
                "val_split, and the function must return one of its metrics.", soft_wrap=True,
            )  # fmt: skip

    def _draw(self) -> None:
        if self._bar is not None:
            best = "" if self._best is None else f", best {format_metric(self._best)}"
            self._bar.update(self._task, completed=self._done, description=f"{self._running} running{best}")


def _format_config(config: Mapping[str, Any]) -> str:
    """The settings of a trial on one line.

    >>> _format_config({"lr": 0.000123456, "r": 8})
    'lr=0.0001235, r=8'
    """
    return ", ".join(f"{name}={format_setting(mask(value, name))}" for name, value in config.items())
