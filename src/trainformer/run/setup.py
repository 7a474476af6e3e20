"""What a run is made of. `run.torch.setup.build_run` and `run.jax` build these parts once; they never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from trainformer.callbacks.base import CallbackList
from trainformer.checkpointing import StateFiles
from trainformer.engine import Backend, DataSource
from trainformer.engine.process_group import ProcessGroup
from trainformer.loggers.registry import make_loggers
from trainformer.run.settings import CommonSettings, FrontOptions


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


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of one run. `passed` are the settings the user named; `data` is what the user passed as data.

    `val_sources` are the validation batches by the name of the set; one set alone may have the empty name.
    """

    settings: CommonSettings
    options: FrontOptions
    process_group: ProcessGroup
    backend: RunBackend
    files: StateFiles
    callbacks: CallbackList
    train_source: DataSource
    val_sources: Mapping[str, DataSource]
    train_size: int | None
    data: Any
    passed: frozenset[str]
    console: Console


def validate_settings(settings: CommonSettings) -> None:
    """Reject settings and logger names that cannot work, before anything is built."""
    settings.validate()
    make_loggers(settings.log, project=settings.project, name=settings.name, run_dir=Path("runs"))
