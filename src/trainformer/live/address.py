"""Where a run listens, and the file in its folder that says so.

The path of a Unix socket may have some hundred bytes, that of a run folder has more. So the socket lies in a short
private folder (mode 0700), and ``control.json`` (mode 0600) says where, with a token that every request must show.
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

from trainformer.utils.processes import process_identity

FILE = "control.json"
_PREFIX = "trainformer-"
_SETTLED = 60.0  # seconds after which whoever made a folder surely listens in it
_SOCKET = "control"
_MOST_BYTES = 100  # of a socket's path: 108 on Linux and 104 on macOS, with the zero at its end


@dataclass(frozen=True)
class Address:
    """What a client must know. Without a `path` it is a `port` of this machine alone."""

    token: str
    process: int
    identity: str | None
    host: str
    path: str | None = None
    port: int | None = None


def listen() -> tuple[socket.socket, Address]:
    """A socket to listen on that only this user can reach, and its address, with a new token."""
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
    prefix = _prefix()
    if len(os.fsencode(root)) + len(prefix) + len(_SOCKET) + 10 > _MOST_BYTES:
        raise OSError(f"{root} is too long for the path of a socket")
    _sweep(root, prefix)
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


def _prefix() -> str:
    """How folders of this machine begin: a temporary folder may be shared, and here others' sockets all seem dead."""
    return f"{_PREFIX}{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]}-"


def _sweep(root: str, prefix: str) -> None:
    """Remove what killed runs of this user left: folders with a socket on which nobody listens."""
    for entry in os.scandir(root):
        if not entry.name.startswith(prefix):
            continue
        with contextlib.suppress(OSError):
            made = entry.stat(follow_symlinks=False)
            is_mine = not hasattr(os, "getuid") or made.st_uid == os.getuid()
            if is_mine and time.time() - made.st_mtime > _SETTLED and _is_deserted(os.path.join(entry.path, _SOCKET)):
                _remove_socket(os.path.join(entry.path, _SOCKET))


def _is_deserted(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.setblocking(False)  # whoever is too busy to open is there
        try:
            knocking.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
    return False


def connect(address: Address, seconds: float) -> socket.socket:
    """A connection to whoever listens there."""
    if address.path is None:
        return socket.create_connection(("127.0.0.1", address.port or 0), timeout=seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        until = time.monotonic() + seconds
        while True:
            try:
                connection.connect(address.path)
                break
            except BlockingIOError:  # too many others are waiting to be let in; unlike a port, this does not wait
                if time.monotonic() > until:
                    raise TimeoutError from None
                time.sleep(0.02)
    except BaseException:
        connection.close()
        raise
    return connection


def publish(folder: Path, address: Address) -> None:
    """Write ``control.json``; what a killed process left there is replaced. Nobody else can read it at any instant."""
    if (stale := read(folder)) is not None and stale.path is not None and not is_there(stale):
        _remove_socket(stale.path)
    path = folder / FILE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)  # a strange umask may have taken away the owner's rights too
        os.write(descriptor, json.dumps(asdict(address)).encode())
    finally:
        os.close(descriptor)


def withdraw(folder: Path, address: Address) -> None:
    """Remove the file, if it is still that of this address, and the socket."""
    with contextlib.suppress(OSError):
        if (found := read(folder)) is not None and found.token == address.token:
            (folder / FILE).unlink()
    if address.path is not None:
        _remove_socket(address.path)


def read(folder: Path) -> Address | None:
    """The address in a run's folder; None if there is none, or half of one. Another user's is a `PermissionError`."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        return Address(**content)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def is_there(address: Address) -> bool:
    """Whether the process that listens there exists. It does not when it has ended, or is on another machine."""
    identity = process_identity(address.process)
    return identity is not None and identity == address.identity


def _remove_socket(path: str) -> None:
    """Remove a socket and its folder, and nothing that is not called as we call them."""
    folder = os.path.dirname(path)
    if os.path.basename(path) != _SOCKET or not os.path.basename(folder).startswith(_PREFIX):
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
