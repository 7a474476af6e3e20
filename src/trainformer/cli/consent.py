"""Ask the user, on a terminal, whether code of the current folder may be imported; `--trust` answers beforehand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainformer.config.own_code import Code


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Modules and packages that may be imported."""
    trust = (
        "a package or module that may be imported, besides the usual ones; code of the current folder is remembered "
        "until it changes"
    )
    parser.add_argument("--trust", action="append", default=[], metavar="MODULE", help=trust)


@contextmanager
def asking() -> Iterator[None]:
    """Ask when code is used for the first time, and remember what the user allows."""
    from trainformer.config.own_code import ASK

    token = ASK.set(ask)
    try:
        yield
    finally:
        ASK.reset(token)


def ask(code: Code) -> bool:
    """Whether the user allows it. No, where nobody can answer: without a terminal, or in one of several processes."""
    if "RANK" in os.environ or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    files = ", ".join(ascii(os.path.relpath(file, code.folder)) for file in code.files)
    print(
        f"A config names code of this folder that you have not approved yet, or that has changed since:\n"
        f"  module  {ascii(code.name)[1:-1]}\n  file    {files}\n  digest  {code.digest}\n"
        f"It can do anything that you can. Import it, now and until it changes? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")
