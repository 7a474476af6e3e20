"""Components of a run on JAX as files: the arrays through orbax, everything else as JSON."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import optax

from trainformer.checkpointing import StateComponent
from trainformer.checkpointing.orbax_files import snapshot, write_state
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.engine.process_group import ProcessGroup
from trainformer.utils.tree_files import read_tree, write_tree


@dataclass(frozen=True)
class SavedArrays:
    """Arrays that are still in their files: they are read when it is known which device gets which part."""

    folder: Path


class JaxFiles:
    """See `session.state_files.StateFiles`."""

    def snapshot(self, component: StateComponent, state: Any) -> Any:
        """A copy on the host: the next step gives up the memory of these very arrays, and callbacks go on counting."""
        return snapshot(state) if component.format == "orbax" else copy.deepcopy(state)

    def write(self, folder: Path, component: StateComponent, state: Any, process_group: ProcessGroup) -> list[str]:
        """Write a component in its format. What orbax makes of a full disk is an `OSError`."""
        if component.format != "orbax":
            return write_tree(folder, component.stem(process_group.rank), state)
        try:
            return write_state(folder / component.key, state)
        except ValueError as error:  # tensorstore hides the system's error behind one of its own
            raise OSError(f"writing {folder / component.key} failed: {error}") from error

    def read(self, folder: Path, names: list[str], format: str) -> Any:
        """Plain values at once, arrays when they are given back."""
        if format not in ("orbax", "tree", "json"):
            raise DataError(
                f"{folder} is no checkpoint of a run on JAX, but of one on torch: {names[0]} is written as {format!r}."
            )
        if format == "orbax":
            return SavedArrays(folder / Path(names[0]).parts[0])
        return read_tree(folder, names)

    def read_file(self, path: Path, rank: int) -> dict[str, Any]:
        """A run on JAX has no single file."""
        raise BadArgument(
            expected("a folder: that of a run, of a checkpoint, or one that save_pretrained wrote", str(path))
        )

    def check_replicas(self, states: Mapping[StateComponent, Any], process_group: ProcessGroup) -> None:
        """Arrays are global: no process has a copy of its own that could differ."""

    def versions(self) -> dict[str, str]:
        """Those of jax and what belongs to it."""
        return {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}
