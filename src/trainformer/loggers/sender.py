"""Sends items to a slow place in the background, so that a loop which hands them over never waits.

Owns order, retries and the limits on what is kept while the other side is down. Knows nothing about what is sent.
All its state belongs to the calling thread; the worker thread only runs `send`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Sender(Generic[Item]):
    """One `send` at a time; what arrives meanwhile goes out together with the next.

    A failed batch is sent again after `pause` seconds, and given up after `tries` failures, since a batch that is
    refused for what is in it would hold up all others for ever. `dropped` counts the items given up.

    >>> received: list[int] = []
    >>> sender = Sender(received.extend, batch_size=10)
    >>> sender.put([1, 2])
    >>> sender.close(timeout=10)
    >>> received
    [1, 2]
    """

    def __init__(
        self,
        send: Callable[[list[Item]], object],
        *,
        batch_size: int,
        keep: int = 100_000,
        pause: float = 30.0,
        tries: int = 5,
    ) -> None:
        self.dropped = 0
        self._send = send
        self._batch_size = batch_size
        self._keep = keep
        self._pause = pause
        self._tries = tries
        self._waiting: list[Item] = []
        self._batch: list[Item] = []
        self._future: Future[object] | None = None
        self._failed = 0
        self._not_before = 0.0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainformer-sender")

    def put(self, items: Iterable[Item]) -> None:
        """Hand items over. Raises what went wrong with an earlier batch; the items are kept all the same."""
        self._waiting.extend(items)
        excess = max(0, len(self._waiting) - self._keep)
        del self._waiting[:excess]
        self.dropped += excess
        if self._future is None or self._future.done():
            self._collect()
            if time.monotonic() >= self._not_before:
                self._start()

    def flush(self, timeout: float) -> None:
        """Wait until everything is sent. Raises when a batch fails, or when it takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._collect()
            self._start()
            if self._future is None:
                return
            if not wait([self._future], deadline - time.monotonic()).done:
                left = len(self._batch) + len(self._waiting)
                raise TimeoutError(f"{left} items were not sent within {timeout:g} s; the receiver does not answer.")

    def close(self, timeout: float) -> None:
        """Send what is left, as far as possible, and end the worker."""
        try:
            self.flush(timeout)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        if self._future is None and self._waiting:
            self._batch = self._waiting[: self._batch_size]
            del self._waiting[: self._batch_size]
            self._future = self._pool.submit(self._send, self._batch)

    def _collect(self) -> None:
        """Take up the result of the last batch, if there is one by now."""
        if self._future is None or not self._future.done():
            return
        error, self._future = self._future.exception(), None
        if error is None:
            self._failed = 0
            return
        self._failed += 1
        self._not_before = time.monotonic() + self._pause
        if self._failed < self._tries:
            self._waiting[:0] = self._batch
        else:
            self.dropped += len(self._batch)
            self._failed = 0
        raise error
