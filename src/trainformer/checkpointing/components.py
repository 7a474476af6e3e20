"""What a checkpoint is made of: components, and how each is shared over the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainformer.core.types import SharingPattern

Format = Literal["weights", "tensors", "json", "sharded", "orbax", "tree"]


class Stateful(Protocol):
    """Anything with a state that can be taken and given back."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take it back."""
        ...


@dataclass(frozen=True)
class StateComponent:
    """One part of a run's state.

    `format` says how it is written: ``weights`` as safetensors under the model's own names, ``tensors`` as a tree of
    tensors and plain values, ``json`` as text, ``sharded`` by every rank its part, ``orbax`` as a folder of its own,
    ``tree`` as JSON with arrays beside it. A missing component that is not `required` is a warning.
    """

    key: str
    stateful: Stateful
    sharing_pattern: SharingPattern = SharingPattern.GLOBAL
    required: bool = True
    validate_replication: bool = False
    process_group_name: str | None = None
    format: Format = "tensors"

    def stem(self, rank: int = 0, group: int = 0, node: int = 0) -> str:
        """The name of its file, without the ending.

        >>> StateComponent("rng", None, SharingPattern.PER_RANK).stem(rank=3)
        'rng.rank3'
        """
        owner = {
            SharingPattern.PER_RANK: f".rank{rank}",
            SharingPattern.PER_GROUP: f".{self.process_group_name or 'group'}{group}",
            SharingPattern.PER_NODE: f".node{node}",
        }
        return self.key + owner.get(self.sharing_pattern, "")
