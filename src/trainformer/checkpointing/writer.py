"""Writing behind the loop's back: one save at a time, and no error is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time in a thread. Errors are handed out at the next `submit` or `wait`.

    >>> writer, done = BackgroundWriter(), []
    >>> writer.submit(lambda: done.append(1))
    >>> writer.wait()
    >>> done
    [1]
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Wait for the job before, raise its error if it had one, then start this one."""
        self.wait()
        # Not a daemon: the interpreter waits at exit, so the last save of a program that just ends is not torn.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is in flight; raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
