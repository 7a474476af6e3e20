"""Runs trials as Ray tasks, on this machine or on a cluster.

Owns the tasks, and the actor through which they send messages to the process that holds the study. Ray does not retry
tasks: if a worker or node dies, the attempt is lost, and the sweep retries it on any node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.core.optional import require
from trainformer.sweep.processes import GRACE_SECONDS, serialize
from trainformer.sweep.trials import CurrentTrial, Outcome, error_summary, run_trial

if TYPE_CHECKING:
    from trainformer.sweep.runner import OnMessage
    from trainformer.sweep.study import Job


class RayExecutor:
    """Runs at most `n_parallel` trials as Ray tasks; Ray places them."""

    is_isolated: ClassVar[bool] = True

    def __init__(
        self,
        function: Callable[..., Any],
        direction: str,
        n_parallel: int,
        address: str | None,
        resources: dict[str, float],
        on_message: OnMessage,
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        self._ray = ray = require("ray", "ray", "to run trials on a cluster")
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            local = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        self._check_resources(resources)
        self._function = ray.put(serialize(function))
        self._direction = direction
        self._on_message = on_message
        self._n_parallel = n_parallel
        self._jobs: dict[Any, Job] = {}
        # On the node of the sweep itself, so that the loss of another node does not take the mailbox along.
        this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._mailbox = ray.remote(num_cpus=0, scheduling_strategy=this_node)(Mailbox).remote()
        self._messages = self._mailbox.receive.remote()
        self._task = ray.remote(max_retries=0, max_calls=1, **resources)(_ray_task)

    def _check_resources(self, resources: dict[str, float]) -> None:
        """A task that fits on no node would wait forever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        wanted = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
        if not any(all(node.get(kind, 0) >= count for kind, count in wanted.items()) for node in nodes):
            available = [{kind: node.get(kind, 0) for kind in wanted} for node in nodes]
            self._disconnect()
            raise BadArgument(expected("a trial to fit on a node of the cluster", wanted, f"The nodes: {available}."))

    @property
    def free_slots(self) -> int:
        return self._n_parallel - len(self._jobs)

    def submit(self, job: Job) -> None:
        payload = serialize((job.trial.number, job.number, job.attempt, job.config, str(job.folder.absolute())))
        self._jobs[self._task.remote(self._function, payload, self._direction, self._mailbox)] = job

    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The trials that end within some seconds. Handles messages of all trials meanwhile."""
        wait, pending = self._ray.wait, [self._messages, *self._jobs]
        if not wait(pending, timeout=seconds)[0]:
            return []
        ready, _ = wait(pending, num_returns=len(pending), timeout=0)
        if self._messages in ready:  # before the results: a task sends its messages before it ends
            self._handle_messages()
        ended = [(task, self._jobs.pop(task)) for task in ready if task in self._jobs]
        return [(job, self._outcome(task, job)) for task, job in ended]

    def _handle_messages(self) -> None:
        jobs = {job.trial.number: job for job in self._jobs.values()}
        try:
            messages = self._ray.get(self._messages)
        except self._ray.exceptions.RayActorError as error:
            raise TrainformerError(
                "The Ray actor through which trials report has died, perhaps for lack of memory. Nothing is lost: run "
                "the sweep again, and it continues."
            ) from error
        for message_id, key, kind, content in messages:
            self._mailbox.reply.remote(message_id, key in jobs and self._on_message(jobs[key], kind, content))
        self._messages = self._mailbox.receive.remote()

    def _outcome(self, task: Any, job: Job) -> Outcome:
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:  # outside the function, whose exceptions are caught where it runs
            cause = getattr(error, "cause", None) or error
            return Outcome("failed", error=error_summary(cause), traceback=str(error))
        except errors.RayError as error:
            seconds = time.monotonic() - job.started
            return Outcome("lost", error=f"its worker or node died ({type(error).__name__})", seconds=seconds)

    def shutdown(self) -> None:
        """Cancel the running trials. They get time to save."""
        ray, tasks = self._ray, list(self._jobs)
        try:
            for task in tasks:
                ray.cancel(task)
            if tasks:
                ray.wait(tasks, num_returns=len(tasks), timeout=GRACE_SECONDS)
        finally:
            for task in tasks:
                ray.cancel(task, force=True)
            ray.kill(self._mailbox)
            self._disconnect()
        self._jobs = {}

    def _disconnect(self) -> None:
        if self._owns_ray:
            self._ray.shutdown()


class Mailbox:
    """A Ray actor: tasks send messages and wait for the reply, the process of the sweep receives and replies."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, int, str, Any]] = []
        self._replies: dict[int, asyncio.Future[bool]] = {}
        self._arrived = asyncio.Event()
        self._count = 0

    async def send(self, key: int, kind: str, content: Any) -> bool:
        """Called by a task; returns the reply."""
        message_id, self._count = self._count, self._count + 1
        reply = self._replies[message_id] = asyncio.get_running_loop().create_future()
        self._messages.append((message_id, key, kind, content))
        self._arrived.set()
        return await reply

    async def receive(self) -> list[tuple[int, int, str, Any]]:
        """Called by the sweep; waits until there are messages."""
        await self._arrived.wait()
        self._arrived.clear()
        messages, self._messages = self._messages, []
        return messages

    async def reply(self, message_id: int, reply: bool) -> None:
        """Called by the sweep."""
        self._replies.pop(message_id).set_result(reply)


def _ray_task(function: bytes, payload: bytes, direction: str, mailbox: Any) -> Outcome:
    """Runs one trial on any node."""
    import cloudpickle
    import ray

    key, number, attempt, config, folder = cloudpickle.loads(payload)

    def send(kind: str, content: Any) -> bool:
        return ray.get(mailbox.send.remote(key, kind, content))

    trial = CurrentTrial(number, attempt, Path(folder), direction, send)
    return run_trial(cloudpickle.loads(function), config, trial)
