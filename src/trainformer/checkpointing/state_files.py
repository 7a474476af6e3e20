"""How the components of a checkpoint become files and come back: what a backend answers to the checkpointer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trainformer.checkpointing import StateComponent
from trainformer.engine.process_group import ProcessGroup


class StateFiles(Protocol):
    """Reading executes nothing. Whatever a full disk makes of writing is an `OSError`."""

    def snapshot(self, component: StateComponent, state: Any) -> Any:
        """A copy that stays as it is while the run goes on."""
        ...

    def write(self, folder: Path, component: StateComponent, state: Any, process_group: ProcessGroup) -> list[str]:
        """Write a component, or this rank's part of it; the names of its files below the folder."""
        ...

    def read(self, folder: Path, names: list[str], format: str) -> Any:
        """The state in these files."""
        ...

    def read_file(self, path: Path, rank: int) -> dict[str, Any]:
        """States by component from a single file."""
        ...

    def check_replicas(self, states: Mapping[StateComponent, Any], process_group: ProcessGroup) -> None:
        """Raise if ranks that should hold the same have drifted apart."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions to record with a checkpoint."""
        ...
