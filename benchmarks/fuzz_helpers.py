"""What the readers of `fuzz.py` share."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any

from trainformer.cli import main

_SHARED: dict[str, Any] = {}


def shared(name: str, make: Callable[[], Any]) -> Any:
    """What a process makes once."""
    if name not in _SHARED:
        _SHARED[name] = make()
    return _SHARED[name]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextlib.contextmanager
def logged_warnings() -> Any:
    """The warnings that are logged meanwhile."""
    handler, logger = _Collector(), logging.getLogger("trainformer")
    logger.addHandler(handler)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)


def cli(*words: str) -> None:
    """Run a command of `trainformer`; an error that is not ours is raised."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as out, contextlib.redirect_stderr(out):
        code = main([*words, "--debug"])
        out.flush()
    assert code in (0, 1), out.buffer.getvalue()
