"""Heartbeats: every few seconds each rank writes its status to the rendezvous store and reads those of the others.

Owns the thread that does so and what is known about the other ranks. `failure_detection` decides what follows from a
missing heartbeat or a failed rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from trainformer.utils.processes import is_alive

FINISHED = "finished"  # written by the rank itself
FAILED = "failed"  # raised an error; there is a `Failure`
DIED = "died"  # written by another rank on the same machine that saw the process exit

#: Seconds between two heartbeats of a rank, per rank: everybody reads everybody, so the load of the store grows with
#: the number of ranks and no faster.
_SECONDS_PER_RANK = 0.01


@dataclass(frozen=True)
class ProcessInfo:
    """Where a rank runs. PIDs of two ranks can be compared only within one `namespace`."""

    host: str
    pid: int
    namespace: str

    @classmethod
    def current(cls) -> ProcessInfo:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _pid_namespace())


@dataclass(frozen=True)
class Failure:
    """The error of a failed rank. `is_symptom`: it failed because another rank did not respond."""

    text: str
    is_symptom: bool = False


class Peer:
    """What is known about another rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.status = ""  # a counter while it runs, then FINISHED, FAILED or DIED
        self.last_seen = 0.0  # wall-clock time of the last change
        self.silence = 0.0  # seconds we have polled since then
        self.info: ProcessInfo | None = None
        self.failure = Failure("")
        self.process: LocalProcess | None = None
        self.has_exited = False  # seen from this rank

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" on {self.info.host} (process {self.info.pid})" if self.info else "")

    @property
    def is_running(self) -> bool:
        """Whether its last heartbeat said so."""
        return self.status.isdigit()


class LocalProcess:
    """Another process on this machine, whose exit the kernel reports."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle: int | None = None
        # A pidfd stays with its process when the PID is reused, and reports the exit of a process that nobody has
        # waited for. Old kernels and other systems have none.
        with contextlib.suppress(AttributeError, OSError):
            self._handle = os.pidfd_open(pid)

    def has_exited(self) -> bool:
        """Whether it is gone."""
        if self._handle is None:
            return self.pid != os.getpid() and not is_alive(self.pid)
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the pidfd."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


class Heartbeats:
    """Sends this rank's heartbeats and reads those of the others, in a thread of its own.

    Only that thread changes what is known through the store; `Peer.process` and `Peer.has_exited` belong to the thread
    of `RankMonitor`. So no lock is needed, and a fork at any moment is harmless.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, every: float) -> None:
        self.rank = rank
        self.interval = max(every, world_size * _SECONDS_PER_RANK)
        self.peers = [Peer(other) for other in range(world_size) if other != rank]
        self.responses = 0  # how often the store has responded
        self.error: Exception | None = None  # what broke the connection to the store
        self.address, self.store_rank = _store_host(store)
        self._shared_store = store
        self._store = store
        self._final: tuple[str, Failure] | None = None
        self._last_poll = time.monotonic()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainformer-heartbeats", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def poll_now(self) -> None:
        """Poll the store at once instead of at the next interval."""
        self._wake.set()

    def stop(self, status: str, failure: Failure) -> None:
        """Write a final status. Does not wait for a store that does not respond."""
        self._final = status, failure
        self._wake.set()
        self._thread.join(self._max_linger + max(1.0, self.interval))

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # A connection of our own: on a shared one, a call that waits for another rank would block ours.
            clone = getattr(self._shared_store, "clone", None)
            own = dist.PrefixStore("trainformer/heartbeats", clone() if clone else self._shared_store)
            # A prefix per run, the same on every rank: heartbeats of an earlier run in the same processes do not count.
            number = own.add(f"runs/{self.rank}", 1)
            self._store = dist.PrefixStore(str(number), own)
            self._store.set(f"info/{self.rank}", json.dumps(asdict(ProcessInfo.current())))
            while self._beat():
                self.responses += 1
                self._wake.wait(self.interval)
                self._wake.clear()
            # The store ends with the process that hosts it: the others must read our final status first.
            until = time.monotonic() + self._max_linger
            while any(peer.is_running and not peer.has_exited for peer in self.peers) and time.monotonic() < until:
                time.sleep(min(0.1, self.interval))
                self._poll()
        except Exception as error:  # a store raises whatever its connection raises
            self.error = error

    def _beat(self) -> bool:
        """Write our status and read those of the others. Returns whether to continue."""
        status, failure = self._final or (str(self.responses), Failure(""))
        if status == FAILED:
            self._store.set(f"failure/{self.rank}", json.dumps(asdict(failure)))
        self._store.set(f"status/{self.rank}", status)
        self._poll()
        return status.isdigit()

    def _poll(self) -> None:
        now = time.monotonic()
        # Time in which this process was suspended, or the store did not respond, says nothing about the others.
        passed, self._last_poll = min(now - self._last_poll, 2 * self.interval), now
        exited = [peer for peer in self.peers if peer.has_exited and peer.is_running]
        # `get` blocks until a key exists, so check first.
        missing = [peer for peer in self.peers if peer.info is None]
        if missing and not self._store.check([f"status/{peer.rank}" for peer in missing]):
            missing = [peer for peer in missing if self._store.check([f"status/{peer.rank}"])]
        for peer in missing:
            peer.info = ProcessInfo(**json.loads(self._store.get(f"info/{peer.rank}")))
        known = [peer for peer in self.peers if peer.info]
        statuses = self._store.multi_get([f"status/{peer.rank}" for peer in known]) if known else []
        for peer in self.peers:
            peer.silence += passed
        for peer, status in zip(known, statuses, strict=True):
            self._update(peer, status.decode())
        for peer in exited:
            if peer.is_running:  # it wrote no final status: only ranks on its machine can know
                self._store.set(f"status/{peer.rank}", DIED)
                peer.status = DIED

    def _update(self, peer: Peer, status: str) -> None:
        if status == peer.status:
            return
        if status == FAILED:
            peer.failure = Failure(**json.loads(self._store.get(f"failure/{peer.rank}")))
        peer.status, peer.silence = status, 0.0
        if status != DIED:  # which the peer did not write itself
            peer.last_seen = time.time()

    @property
    def _max_linger(self) -> float:
        return 3 * self.interval if self.store_rank == self.rank else 0.0


def _pid_namespace() -> str:
    """Equal for processes that can find each other by PID: same machine, same container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _store_host(store: dist.Store) -> tuple[str, int | None]:
    """Address of a store, and the rank whose process hosts it; None: another process, or a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return "", None
    # torchrun sets this for its workers when the store is in its own process.
    in_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{store.host}:{store.port}", None if in_launcher else 0
