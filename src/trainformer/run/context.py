"""What the surrounding program imposes on every run created inside it: a sweep, on the runs of its trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainformer.run.run import Run


class RunContext(Protocol):
    """Implemented by `sweep`."""

    def callbacks_for(self, run: Run) -> list[Any]:
        """Callbacks to append to those of the run."""

    def folder_for(self, wanted: Path | None, title: str) -> Path:
        """The run folder to use instead of the one the user chose, if any."""


_CURRENT: ContextVar[RunContext | None] = ContextVar("run_context", default=None)


def current_context() -> RunContext | None:
    """The context that runs are created in, if there is one."""
    return _CURRENT.get()


@contextmanager
def run_context(context: RunContext) -> Iterator[None]:
    """Runs created inside this block, in this thread, belong to the context."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)
