"""Trials in processes of this machine: one worker for each slot, each with its own devices and threads.

Owns the workers: how they are started and ended, and what is said over their pipes. A worker keeps going from trial to
trial; after one that failed it is replaced, since nobody knows what state it is in. Workers never open the study.
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
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.sweep.trials import CurrentTrial, Outcome, execute, in_short

if TYPE_CHECKING:
    from trainformer.sweep.study import Job

_GRACE = 30.0  # seconds in which an interrupted worker may save its run
_SPAWN = multiprocessing.get_context("spawn")

#: What is done with what a trial says; see `trials.Tell`.
Listener = Callable[["Job", str, Any], bool]


class LocalProcesses:
    """A runner of trials, each in one of several processes."""

    def __init__(self, function: Callable[..., Any], direction: str, slots: list[dict[str, str]], hear: Listener):
        self._function = as_bytes(function)
        self._direction = direction
        self._free = list(slots)
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._hear = hear

    @property
    def room(self) -> int:
        """How many trials can be started."""
        return len(self._free) + len(self._idle)

    def start(self, job: Job) -> None:
        """Begin a trial."""
        about = as_bytes((job.number, job.attempt, job.config, job.folder))
        worker = self._idle.pop() if self._idle else _Worker(self._free.pop(0), self._function, self._direction)
        worker.job = job
        self._busy.append(worker)
        try:
            worker.pipe.send_bytes(about)
        except OSError:
            pass  # it is gone, which is noticed while waiting

    def wait(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """What ended meanwhile; what trials say is passed on."""
        ready = wait([w.pipe for w in self._busy] + [w.process.sentinel for w in self._busy], seconds)
        ended = []
        for worker in list(self._busy):
            if worker.pipe in ready or worker.process.sentinel in ready:
                outcome = self._listen(worker)
                if outcome is not None:
                    ended.append((worker.job, outcome))
                    self._release(worker, outcome)
        return ended

    def _listen(self, worker: _Worker) -> Outcome | None:
        try:
            while worker.pipe.poll():
                kind, content = worker.pipe.recv()
                if kind == "done":
                    return content
                worker.pipe.send(self._hear(worker.job, kind, content))
            if worker.process.is_alive():
                return None
        except (EOFError, OSError):
            worker.process.join(_GRACE)
        seconds = time.monotonic() - worker.job.seen
        return Outcome("lost", error=_how_it_ended(worker.process.exitcode), seconds=seconds)

    def _release(self, worker: _Worker, outcome: Outcome) -> None:
        self._busy.remove(worker)
        worker.job = None
        if outcome.status in ("completed", "pruned"):
            self._idle.append(worker)
        else:
            worker.end(time.monotonic() + _GRACE)
            self._free.append(worker.slot)

    def close(self) -> None:
        """End all workers. Runs that are under way get time to save."""
        workers = self._idle + self._busy
        try:
            for worker in workers:
                worker.ask_to_end()
            until = time.monotonic() + _GRACE
            for worker in workers:
                worker.end(until)
        finally:  # asked twice: at once
            for worker in workers:
                if worker.process.is_alive():
                    worker.process.kill()
        self._idle, self._busy = [], []


class _Worker:
    def __init__(self, slot: dict[str, str], function: bytes, direction: str) -> None:
        self.slot = slot
        self.job: Any = None
        self.pipe, theirs = _SPAWN.Pipe()
        # Not a daemon: those may not have processes of their own, which load data.
        self.process = _SPAWN.Process(target=work, args=(theirs, slot, direction), name="trainformer-trial")
        with _without_main():
            self.process.start()
        theirs.close()
        try:
            self.pipe.send_bytes(function)  # which waits until the process reads, if the function is large
        except OSError:
            pass  # it is gone, which is noticed while waiting
        except BaseException:
            self.process.kill()
            raise

    def ask_to_end(self) -> None:
        self.pipe.close()  # ends one that waits for a trial
        if self.job is not None and self.process.is_alive():
            self.process.terminate()

    def end(self, until: float) -> None:
        self.ask_to_end()
        self.process.join(max(0.0, until - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def as_bytes(thing: Any) -> bytes:
    """Something as it goes to another process: by value, if that cannot import it."""
    cloudpickle = require("cloudpickle", "sweep", "to run trials in processes of their own")
    try:
        return cloudpickle.dumps(thing)
    except Exception as error:  # each kind of object says so in its own way
        what = "the function of a sweep, and its settings, to be such that they can go to another process"
        do = "Make what cannot be sent inside the function, or run one trial at a time, in this process."
        raise BadArgument(expected(what, in_short(error), do)) from error


@contextmanager
def _without_main() -> Iterator[None]:
    """A spawned process runs the main script again, to have what it defines. Ours get functions by value: hide it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"its process was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"its process was killed by signal {-code}"
    return f"its process ended with exit code {code} before the function returned"


# -- which devices -----------------------------------------------------------------------------------------


def make_slots(n_parallel: int, gpus_per_trial: float) -> list[dict[str, str]]:
    """The environment of each worker: its share of the devices and of the processor's cores."""
    devices = _devices()
    each = int(gpus_per_trial) if gpus_per_trial else max(1, len(devices) // n_parallel) if devices else 0
    if gpus_per_trial and (gpus_per_trial != each or each * n_parallel > len(devices)):
        do = f"There are {len(devices)} devices for {n_parallel} trials at once."
        raise BadArgument(expected("gpus_per_trial to be a whole number that there is", gpus_per_trial, do))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // n_parallel))
    slots = []
    for place in range(n_parallel):
        slot = {"OMP_NUM_THREADS": threads}
        if devices:
            first = place * each % len(devices)
            slot["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + each])
        slots.append(slot)
    return slots


def _devices() -> list[str]:
    """The CUDA devices that this process may use; the driver is not woken up where there are none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    if not os.path.exists("/dev/nvidia0"):
        return []
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


# -- in the worker -----------------------------------------------------------------------------------------


def work(pipe: Connection, slot: dict[str, str], direction: str) -> None:
    """What a worker does: trials, one after the other, until the pipe is closed."""
    os.environ.update(slot)  # before anything is imported that looks at it
    _end_with_parent()
    function: Any = None
    try:
        payload = pipe.recv_bytes()
        while True:
            job = pipe.recv_bytes()
            outcome, function = _one(pipe, payload, function, job, direction)
            pipe.send(("done", outcome))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except KeyboardInterrupt:
        sys.exit(130)


def _one(pipe: Connection, payload: bytes, function: Any, job: bytes, direction: str) -> tuple[Outcome, Any]:
    import cloudpickle

    def tell(kind: str, content: Any) -> bool:
        try:
            pipe.send((kind, content))
            return pipe.recv()
        except (EOFError, OSError):  # the sweep is ending, and so will this process: by a signal, after a save
            return False

    try:
        number, attempt, config, folder = cloudpickle.loads(job)
        folder.mkdir(parents=True, exist_ok=True)
        _speak_to(folder / "output.txt")
        function = function or cloudpickle.loads(payload)
    except Exception as error:
        text = f"{in_short(error)} (when the function was brought to another process)"
        return Outcome("failed", error=text, seconds=0.0), function
    outcome = execute(function, config, CurrentTrial(number, attempt, folder, direction, tell))
    sys.stdout.flush()
    sys.stderr.flush()
    return outcome, function


def _speak_to(path: Any) -> None:
    """What is printed goes into a file, also by libraries that are not Python."""
    with path.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _end_with_parent() -> None:
    """However the process of the sweep ends, this one does not stay behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
    if sys.platform == "linux":  # at once, also while the interpreter is busy
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it was gone before that was said
            os._exit(1)
