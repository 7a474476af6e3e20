"""Trials as tasks of Ray, on this machine or on a cluster.

Owns the tasks, and the mailbox through which they speak to the process that holds the study. Ray does not retry: an
attempt whose worker or machine is gone is lost, and the sweep makes it again, on another machine if need be.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.sweep.processes import as_bytes
from trainformer.sweep.trials import CurrentTrial, Outcome, execute, in_short

if TYPE_CHECKING:
    from trainformer.sweep.study import Job

_GRACE = 30.0  # seconds in which an interrupted task may save its run


class RayTasks:
    """A runner of trials as tasks of Ray. At most `n_parallel` are begun; Ray finds the place for each."""

    def __init__(
        self,
        function: Callable[..., Any],
        direction: str,
        n_parallel: int,
        address: str | None,
        resources: dict[str, float],
        hear: Callable[[Job, str, Any], bool],
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing phones home
        self._ray = ray = require("ray", "ray", "to run trials on a cluster")
        self._ours = not ray.is_initialized()
        if self._ours:
            local = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        self._check(resources)
        self._function = ray.put(as_bytes(function))
        self._direction = direction
        self._hear = hear
        self._free = n_parallel
        self._jobs: dict[Any, Job] = {}
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._mailbox = ray.remote(num_cpus=0, scheduling_strategy=here)(Mailbox).remote()
        self._mail = self._mailbox.take.remote()
        self._task = ray.remote(max_retries=0, max_calls=1, **resources)(make_trial)

    def _check(self, resources: dict[str, float]) -> None:
        """A task that no machine can hold would wait for ever."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        wanted = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
        if not any(all(machine.get(kind, 0) >= count for kind, count in wanted.items()) for machine in machines):
            shown = [{kind: machine.get(kind, 0) for kind in wanted} for machine in machines]
            self._leave()
            raise BadArgument(expected("a trial to fit on a machine of the cluster", wanted, f"There are {shown}."))

    @property
    def room(self) -> int:
        """How many trials can be started."""
        return self._free - len(self._jobs)

    def start(self, job: Job) -> None:
        """Begin a trial."""
        about = as_bytes((job.trial.number, job.number, job.attempt, job.config, str(job.folder.absolute())))
        self._jobs[self._task.remote(self._function, about, self._direction, self._mailbox)] = job

    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """What ended meanwhile; what trials say is passed on."""
        wait, everything = self._ray.wait, [self._mail, *self._jobs]
        if not wait(everything, timeout=seconds)[0]:
            return []
        ready, _ = wait(everything, num_returns=len(everything), timeout=0)
        if self._mail in ready:  # before the ends: who ended has said all before
            self._read_mail()
        ended = [(task, self._jobs.pop(task)) for task in ready if task in self._jobs]
        return [(job, self._outcome(task, job)) for task, job in ended]

    def _read_mail(self) -> None:
        jobs = {job.trial.number: job for job in self._jobs.values()}
        for letter, key, kind, content in self._ray.get(self._mail):
            self._mailbox.answer.remote(letter, key in jobs and self._hear(jobs[key], kind, content))
        self._mail = self._mailbox.take.remote()

    def _outcome(self, task: Any, job: Job) -> Outcome:
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:  # outside of the function, whose own errors are caught where it runs
            cause = getattr(error, "cause", None) or error
            return Outcome("failed", error=in_short(cause), traceback=str(error))
        except errors.RayError as error:
            seconds = time.monotonic() - job.seen
            text = f"its worker or machine is gone ({type(error).__name__})"
            return Outcome("lost", error=text, seconds=seconds)

    def close(self) -> None:
        """End what is under way. Runs get time to save."""
        ray, tasks = self._ray, list(self._jobs)
        try:
            for task in tasks:
                ray.cancel(task)
            if tasks:
                ray.wait(tasks, num_returns=len(tasks), timeout=_GRACE)
        finally:
            for task in tasks:
                ray.cancel(task, force=True)
            ray.kill(self._mailbox)
            self._leave()
        self._jobs = {}

    def _leave(self) -> None:
        if self._ours:
            self._ray.shutdown()


class Mailbox:
    """An actor: tasks leave what they say and wait for the answer, the process of the sweep takes it."""

    def __init__(self) -> None:
        self._letters: list[tuple[int, int, str, Any]] = []
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._arrived = asyncio.Event()
        self._count = 0

    async def tell(self, key: int, kind: str, content: Any) -> bool:
        """Called by a task."""
        letter, self._count = self._count, self._count + 1
        answer = self._answers[letter] = asyncio.get_running_loop().create_future()
        self._letters.append((letter, key, kind, content))
        self._arrived.set()
        return await answer

    async def take(self) -> list[tuple[int, int, str, Any]]:
        """Called by the process of the sweep; waits until there is something."""
        await self._arrived.wait()
        self._arrived.clear()
        letters, self._letters = self._letters, []
        return letters

    async def answer(self, letter: int, answer: bool) -> None:
        """Called by the process of the sweep."""
        self._answers.pop(letter).set_result(answer)


def make_trial(function: bytes, about: bytes, direction: str, mailbox: Any) -> Outcome:
    """The task: one trial, on whatever machine."""
    import cloudpickle
    import ray

    key, number, attempt, config, folder = cloudpickle.loads(about)

    def tell(kind: str, content: Any) -> bool:
        return ray.get(mailbox.tell.remote(key, kind, content))

    trial = CurrentTrial(number, attempt, Path(folder), direction, tell)
    return execute(cloudpickle.loads(function), config, trial)
