"""Components of torch as files: safetensors for weights, trees of tensors, parts by rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainformer.backends.torch.state import cloned
from trainformer.checkpointing import StateComponent
from trainformer.checkpointing.replicas import check_replicas
from trainformer.checkpointing.sharing import stem_of
from trainformer.checkpointing.snapshot import read_snapshot
from trainformer.checkpointing.torch_components import read_component, write_component, write_part


class TorchFiles:
    """See `session.state_files.StateFiles`. States `on_device` are copied to the host before they are written."""

    def __init__(self, on_device: bool = False) -> None:
        self.on_device = on_device

    def snapshot(self, component: StateComponent, state: Any) -> Any:
        """A clone: the loop is about to change these very tensors."""
        return cloned(state, to_host=self.on_device)

    def write(self, folder: Path, component: StateComponent, state: Any, process_group: Any) -> list[str]:
        """Write a component in its format."""
        if component.format == "sharded":
            return write_part(folder, component.key, state, process_group)
        return write_component(folder, stem_of(component, process_group), component.format, state)

    def read(self, folder: Path, names: list[str], format: str) -> Any:
        """Read one back."""
        return read_component(folder, names, format)

    def read_file(self, path: Path, rank: int) -> dict[str, Any]:
        """The components of a single file."""
        return read_snapshot(path, rank)

    def check_replicas(self, states: Mapping[StateComponent, Any], process_group: Any) -> None:
        """Compare what should be the same on all ranks."""
        check_replicas(states, process_group)

    def versions(self) -> dict[str, str]:
        """That of torch."""
        return {"torch": str(torch.__version__)}
