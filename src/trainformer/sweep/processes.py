"""Runs trials in worker processes on this machine, each with its own devices and threads.

Owns the workers: starting and stopping them, and the messages on their pipes. A worker runs one trial after another;
after a failed trial it is replaced, since its state is unknown. Workers never open the study.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.sweep.trials import CurrentTrial, Outcome, error_summary, run_trial

if TYPE_CHECKING:
    from trainformer.sweep.runner import OnMessage
    from trainformer.sweep.study import Job

GRACE_SECONDS = 30.0  # for an interrupted worker to save its run
_SPAWN = multiprocessing.get_context("spawn")


class ProcessExecutor:
    """Runs trials in worker processes, one per slot."""

    is_isolated: ClassVar[bool] = True

    def __init__(
        self, function: Callable[..., Any], direction: str, slots: list[dict[str, str]], on_message: OnMessage
    ) -> None:
        self._function = serialize(function)
        self._direction = direction
        self._free = list(slots)
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._on_message = on_message

    @property
    def free_slots(self) -> int:
        return len(self._free) + len(self._idle)

    def submit(self, job: Job) -> None:
        payload = serialize((job.number, job.attempt, job.config, job.folder))
        worker = self._idle.pop() if self._idle else _Worker(self._free.pop(0), self._function, self._direction)
        worker.job = job
        self._busy.append(worker)
        try:
            worker.pipe.send_bytes(payload)
        except OSError:
            pass  # the worker is gone, which wait() notices

    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The trials that end within some seconds. Handles messages of all trials meanwhile."""
        ready = wait([w.pipe for w in self._busy] + [w.process.sentinel for w in self._busy], seconds)
        ended = []
        for worker in list(self._busy):
            if worker.pipe in ready or worker.process.sentinel in ready:
                assert worker.job is not None
                outcome = self._receive(worker, worker.job)
                if outcome is not None:
                    ended.append((worker.job, outcome))
                    self._release(worker, outcome)
        return ended

    def _receive(self, worker: _Worker, job: Job) -> Outcome | None:
        try:
            while worker.pipe.poll():
                kind, content = worker.pipe.recv()
                if kind == "done":
                    return content
                worker.pipe.send(self._on_message(job, kind, content))
            if worker.process.is_alive():
                return None
        except (EOFError, OSError):
            worker.process.join(GRACE_SECONDS)
        seconds = time.monotonic() - job.started
        return Outcome("lost", error=_describe_exit(worker.process.exitcode), seconds=seconds)

    def _release(self, worker: _Worker, outcome: Outcome) -> None:
        self._busy.remove(worker)
        worker.job = None
        if outcome.status in ("completed", "pruned"):
            self._idle.append(worker)
        else:
            worker.stop(time.monotonic() + GRACE_SECONDS)
            self._free.append(worker.slot)

    def shutdown(self) -> None:
        """Stop all workers. Running trials get time to save."""
        workers = self._idle + self._busy
        try:
            for worker in workers:
                worker.request_stop()
            deadline = time.monotonic() + GRACE_SECONDS
            for worker in workers:
                worker.stop(deadline)
        finally:  # interrupted again: kill them at once
            for worker in workers:
                if worker.process.is_alive():
                    worker.process.kill()
        self._idle, self._busy = [], []


class _Worker:
    def __init__(self, slot: dict[str, str], function: bytes, direction: str) -> None:
        self.slot = slot
        self.job: Job | None = None
        self.pipe, remote = _SPAWN.Pipe()
        # Not a daemon: daemons must not have child processes, and data loaders start some.
        self.process = _SPAWN.Process(target=_work, args=(remote, slot, direction), name="trainformer-trial")
        with _without_main():
            self.process.start()
        remote.close()
        try:
            self.pipe.send_bytes(function)  # for a large function, blocks until the process reads
        except OSError:
            pass  # the worker is gone, which wait() notices
        except BaseException:
            self.process.kill()
            raise

    def request_stop(self) -> None:
        self.pipe.close()  # ends a worker that waits for a trial
        if self.job is not None and self.process.is_alive():
            self.process.terminate()

    def stop(self, deadline: float) -> None:
        self.request_stop()
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def serialize(value: Any) -> bytes:
    """Pickle for another process, by value where that process cannot import it."""
    cloudpickle = require("cloudpickle", "sweep", "to run trials in worker processes")
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # every type raises something different
        what = "the swept function and its settings to be picklable"
        do = "Create what cannot be pickled inside the function, or run one trial at a time, in this process."
        raise BadArgument(expected(what, error_summary(error), do)) from error


@contextmanager
def _without_main() -> Iterator[None]:
    """Hides the main script: a spawned process would run it again, but functions are sent by value here."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"its process was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"its process was killed by signal {-code}"
    return f"its process ended with exit code {code} before the function returned"


# -- devices -------------------------------------------------------------------------------------------------


def make_slots(n_parallel: int, gpus_per_trial: float) -> list[dict[str, str]]:
    """The environment variables of each worker: its share of the GPUs and of the CPU cores."""
    devices = _visible_devices()
    per_slot = int(gpus_per_trial) if gpus_per_trial else max(1, len(devices) // n_parallel) if devices else 0
    if gpus_per_trial and (gpus_per_trial != per_slot or per_slot * n_parallel > len(devices)):
        do = f"There are {len(devices)} devices for {n_parallel} parallel trials."
        raise BadArgument(expected("gpus_per_trial to be an integer that fits the devices", gpus_per_trial, do))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // n_parallel))
    slots = []
    for index in range(n_parallel):
        slot = {"OMP_NUM_THREADS": threads}
        if devices:
            first = index * per_slot % len(devices)
            slot["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + per_slot])
        slots.append(slot)
    return slots


def _visible_devices() -> list[str]:
    """The CUDA devices that this process may use. Does not initialise the driver on machines without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    if not os.path.exists("/dev/nvidia0"):
        return []
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


# -- in the worker -------------------------------------------------------------------------------------------


def _work(pipe: Connection, slot: dict[str, str], direction: str) -> None:
    """The main function of a worker: runs trials until the pipe is closed."""
    os.environ.update(slot)  # before anything is imported that reads it
    _exit_with_parent()
    function: Any = None
    try:
        payload = pipe.recv_bytes()
        while True:
            job = pipe.recv_bytes()
            outcome, function = _run_job(pipe, payload, function, job, direction)
            pipe.send(("done", outcome))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except KeyboardInterrupt:
        sys.exit(130)


def _run_job(pipe: Connection, payload: bytes, function: Any, job: bytes, direction: str) -> tuple[Outcome, Any]:
    import cloudpickle

    def send(kind: str, content: Any) -> bool:
        try:
            pipe.send((kind, content))
            return pipe.recv()
        except (EOFError, OSError):  # the sweep is stopping; a signal will stop this process, after a save
            return False

    try:
        number, attempt, config, folder = cloudpickle.loads(job)
        folder.mkdir(parents=True, exist_ok=True)
        _redirect_output(folder / "output.txt")
        function = function or cloudpickle.loads(payload)
    except Exception as error:
        text = f"{error_summary(error)} (while unpickling the function in the worker)"
        return Outcome("failed", error=text, seconds=0.0), function
    outcome = run_trial(function, config, CurrentTrial(number, attempt, folder, direction, send))
    sys.stdout.flush()
    sys.stderr.flush()
    return outcome, function


def _redirect_output(path: Path) -> None:
    """Sends stdout and stderr to a file, also for libraries that are not Python."""
    with path.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _exit_with_parent() -> None:
    """However the process of the sweep ends, this one exits too."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
    if sys.platform == "linux":  # immediately, also while the interpreter is busy
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent.pid:  # the parent died before the call
            os._exit(1)
