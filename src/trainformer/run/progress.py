"""How far an evaluation is, for callbacks that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def showing_progress(callbacks: Iterable[Any], owner: Any, total: int | None) -> Iterator[Callable[[int], None] | None]:
    """A function to call after each batch, or None if nobody cares. Callbacks hear when it is over, however it ends."""
    listeners = [cb for cb in callbacks if hasattr(cb, "on_validation_batch_end")]
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += 1
        for listener in listeners:
            listener.on_validation_batch_end(owner, done, total)

    try:
        yield tell if listeners else None
    finally:
        for listener in listeners:
            if hasattr(listener, "on_validation_cleanup"):
                listener.on_validation_cleanup(owner)
