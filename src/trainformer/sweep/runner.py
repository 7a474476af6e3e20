"""The course of a sweep: trials are begun while there is room, heard while they go on, and written down when they end.

Owns the loop, and how it is interrupted. Who makes the trials is a runner's business (in this process, in others, on a
cluster); what is stored is the ledger's.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from optuna.exceptions import UpdateFinishedTrialError

from trainformer.sweep.progress import Progress
from trainformer.sweep.study import BEAT, Job, Ledger
from trainformer.sweep.trials import CurrentTrial, Outcome, SweepStopped, execute
from trainformer.utils.files import write_atomically

logger = logging.getLogger("trainformer")


class Runner(Protocol):
    """Makes trials."""

    @property
    def room(self) -> int: ...
    def start(self, job: Job) -> None: ...
    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]: ...
    def close(self) -> None: ...


class InThisProcess:
    """A runner of one trial at a time, where we are. A trial that crashes takes the sweep with it; it goes on later."""

    def __init__(self, function: Callable[..., Any], direction: str, hear: Callable[[Job, str, Any], bool]) -> None:
        self._function = function
        self._direction = direction
        self._hear = hear
        self._job: Job | None = None

    @property
    def room(self) -> int:
        """One, or none."""
        return int(self._job is None)

    def start(self, job: Job) -> None:
        """It begins when it is waited for."""
        self._job = job

    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """Make it."""
        job = self._job
        assert job is not None
        trial = CurrentTrial(
            job.number, job.attempt, job.folder, self._direction, lambda kind, content: self._hear(job, kind, content)
        )
        outcome = execute(self._function, job.config, trial)
        self._job = None
        return [(job, outcome)]

    def close(self) -> None:
        """Nothing is left behind."""


class Conductor:
    """One call of `Sweep.run`."""

    def __init__(self, ledger: Ledger, n_trials: int, timeout: float | None, progress: Progress) -> None:
        self._ledger = ledger
        self._n_trials = n_trials
        self._until = None if timeout is None else time.monotonic() + timeout
        self._progress = progress
        self._running: dict[int, Job] = {}

    def hear(self, job: Job, kind: str, content: Any) -> bool:
        """What a trial says of itself; the answer is whether it should stop."""
        with undisturbed():
            try:
                if kind == "run":
                    self._ledger.note_run(job, content)
                    return False
                step, value = content
                return self._ledger.report(job, step, value)
            except UpdateFinishedTrialError:  # another process took this one for dead
                return True

    def run(self, runner: Runner) -> None:
        """Make trials until there are enough, or it is too late to begin one."""
        with self._ledger.working(), self._signs_of_life(), _ending_on_sigterm():
            try:
                self._fill(runner)
                while self._running:
                    for job, outcome in runner.wait(1.0):
                        self._conclude(job, outcome)
                    self._fill(runner)
            except BaseException:
                self._give_up(runner)
                raise
            runner.close()

    def _fill(self, runner: Runner) -> None:
        while runner.room and (self._until is None or time.monotonic() < self._until):
            with undisturbed():
                job = self._ledger.next(self._n_trials)
                if job is None:
                    return
                self._running[job.trial.number] = job
            self._progress.began(job)
            runner.start(job)

    def _conclude(self, job: Job, outcome: Outcome) -> None:
        if outcome.traceback is not None:
            write_atomically(job.folder / "error.txt", outcome.traceback.encode())
        with undisturbed():
            del self._running[job.trial.number]
            try:
                will_be_made_again = self._ledger.conclude(job, outcome)
            except UpdateFinishedTrialError:
                logger.warning("trial %d is not counted: another process took this one for dead", job.number)
                will_be_made_again = True
        self._progress.ended(job, outcome, will_be_made_again)

    def _give_up(self, runner: Runner) -> None:
        """Interrupted, or broken: nothing goes on, and what was going on can be taken up again."""
        try:
            runner.close()
        finally:
            for job in self._running.values():
                try:
                    with undisturbed():
                        self._ledger.put_back(job)
                except Exception as error:  # the same is done when the sweep goes on
                    logger.warning("trial %d could not be put back: %s", job.number, error)

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Where other machines work on the same study, they see that this one is there."""
        if not self._ledger.is_shared:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT):
                for job in list(self._running.values()):
                    try:
                        self._ledger.note_alive(job)
                    except Exception as error:  # it has just ended, or the storage is away for a while
                        logger.debug("no sign of life for trial %d: %s", job.number, error)

        thread = threading.Thread(target=beat, name="signs-of-life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is stored is stored whole: a signal that comes meanwhile is heard afterwards, unless it comes twice.

    Ctrl-C inside a transaction would leave the database locked, also for the trials that are then put back.
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
def _ending_on_sigterm() -> Iterator[None]:
    """Python allows handlers in the main thread alone; a sweep in another thread is left without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    process, received = os.getpid(), []

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            received.append(number)
            raise KeyboardInterrupt  # which everybody lets through, Ray included
        signal.signal(number, signal.SIG_DFL)  # a child that was forked meanwhile ends as it would have
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
