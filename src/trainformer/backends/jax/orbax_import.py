"""orbax, without what it does to a program's logging.

It logs through absl, which sets up the root logger as soon as it has something to say and nobody else has done so. From
then on everybody's messages would go to stderr, also those that are shown elsewhere already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Let orbax work meanwhile, and leave the logging of the program as it is."""
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)


with quiet():
    import orbax.checkpoint as ocp

__all__ = ["ocp", "quiet"]
