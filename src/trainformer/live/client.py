"""The client: sends a request to a run and waits for the reply. If there is none, the error explains why."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, TrainformerError, did_you_mean, expected
from trainformer.live import address
from trainformer.live.address import STATUS, VERBS
from trainformer.live.runs import describe, find_run, why_not_running
from trainformer.utils.files import decode_json

_MAX_BYTES = 1 << 20  # of a reply
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("step", "planned_steps", "epoch", "best_step"), int),
    **dict.fromkeys(("metrics", "evaluation", "best"), dict),
    **dict.fromkeys(("steps_per_second", "eta_seconds"), int | float),
    **dict.fromkeys(("status", "checkpoint", "checkpoints", "path", "error"), str),
}
_STATUS_SECONDS = 10.0  # a healthy control thread answers at once, but the machine may be busy


class ControlError(TrainformerError, RuntimeError):
    """A run could not be reached, or could not carry out a request."""


def ask(
    run: str | os.PathLike[str], verb: str, *, wait: bool = True, timeout: float = 60.0, by: str | None = None
) -> dict[str, Any]:
    """Ask a running job to "save", "stop", "abort" or "eval", or for its "status"; returns the reply.

    `run` is the folder of a run, or the name of one under ``runs/``. The reply comes when the request has been carried
    out, at the next step boundary; without `wait`, as soon as it is accepted.
    """
    if verb not in (STATUS, *VERBS):
        known = (STATUS, *VERBS)
        raise BadArgument(expected(f"a verb among {', '.join(known)}", verb, did_you_mean(str(verb), known)))
    if not timeout > 0:
        raise BadArgument(expected("timeout to be a positive number of seconds", timeout))
    folder = find_run(run)
    where = _address_of(folder)
    message = {"token": where.token, "verb": verb, "by": by or whoami(), "wait": wait}
    try:
        reply = _exchange(where, message, timeout)
    except TimeoutError:
        raise ControlError(_why_silent(folder, where, verb, timeout)) from None
    except (OSError, EOFError, ValueError) as error:
        raise ControlError(_why_unreachable(folder, where, error)) from error
    if not reply.get("ok"):
        raise ControlError(f"{folder.name}: {reply.get('error', 'the run refused without a reason')}")
    wrong = [name for name, kind in _KINDS.items() if not isinstance(reply.get(name), kind | None)]
    missing = [name for name in ("step", "metrics") if verb == STATUS and reply.get(name) is None]
    missing += ["planned_steps"] if verb == STATUS and "planned_steps" not in reply else []
    if wrong or missing:
        raise ControlError(
            f"Expected a reply that this version of trainformer understands from {folder.name}, received one with "
            f"{'another' if wrong else 'no'} {', '.join(wrong or missing)}. Is it the same version?"
        )
    return reply


def whoami() -> str:
    """Who sends the request, for the log of the run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without a passwd entry for this user
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()} (pid {os.getpid()})"


def _address_of(folder: Path) -> address.Address:
    """The address of a run that is running, here, and ours."""
    info = describe(folder)
    try:
        found = address.read(folder)
    except PermissionError:
        file = folder / address.FILE
        text = f"{file} belongs to {_owner(file)}: only the user who started a run can control it."
        raise ControlError(text) from None
    if info.host is not None:
        raise ControlError(
            f"{info.name} runs on {info.host}, and this is {socket.gethostname()}. Run the command there."
        )
    if not info.is_running:
        raise ControlError(why_not_running(info))
    if found is None or found.process != info.process:
        raise ControlError(
            f"{info.name} is running (process {info.process}) but does not listen: it is just starting or ending, or "
            f"could not open a socket, which {folder / 'log.txt'} would say."
        )
    return found


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError, NotImplementedError):
        return "another user"


def _exchange(where: address.Address, message: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send a line, read a line."""
    deadline = time.monotonic() + timeout
    with address.connect(where, timeout) as connection:
        connection.sendall(json.dumps(message).encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            part = connection.recv(1 << 16)
            if not part:
                raise EOFError("the connection was closed without a reply")
            received += part
            if len(received) > _MAX_BYTES:
                raise ValueError("the reply is too long")
    reply = decode_json(received)
    if not isinstance(reply, dict):
        raise ValueError("the reply is not a JSON object")
    return reply


def _why_silent(folder: Path, where: address.Address, verb: str, timeout: float) -> str:
    """The explanation of a timeout: is the process alive, and does its control thread answer?"""
    what = f"{folder.name} did not answer within {timeout:g} s"
    info = describe(folder)
    if not info.is_running:
        return why_not_running(info)
    try:
        if verb == STATUS:
            raise TimeoutError
        status = _exchange(where, {"token": where.token, "verb": STATUS}, _STATUS_SECONDS)
    except (OSError, EOFError, ValueError):
        return f"{what}. Its process ({info.process}) exists but does not respond; it may be suspended, or starting up."
    return (
        f"{what}: it is at step {status.get('step')} and busy with a long step, an evaluation or a save. The request "
        "is still queued for the next step boundary. Use a longer timeout to wait for it."
    )


def _why_unreachable(folder: Path, where: address.Address, error: BaseException) -> str:
    """The explanation of a failed connection: usually the run has just ended."""
    for _ in range(20):  # an exiting process takes a moment
        info = describe(folder)
        if not info.is_running:
            return why_not_running(info)
        time.sleep(0.05)
    if isinstance(error, PermissionError):
        return f"{where.path} cannot be opened ({error}): only the user who started a run can control it."
    return (
        f"{info.name} is running (process {info.process}), but its socket does not answer ({error}). If the run was "
        "restarted meanwhile, try again; otherwise use a signal: SIGTERM saves and stops, SIGUSR1 saves."
    )
