"""What a checkpoint is made of: state components, how ranks share them, and the protocol that turns them into files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainformer.core.types import SharingPattern
from trainformer.engine.process_group import ProcessGroup

Format = Literal["weights", "tensors", "json", "sharded", "orbax", "tree"]


class Stateful(Protocol):
    """Anything with a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a saved state."""


@dataclass(frozen=True)
class StatefulAdapter:
    """A `Stateful` made of two functions; a third rejects a state that does not fit before anything is changed.

    >>> values = {"step": 3}
    >>> adapter = StatefulAdapter(lambda: dict(values), values.update)
    >>> adapter.load_state_dict({"step": 4})
    >>> adapter.state_dict()
    {'step': 4}
    """

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    check: Callable[[Any], None] | None = None

    def state_dict(self) -> Any:
        return self.get()

    def load_state_dict(self, state_dict: Any) -> None:
        self.put(state_dict)

    def check_state(self, state: Any) -> None:
        """Raise if a state does not fit."""
        if self.check is not None:
            self.check(state)


@dataclass(frozen=True)
class StateComponent:
    """One part of a run's state.

    `format` is how it is stored: ``weights`` as safetensors under the model's own names, ``tensors`` as a pytree of
    tensors and plain values, ``json`` as text, ``sharded`` by each rank its shard, ``orbax`` as a folder, ``tree`` as
    JSON with arrays beside it. If a component that is not `required` is missing, loading warns.
    """

    key: str
    stateful: Stateful
    sharing_pattern: SharingPattern = SharingPattern.GLOBAL
    required: bool = True
    validate_replication: bool = False
    process_group_name: str | None = None
    format: Format = "tensors"

    def stem(self, rank: int = 0, group: int = 0, node: int = 0) -> str:
        """The file name without its suffix.

        >>> StateComponent("rng", None, SharingPattern.PER_RANK).stem(rank=3)
        'rng.rank3'
        """
        owner = {
            SharingPattern.PER_RANK: f".rank{rank}",
            SharingPattern.PER_GROUP: f".{self.process_group_name or 'group'}{group}",
            SharingPattern.PER_NODE: f".node{node}",
        }
        return self.key + owner.get(self.sharing_pattern, "")


class StateFiles(Protocol):
    """How a framework stores components. Reading executes nothing; a full disk raises `OSError`."""

    def snapshot(self, component: StateComponent, state: Any, folder: Path | None) -> Any:
        """A copy that later steps do not change, for asynchronous saves.

        With several ranks, `folder` is where `write` will be called for; writing may begin at once.
        """

    def write(self, folder: Path, component: StateComponent, state: Any, process_group: ProcessGroup) -> list[str]:
        """Write a component, or this rank's shard of it; the names of its files inside the folder."""

    def read(self, folder: Path, names: list[str], format: str) -> Any:
        """The state in these files."""

    def read_file(self, path: Path, rank: int) -> dict[str, Any]:
        """States by component from a single file."""

    def check_replicas(self, states: Mapping[StateComponent, Any], process_group: ProcessGroup) -> None:
        """Raise if replicated state differs between ranks."""

    def versions(self) -> dict[str, str]:
        """Package versions to record with a checkpoint."""


def callback_states(callbacks: Mapping[str, Any]) -> Iterator[tuple[str, StatefulAdapter]]:
    """The states of named callbacks that have one, each under its own component key."""
    for name, callback in callbacks.items():
        if callable(getattr(callback, "state_dict", None)):
            check = getattr(callback, "check_state", None)
            adapter = StatefulAdapter(callback.state_dict, callback.load_state_dict, check)
            yield "callback." + name.replace("#", "-"), adapter
