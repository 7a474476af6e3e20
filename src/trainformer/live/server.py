"""The control server: a thread that queues requests for the training loop and sends the replies.

One JSON object per line each way, one request per connection. A client without the token gets no reply, not even an
error. A client that is slow, silent, or sends garbage or too much gets its connection closed, nothing else.

Silent connections never keep others out: beyond `MAX_SILENT`, the process that has most of them loses its oldest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainformer.engine import Control
from trainformer.live.address import STATUS, VERBS

#: The name under which requests appear in logs and in `control.stopped_by`.
NAME = "trainformer ctl"
MAX_BYTES = 1 << 16  # of a message
MAX_CONNECTIONS = 16  # that wait for the reply to a valid request
MAX_SILENT = 32  # that have not sent a valid request
_MAX_NAME = 200  # characters of who asked
POLL_SECONDS = 0.02  # between two checks for a file
READ_SECONDS = 5.0  # for a request to arrive completely, and for its reply to be sent

Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """Plain values, so that it can be broadcast to the other ranks. `by` says who asked."""

    verb: str
    by: str


@dataclass(slots=True, eq=False)
class Ticket:
    """A request whose client is waiting for a reply. Stays in the process that listens.

    `resolve` replies at once, `resolve_when` as soon as a file exists; the first reply counts. `step` is the step at
    which the request was applied, `path` the checkpoint that is being written for it, and `failures` the number of
    saves that had failed by then.
    """

    request: Request
    resolve: Callable[[dict[str, Any]], None]
    resolve_when: Callable[[Path, dict[str, Any]], None]
    step: int = -1
    path: str | None = None
    failures: int = 0

    def answer(self, **values: Any) -> None:
        """Reply that it was done."""
        self.resolve({"ok": True, **values})

    def answer_when(self, file: Path, **values: Any) -> None:
        """Reply that it was done as soon as a file exists, which another thread is writing."""
        self.resolve_when(file, {"ok": True, **values})

    def refuse(self, error: str) -> None:
        """Reply that it could not be done."""
        self.resolve({"ok": False, "error": error})


def apply(request: Request, control: Control) -> None:
    """Set the control flags for a request, at the current step boundary.

    >>> control = Control()
    >>> apply(Request("stop", "ann@desk (pid 7)"), control)
    >>> control.should_save, control.stopped_by, control.stop_reason
    (True, 'trainformer ctl', 'requested by ann@desk (pid 7)')
    """
    reason = f"requested by {request.by}"
    if request.verb == "eval":
        control.should_evaluate = True
    elif request.verb == "save":
        control.should_save = True
    elif request.verb == "stop":
        control.should_save = True
        control.stop(reason, by=NAME)
    else:
        assert request.verb == "abort", request.verb
        control.abort(reason, by=NAME)


class ControlServer:
    """Listens in a daemon thread from `start` to `close`.

    `submit` receives each request, `snapshot` returns the status of the run. Both are called in the thread.
    """

    def __init__(
        self, listener: socket.socket, token: str, submit: Callable[[Ticket], None], snapshot: Callable[[], Reply]
    ) -> None:
        self._listener = listener
        self._token = token.encode()
        self._submit = submit
        self._snapshot = snapshot
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._clients: dict[asyncio.Task[Any], asyncio.Future[Reply] | None] = {}
        self._silent: dict[asyncio.Task[Any], int] = {}  # oldest first, with the process of the client
        self._thread = threading.Thread(target=self._run, name="trainformer-control", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def close(self, ended: str) -> None:
        """Stop listening. Pending replies are still sent; clients without one get `ended` as an error."""
        with contextlib.suppress(RuntimeError):  # the thread has died and its loop is closed
            self._loop.call_soon_threadsafe(self._end, ended)
        self._thread.join(3 * READ_SECONDS)

    def _end(self, ended: str) -> None:
        for task, reply in self._clients.items():
            if reply is None:
                task.cancel()  # no request yet
            else:
                _set_once(reply, {"ok": False, "error": ended})
        self._stopping.set()

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        is_unix = self._listener.family == getattr(socket, "AF_UNIX", None)
        start = asyncio.start_unix_server if is_unix else asyncio.start_server
        server = await start(self._handle_client, sock=self._listener, limit=MAX_BYTES)
        await self._stopping.wait()
        server.close()
        for _ in range(3):
            # Connections accepted just now get to `_handle_client`, which closes them. Cancelled before that, asyncio
            # of Python 3.11 would log a traceback.
            await asyncio.sleep(0)
        if self._clients:
            await asyncio.wait(list(self._clients), timeout=READ_SECONDS)
        late = asyncio.all_tasks() - {asyncio.current_task()}
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _handle_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._clients) - len(self._silent) >= MAX_CONNECTIONS or self._stopping.is_set():
            writer.transport.abort()
            return
        self._clients[task] = None
        self._silent[task] = _process_of(writer)
        if len(self._silent) > MAX_SILENT:
            ((busiest, _),) = Counter(self._silent.values()).most_common(1)
            oldest = next(other for other, process in self._silent.items() if process == busiest)
            del self._silent[oldest], self._clients[oldest]  # at once: it ends only when the loop gets to it
            oldest.cancel()
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), READ_SECONDS)
            message = self._authenticated(line)
            if message is not None and self._silent.pop(task, None) is None:
                return  # closed meanwhile, as one of too many
            reply = None if message is None else await self._reply(message, task, reader)
            if reply is not None:
                writer.write(json.dumps(reply).encode() + b"\n")
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), READ_SECONDS)
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client's problem, or the end of the run
        finally:
            self._clients.pop(task, None)
            self._silent.pop(task, None)
            writer.transport.abort()

    def _authenticated(self, line: bytes) -> dict[str, Any] | None:
        """The message, if it is valid and has the token."""
        try:
            message = json.loads(line)
            token = message["token"].encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return message if hmac.compare_digest(token, self._token) else None

    async def _reply(
        self, message: dict[str, Any], task: asyncio.Task[Any], reader: asyncio.StreamReader
    ) -> Reply | None:
        """The reply; None if the client has disconnected meanwhile."""
        verb, who = message.get("verb"), str(message.get("by") or "unknown")
        by = "".join(c if c.isprintable() else "?" for c in who)[:_MAX_NAME]  # safe for a line in a log
        if verb == STATUS:
            return self._status()
        if verb not in VERBS:
            return {"ok": False, "error": f"Expected one of {', '.join((STATUS, *VERBS))}, received {verb!r}."}
        pending: asyncio.Future[Reply] = self._loop.create_future()
        self._submit(
            Ticket(
                Request(verb, by),
                resolve=lambda reply: self._call_in_thread(_set_once, pending, reply),
                resolve_when=lambda file, reply: self._call_in_thread(self._poll, pending, file, reply),
            )
        )
        if not message.get("wait", True):
            return {"ok": True, "accepted": True}
        self._clients[task] = pending
        disconnected = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((pending, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not disconnected.cancel():
            disconnected.exception()  # retrieved, so that asyncio does not warn
        return pending.result() if pending.done() else None

    def _status(self) -> Reply:
        try:
            return {"ok": True, **self._snapshot()}
        except Exception as error:  # neither the run nor this thread may die of it
            return {"ok": False, "error": f"The state of the run could not be read: {type(error).__name__}: {error}"}

    def _call_in_thread(self, function: Callable[..., object], *args: Any) -> None:
        """Called by the training loop when a request is done."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: no client waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _poll(self, pending: asyncio.Future[Reply], file: Path, reply: Reply) -> None:
        """Reply as soon as a file exists, unless there is a reply already."""
        if file.exists():
            _set_once(pending, reply)
        elif not pending.done():
            self._loop.call_later(POLL_SECONDS, self._poll, pending, file, reply)


def _process_of(writer: asyncio.StreamWriter) -> int:
    """The process at the other end; -1 where the system does not say."""
    connection = writer.get_extra_info("socket")
    if not hasattr(socket, "SO_PEERCRED") or connection.family != socket.AF_UNIX:
        return -1
    process, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(process)


def _set_once(pending: asyncio.Future[Reply], reply: Reply) -> None:
    if not pending.done():
        pending.set_result(reply)
