"""A lock on a folder, so that two processes do not write to it at the same time.

The lock is a file that names its owner: host, process and the time it was taken. A thread of the owner updates the
modification time of the file (the heartbeat). The lock of a process that was killed is recognised at once on the same
machine, and by missing heartbeats from another host or container, so nobody has to delete a file after a crash.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainformer.core.errors import TrainformerError
from trainformer.utils.files import make_folder
from trainformer.utils.processes import process_identity

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("trainformer")

LOCK = ".lock"
HEARTBEAT_SECONDS = 5.0
_MISSED_HEARTBEATS = 4  # after which an owner elsewhere counts as dead


class FolderInUse(TrainformerError, RuntimeError):
    """Another process is working in the folder. The message names it."""


class FolderLock:
    """Held by one process at a time; `purpose` says in errors what the owner does.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with FolderLock(folder, "training").held():
    ...     FolderLock(folder, "training").acquire()
    Traceback (most recent call last):
    trainformer.utils.locks.FolderInUse: Expected no other process in ..., received: this process has been training ...
    """

    def __init__(self, folder: Path, purpose: str) -> None:
        self.path = folder / LOCK
        self.purpose = purpose
        self._stopped: threading.Event | None = None
        self._created = False

    def acquire(self) -> None:
        """Take the lock. Raises `FolderInUse` if its owner is alive; waits some seconds where only heartbeats tell."""
        self._created = not self.path.parent.exists()
        make_folder(self.path.parent)
        seen: int | None = None
        deadline = 0.0
        while True:
            with self._opened() as file:
                owner = _read(file)
                alive = _is_alive(owner)
                heartbeat = os.fstat(file).st_mtime_ns
                if alive is False:
                    self._write(file)
                    break
            if alive or (seen is not None and heartbeat != seen):
                raise FolderInUse(self._in_use(owner))
            if seen is None:
                seen, deadline = heartbeat, time.monotonic() + _MISSED_HEARTBEATS * HEARTBEAT_SECONDS
                logger.warning("%s is locked by %s; waiting for a sign of life", self.path.parent, _named(owner))
            elif time.monotonic() > deadline:
                logger.warning("taking the lock of %s, which gave no sign of life", _named(owner))
                with self._opened() as file:
                    if os.fstat(file).st_mtime_ns != seen:
                        raise FolderInUse(self._in_use(_read(file)))
                    self._write(file)
                break
            time.sleep(HEARTBEAT_SECONDS / 5)
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, args=(self._stopped,), name="folder-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock back; without effect if it is not held."""
        if self._stopped is None:
            return
        self._stopped.set()
        self._stopped = None
        try:
            with self._opened() as file:
                if _is_mine(_read(file)):
                    self.path.unlink()
            if self._created and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()  # nothing was written
        except OSError as error:  # the folder was deleted, or is no longer writable
            logger.warning("the lock of %s could not be released: %s", self.path.parent, error)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The lock is held inside; taken if it is not held yet."""
        if self._stopped is None:
            self.acquire()
        try:
            yield
        finally:
            self.release()

    def _in_use(self, owner: dict[str, Any]) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.get("time", 0)))
        who = "this process" if _is_mine(owner) else _named(owner)
        return (
            f"Expected no other process in {self.path.parent}, received: {who} has been {owner.get('purpose')} there "
            f"since {since}. Wait for it or stop it, or choose another folder or name."
        )

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, which nobody else reads or writes meanwhile (on file systems without flock, hardly anybody)."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if fcntl is not None:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX)
                    except OSError:
                        logger.debug("no flock on %s", self.path)
                if os.fstat(file).st_nlink:  # else its owner has deleted it meanwhile
                    yield file
                    return
            finally:
                os.close(file)

    def _write(self, file: int) -> None:
        process = os.getpid()
        owner = {
            "host": socket.gethostname(),
            "process": process,
            "identity": process_identity(process),
            "namespace": _namespace(),
            "purpose": self.purpose,
            "time": time.time(),
        }
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(owner).encode(), 0)

    def _beat(self, stopped: threading.Event) -> None:
        failed = False
        while not stopped.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self.path)
            except OSError as error:
                if not failed:
                    logger.warning("the heartbeat of %s failed: %s", self.path, error)
                failed = True


def _read(file: int) -> dict[str, Any]:
    """The owner; empty if there is none. What a process left that was killed while writing it counts as none."""
    try:
        owner = json.loads(os.pread(file, 1 << 16, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_mine(owner: dict[str, Any]) -> bool:
    return owner.get("process") == os.getpid() and owner.get("identity") == process_identity(os.getpid())


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner is alive; None if it runs where this process cannot see it."""
    process, identity = owner.get("process"), owner.get("identity")
    if not isinstance(process, int) or not isinstance(identity, str):
        return False
    if (owner.get("host"), owner.get("namespace")) != (socket.gethostname(), _namespace()):
        return None
    return process_identity(process) == identity


def _namespace() -> str:
    """Tells apart containers with the same host name: process ids mean something only within one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process')} on {owner.get('host')}"
