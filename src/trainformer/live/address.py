"""Where a run listens: a socket, and ``control.json`` in the run folder that tells clients about it.

The path of a Unix socket is limited to about 100 bytes, which run folders exceed. So the socket is in a short private
folder (mode 0700), and ``control.json`` (mode 0600) holds its path and a token that every request must include.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainformer.utils.files import decode_json
from trainformer.utils.processes import process_identity

FILE = "control.json"
#: Requests that the training loop carries out at a step boundary.
VERBS = ("save", "stop", "abort", "eval")
#: The request that the listening thread answers at once.
STATUS = "status"
_PREFIX = "trainformer-"
_SETTLED_SECONDS = 60.0  # after so long, the process that created a socket folder surely listens in it
_SOCKET = "control"
_MAX_PATH_BYTES = 100  # of a socket: 108 on Linux and 104 on macOS, including the terminating zero


@dataclass(frozen=True)
class Address:
    """What a client needs to connect. Without a `path`, it is a local `port`."""

    token: str
    process: int
    identity: str | None
    host: str
    path: str | None = None
    port: int | None = None


def listen() -> tuple[socket.socket, Address]:
    """A listening socket that only this user can reach, and its address with a new token."""
    process = os.getpid()
    address = Address(secrets.token_hex(32), process, process_identity(process), socket.gethostname())
    if hasattr(socket, "AF_UNIX"):
        for root in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
            with contextlib.suppress(OSError):  # a file system without sockets, or a path that is too long
                listener, path = _listen_in(root)
                return listener, replace(address, path=path)
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, replace(address, port=listener.getsockname()[1])


def _listen_in(root: str) -> tuple[socket.socket, str]:
    # With the host name: the temporary folder may be shared, and sockets of other machines all look dead from here.
    prefix = f"{_PREFIX}{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]}-"
    if len(os.fsencode(root)) + len(prefix) + len(_SOCKET) + 10 > _MAX_PATH_BYTES:
        raise OSError(f"{root} is too long for the path of a socket")
    _remove_dead_sockets(root, prefix)
    folder = tempfile.mkdtemp(prefix=prefix, dir=root)  # mode 0700
    path = os.path.join(folder, _SOCKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError:
        listener.close()
        _remove_socket(path)
        raise
    return listener, path


def _remove_dead_sockets(root: str, prefix: str) -> None:
    """Remove what killed runs of this user left: folders with a socket on which nobody listens."""
    for entry in os.scandir(root):
        if not entry.name.startswith(prefix):
            continue
        path = os.path.join(entry.path, _SOCKET)
        with contextlib.suppress(OSError):
            stat = entry.stat(follow_symlinks=False)
            is_mine = not hasattr(os, "getuid") or stat.st_uid == os.getuid()
            if is_mine and time.time() - stat.st_mtime > _SETTLED_SECONDS and _is_dead(path):
                _remove_socket(path)


def _is_dead(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)  # a listener that is too busy to accept still exists
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
    return False


def connect(address: Address, seconds: float) -> socket.socket:
    """Connect to a run."""
    if address.path is None:
        return socket.create_connection(("127.0.0.1", address.port or 0), timeout=seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        deadline = time.monotonic() + seconds
        while True:
            try:
                connection.connect(address.path)
                break
            except BlockingIOError:  # the backlog is full; unlike a TCP connect, this does not wait
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.02)
    except BaseException:
        connection.close()
        raise
    return connection


def publish(folder: Path, address: Address) -> None:
    """Write ``control.json``, replacing what a killed process left. At no instant can other users read it."""
    if (stale := read(folder)) is not None and stale.path is not None and not is_there(stale):
        _remove_socket(stale.path)
    path = folder / FILE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)  # an unusual umask may have removed the owner's permissions too
        os.write(descriptor, json.dumps(asdict(address)).encode())
    finally:
        os.close(descriptor)


def withdraw(folder: Path, address: Address) -> None:
    """Remove the socket, and ``control.json`` if it still holds this address."""
    with contextlib.suppress(OSError):
        if (found := read(folder)) is not None and found.token == address.token:
            (folder / FILE).unlink()
    if address.path is not None:
        _remove_socket(address.path)


def read(folder: Path) -> Address | None:
    """The address in a run folder; None if there is none, or a partial one. `PermissionError` for another user's."""
    try:
        found = Address(**decode_json((folder / FILE).read_bytes()))
        fits = isinstance(found.token, str) and isinstance(found.process, int) and isinstance(found.host, str)
        fits = fits and isinstance(found.identity, str | None) and isinstance(found.path, str | None)
        return found if fits and isinstance(found.port, int | None) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def is_there(address: Address) -> bool:
    """Whether the listening process is alive on this machine."""
    identity = process_identity(address.process)
    return identity is not None and identity == address.identity


def _remove_socket(path: str) -> None:
    """Remove a socket and its folder, but nothing with a name that is not ours."""
    folder = os.path.dirname(path)
    if os.path.basename(path) != _SOCKET or not os.path.basename(folder).startswith(_PREFIX):
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
