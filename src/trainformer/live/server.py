"""The thread that listens. It touches nothing of the training: it hands requests over and sends answers back.

One JSON object per line each way, one request per connection. Whoever does not show the token gets nothing, not even
an error. A client that is slow, silent, or sends rubbish or far too much costs a closed connection, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainformer.live.requests import STATUS, VERBS, Request, Ticket

MOST_BYTES = 1 << 16  # of a message
MOST_CONNECTIONS = 16
LOOK_SECONDS = 0.02  # between two looks for a file
READ_SECONDS = 5.0  # for a whole request to arrive, and for its answer to leave

Reply = dict[str, Any]


class ControlServer:
    """Listens in a daemon thread from `start` to `close`.

    `submit` gets each request to be carried out, `snapshot` says where the run is. Both are called in the thread.
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
        self._answers: dict[asyncio.Task[Any], asyncio.Future[Reply] | None] = {}
        self._thread = threading.Thread(target=self._run, name="trainformer-control", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self, ended: str) -> None:
        """Stop listening. Answers that are ready are still sent; whoever has none is told that the run has `ended`."""
        with contextlib.suppress(RuntimeError):  # the thread has died, its loop is closed
            self._loop.call_soon_threadsafe(self._end, ended)
        self._thread.join(3 * READ_SECONDS)

    def _end(self, ended: str) -> None:
        for task, answer in self._answers.items():
            if answer is None:
                task.cancel()  # has not asked for anything yet
            elif not answer.done():
                answer.set_result({"ok": False, "error": ended})
        self._stopping.set()

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        begin = asyncio.start_server if self._listener.family != _unix() else asyncio.start_unix_server
        server = await begin(self._converse, sock=self._listener, limit=MOST_BYTES)
        await self._stopping.wait()
        server.close()
        if self._answers:
            await asyncio.wait(list(self._answers), timeout=READ_SECONDS)
        late = asyncio.all_tasks() - {asyncio.current_task()}
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._answers) >= MOST_CONNECTIONS or self._stopping.is_set():
            writer.transport.abort()
            return
        self._answers[task] = None
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), READ_SECONDS)
            message = self._authentic(line)
            reply = None if message is None else await self._reply(message, task, reader)
            if reply is not None:
                writer.write(json.dumps(reply).encode() + b"\n")
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), READ_SECONDS)
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client's trouble, or the end of the run
        finally:
            del self._answers[task]
            writer.transport.abort()

    def _authentic(self, line: bytes) -> dict[str, Any] | None:
        """The message, if it is one and shows the token."""
        try:
            message = json.loads(line)
            token = message["token"].encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return message if hmac.compare_digest(token, self._token) else None

    async def _reply(
        self, message: dict[str, Any], task: asyncio.Task[Any], reader: asyncio.StreamReader
    ) -> Reply | None:
        """What to answer; None if the client has left meanwhile."""
        verb, by = message.get("verb"), _printable(message.get("by"))
        if verb == STATUS:
            return self._status()
        if verb not in VERBS:
            return {"ok": False, "error": f"Expected one of {', '.join((STATUS, *VERBS))}, received {verb!r}."}
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._submit(
            Ticket(
                Request(verb, by),
                resolve=lambda reply: self._soon(_set_once, answer, reply),
                resolve_when=lambda file, reply: self._soon(self._watch, answer, file, reply),
            )
        )
        if not message.get("wait", True):
            return {"ok": True, "accepted": True}
        self._answers[task] = answer
        left = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if not left.cancel():
            left.exception()  # looked at, so that nobody complains that it was not
        return answer.result() if answer.done() else None

    def _status(self) -> Reply:
        try:
            return {"ok": True, **self._snapshot()}
        except Exception as error:  # the run goes on, and so does this thread
            return {"ok": False, "error": f"The state of the run could not be read: {type(error).__name__}: {error}"}

    def _soon(self, function: Callable[..., object], *args: Any) -> None:
        """Have something done in the thread; called by whoever carried out the request."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _watch(self, answer: asyncio.Future[Reply], file: Path, reply: Reply) -> None:
        """Look for a file until it is there, or until somebody else has answered."""
        if file.exists():
            _set_once(answer, reply)
        elif not answer.done():
            self._loop.call_later(LOOK_SECONDS, self._watch, answer, file, reply)


def _set_once(answer: asyncio.Future[Reply], reply: Reply) -> None:
    if not answer.done():
        answer.set_result(reply)


def _unix() -> int | None:
    return getattr(socket, "AF_UNIX", None)


def _printable(by: object, most: int = 200) -> str:
    """Who asked, fit for a line of a log."""
    return "".join(c if c.isprintable() else "?" for c in str(by or "somebody"))[:most]
