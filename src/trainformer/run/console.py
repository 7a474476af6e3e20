"""Messages of a run: on the console, above the progress bar, and wherever else they are wanted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

logger = logging.getLogger("trainformer")


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.print(record.getMessage(), style=style, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def messages_on(console: Console, wanted: bool) -> Iterator[None]:
    """Show trainformer's messages meanwhile, unless the program has set up logging itself."""
    own = [handler for handler in logging.getLogger().handlers if not isinstance(handler, logging.NullHandler)]
    if not wanted or own:
        yield
        return
    with messages_to(_ConsoleHandler(console)):
        yield


@contextmanager
def messages_to(handler: logging.Handler) -> Iterator[None]:
    """Give a handler trainformer's messages meanwhile, then close it."""
    level = logger.level
    logger.addHandler(handler)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
