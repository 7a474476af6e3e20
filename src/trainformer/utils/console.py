"""The console that runs and commands print on."""

from __future__ import annotations

import os
import sys

from rich.console import Console

#: What a process returns whose reader has exited, as in ``trainformer runs | head``: 128 + SIGPIPE.
BROKEN_PIPE = 141


class OutputClosed(SystemExit):
    """The reader of the output has exited; so does a program that does not catch this, quietly."""

    def __init__(self) -> None:
        super().__init__(BROKEN_PIPE)

    def __str__(self) -> str:
        return "the reader of the output has exited"


#: Errors that interrupt a run; it did not fail.
INTERRUPTIONS = (KeyboardInterrupt, OutputClosed)


class PipeConsole(Console):
    """A console that raises `OutputClosed` when the reader of its output has exited; rich's exits with code 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        ignore_closed_pipe()
        raise OutputClosed


def ignore_closed_pipe() -> None:
    """Send the rest of the output nowhere; Python would complain about the closed pipe again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
