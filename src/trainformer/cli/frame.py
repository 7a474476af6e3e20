"""From the words of a command line to a command, and from what happens there to an exit code.

0: done. 1: failed, with one paragraph that says why. 2: the command line makes no sense. A command is a module with
`add_parser(subparsers)` and `run(args)`, which returns an exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence

from trainformer import __version__
from trainformer.cli import config, ctl, finalize, launch, run

_COMMANDS = (run, launch, config, finalize, ctl)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    args = _parser().parse_args(arguments)
    try:
        return args.execute(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has gone; Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug:
            raise
        print(_paragraph(error), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainformer", description="One training engine for deep learning.")
    parser.add_argument("--version", action="version", version=f"trainformer {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for command in _COMMANDS:
        added = command.add_parser(subparsers)
        added.set_defaults(execute=command.run)
        added.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser


def _paragraph(error: Exception) -> str:
    from trainformer.core.errors import TrainformerError

    known = isinstance(error, TrainformerError | OSError)
    text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where it came from)"
    return textwrap.fill(f"error: {' '.join(text.split())}", 100, break_long_words=False, break_on_hyphens=False)
