"""Asks a run for something and waits for the answer. Says in one paragraph why there is none."""

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
from trainformer.live.requests import STATUS, VERBS
from trainformer.live.runs import describe, find_run, why_not_running

_MOST_BYTES = 1 << 20  # of an answer
_GREETING = 2.0  # seconds to give a thread that answers at once


class ControlError(TrainformerError, RuntimeError):
    """A run could not be reached, or could not do what it was asked for."""


def ask(
    run: str | os.PathLike[str], verb: str, *, wait: bool = True, timeout: float = 60.0, by: str | None = None
) -> dict[str, Any]:
    """Ask a running job to "save", "stop", "abort" or "eval", or for its "status"; what it answers.

    `run` is the folder of a run, or the name of one under ``runs/``. The answer comes when the request has been carried
    out, which is at the next step boundary; without `wait` as soon as it was accepted.
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
        answer = _exchange(where, message, timeout)
    except TimeoutError:
        raise ControlError(_why_silent(folder, where, verb, timeout)) from None
    except (OSError, EOFError, ValueError) as error:
        raise ControlError(_why_unreachable(folder, where, error)) from error
    if not answer.get("ok"):
        raise ControlError(f"{folder.name}: {answer.get('error', 'the run refused without a reason')}")
    return answer


def whoami() -> str:
    """Who asks, for the log of the run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without an entry for this user
        user = str(os.getuid()) if hasattr(os, "getuid") else "somebody"
    return f"{user}@{socket.gethostname()} (pid {os.getpid()})"


def _address_of(folder: Path) -> address.Address:
    """Where a run listens, if it runs and is ours."""
    info = describe(folder)
    try:
        found = address.read(folder)
    except PermissionError:
        file = folder / address.FILE
        raise ControlError(f"{file} belongs to {_owner(file)}: only who started a run can control it.") from None
    if info.host is not None:
        raise ControlError(
            f"{info.name} runs on {info.host}, and this is {socket.gethostname()}. Give the command there."
        )
    if not info.is_running:
        raise ControlError(why_not_running(info))
    if found is None or found.process != info.process:
        raise ControlError(
            f"{info.name} runs (process {info.process}) but does not listen: it is just beginning or ending, or could "
            f"not open a socket, which {folder / 'log.txt'} would say."
        )
    return found


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError, NotImplementedError):
        return "another user"


def _exchange(where: address.Address, message: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send a line, read a line."""
    until = time.monotonic() + timeout
    with address.connect(where, timeout) as connection:
        connection.sendall(json.dumps(message).encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            part = connection.recv(1 << 16)
            if not part:
                raise EOFError("the connection was closed without an answer")
            received += part
            if len(received) > _MOST_BYTES:
                raise ValueError("the answer is far too long")
    answer = json.loads(received)
    if not isinstance(answer, dict):
        raise ValueError("the answer is not a JSON object")
    return answer


def _why_silent(folder: Path, where: address.Address, verb: str, timeout: float) -> str:
    """No answer in time: does the process live, and does its thread answer?"""
    begin = f"{folder.name} did not answer within {timeout:g} s"
    info = describe(folder)
    if not info.is_running:
        return why_not_running(info)
    try:
        if verb == STATUS:
            raise TimeoutError
        status = _exchange(where, {"token": where.token, "verb": STATUS}, _GREETING)
    except (OSError, EOFError, ValueError):
        return f"{begin}. Its process ({info.process}) exists but does not react; it may be suspended, or starting up."
    return (
        f"{begin}: it is at step {status.get('step')} and busy with a long step, an evaluation or a save. The request "
        "stands, and is carried out at the next step boundary. A longer timeout waits for it."
    )


def _why_unreachable(folder: Path, where: address.Address, error: BaseException) -> str:
    """The connection failed or broke: mostly because the run has just ended."""
    for _ in range(20):  # a process that is going away takes a moment
        info = describe(folder)
        if not info.is_running:
            return why_not_running(info)
        time.sleep(0.05)
    if isinstance(error, PermissionError):
        return f"{where.path} may not be opened ({error}): only who started a run can control it."
    return (
        f"{info.name} runs (process {info.process}), but its socket does not answer ({error}). If the run was started "
        "anew meanwhile, try again; else stop it with a signal: SIGTERM saves and stops, SIGUSR1 saves."
    )
