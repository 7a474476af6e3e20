"""What the surrounding program imposes on every run created inside it: a sweep, on the runs of its trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

#: Has the methods `callbacks_for(run)`, callbacks to append to those of the run, and `folder_for(wanted, title)`, the
#: run folder to use instead of the one the user chose, if any.
_CURRENT: ContextVar[Any] = ContextVar("run_context", default=None)


def current_context() -> Any:
    """The context that runs are created in, or None."""
    return _CURRENT.get()


@contextmanager
def run_context(context: Any) -> Iterator[None]:
    """Runs created inside this block, in this thread, belong to the context."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)
