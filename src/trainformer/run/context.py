"""What the program around a run wants of every run that is made inside it: a sweep, of the runs of its trials.

Owns the place where that is said and where sessions ask. Who says it, and what for, is the business of higher layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainformer.run.folder import RunFolder

if TYPE_CHECKING:
    from trainformer.run.run import Run


class Surroundings(Protocol):
    """What can be wanted of a run."""

    def callbacks_for(self, run: Run) -> list[Any]:
        """Callbacks that it gets after its own."""
        ...

    def folder_for(self, wanted: Path | None, title: str) -> Path:
        """Where it keeps its files, instead of in the folder it was given, if it was given one."""
        ...


_AROUND: ContextVar[Surroundings | None] = ContextVar("surroundings", default=None)


@contextmanager
def surrounded_by(surroundings: Surroundings) -> Iterator[None]:
    """Runs that are made meanwhile, in this thread, are made inside these surroundings."""
    token = _AROUND.set(surroundings)
    try:
        yield
    finally:
        _AROUND.reset(token)


def callbacks_from_around(run: Run) -> list[Any]:
    """The callbacks that a run gets from its surroundings."""
    around = _AROUND.get()
    return [] if around is None else around.callbacks_for(run)


def folder_from_around(run: Run) -> RunFolder | None:
    """The folder that its surroundings choose for a run, if there are any."""
    around, settings = _AROUND.get(), run.settings
    if around is None:
        return None
    wanted = None
    if settings.run_dir is not None or settings.name is not None:
        wanted = RunFolder.choose(settings.run_dir, settings.name, run.title, settings.save_dir).path
    save_dir = Path(settings.save_dir)  # if absolute, runs of several trials would have one folder of checkpoints
    return RunFolder(around.folder_for(wanted, run.title), save_dir.name if save_dir.is_absolute() else str(save_dir))
