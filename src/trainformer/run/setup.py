"""What a run needs of its backend, and the check of its settings before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from trainformer.engine import Backend
from trainformer.loggers.registry import make_loggers
from trainformer.run.settings import CommonSettings


class RunBackend(Backend, Protocol):
    """What a run needs of a backend beyond what the loop needs."""

    has_request: Callable[[], bool]  # whether this rank has a request for all ranks

    @property
    def grad_norm(self) -> Any:
        """Gradient norm of the last step before clipping, still on the device."""

    def schedule_for(self, total_steps: int | None) -> None:
        """Fit the schedules to the length of the run."""

    def run_context(self) -> AbstractContextManager[Any]:
        """Global framework settings (matmul precision, mesh) for the duration of a run."""

    def drop_step(self) -> None:
        """Discard a step that was not finished."""


def validate_settings(settings: CommonSettings) -> None:
    """Reject settings and logger names that cannot work, before anything is built."""
    settings.validate()
    make_loggers(settings.log, project=settings.project, name=settings.name, run_dir=Path("runs"))
