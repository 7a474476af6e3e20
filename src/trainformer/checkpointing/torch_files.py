"""Components of a torch run as files: weights as safetensors, trees of tensors as torch files, shards by rank.

Reading executes nothing: torch files are read with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trainformer.backends.torch.state import cloned
from trainformer.checkpointing.components import StateComponent
from trainformer.checkpointing.multi_rank import stem_of
from trainformer.core.errors import BadArgument, DataError, TrainformerError, expected
from trainformer.distributed.sharded_state import ShardedState, write_sharded
from trainformer.utils.files import decode_json, write_atomically
from trainformer.utils.tensor_files import read_tensors, read_weights, write_tensors, write_weights

_FILE_FORMAT = 2


class ReplicasDiffer(TrainformerError):
    """Replicated state differs between ranks; a checkpoint of it would be right for one of them only."""


def write_component(folder: Path, stem: str, format: str, state: Any) -> list[str]:
    """Write one component; the names of its files. A full disk raises `OSError`, whatever the library raises."""
    try:
        if format == "weights":
            return write_weights(folder, stem, state)
        if format == "tensors":
            return write_tensors(folder, stem, state)
    except (SafetensorError, RuntimeError) as error:  # both libraries wrap the system's error in their own
        raise OSError(f"writing {folder / stem} failed: {error}") from error
    if format == "json":
        (folder / f"{stem}.json").write_text(json.dumps(state, indent=2))
        return [f"{stem}.json"]
    raise BadArgument(expected("a component's format to be 'weights', 'tensors' or 'json'", format))


def read_component(folder: Path, names: list[str], format: str) -> Any:
    """Read one component."""
    if format == "sharded":
        return ShardedState(folder, names)
    if format == "weights":
        return read_weights(folder, names)
    if format == "tensors":
        return read_tensors(folder / names[0])
    try:
        return decode_json((folder / names[0]).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / names[0]} cannot be read as JSON: it is damaged. ({error})") from error


def write_single_file(path: Path, state: dict[str, Any], per_rank: list[dict[str, Any]] | None = None) -> None:
    """Write a state to one file, atomically. `per_rank`: the components that each rank has for itself."""
    buffer = io.BytesIO()
    several = {"of_ranks": per_rank} if per_rank is not None and len(per_rank) > 1 else {}
    torch.save({"format": _FILE_FORMAT, "components": state, **several}, buffer)
    write_atomically(path, buffer.getvalue())


def read_single_file(path: Path, rank: int = 0) -> dict[str, Any]:
    """Read states by component, as a rank needs them. Anything but tensors and plain values is rejected."""
    if not path.exists():
        raise DataError(f"There is no checkpoint at {path}.")
    state = read_tensors(path)
    if not isinstance(state, dict) or "components" not in state:
        raise DataError(f"{path} is not a trainformer checkpoint. To use weights alone, load them into task.model.")
    if state["format"] > _FILE_FORMAT:
        raise DataError(f"{path} was written by a newer trainformer (format {state['format']}); please upgrade.")
    components: dict[str, Any] = state["components"]
    per_rank = state.get("of_ranks")
    if rank == 0:
        return components
    # Two ranks with the same RNG state would draw the same dropout masks: a rank that had none keeps its own.
    own = per_rank[rank] if per_rank is not None and rank < len(per_rank) else {}
    rank_specific = {"rng"} if per_rank is None else per_rank[0].keys()
    return {key: value for key, value in components.items() if key not in rank_specific} | own


def fingerprints(state: Any) -> dict[str, str]:
    """A short fingerprint of each tensor of a state, and one of all plain values. One pass over the tensors."""
    tensors: dict[str, Tensor] = {}
    plain: list[str] = []
    _collect(state, "", tensors, plain)
    marks = {"plain values": hashlib.sha256("\n".join(plain).encode()).hexdigest()}
    if tensors:
        sums = torch.stack([_checksums(tensor).cpu() for tensor in tensors.values()])
        marks |= {name: row.numpy().tobytes().hex() for name, row in zip(tensors, sums, strict=True)}
    return marks


def _checksums(tensor: Tensor) -> Tensor:
    """The sum, and a position-weighted sum: a difference in one element changes at least one of them."""
    flat = tensor.detach().reshape(-1).to(torch.float64)
    weights = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64).remainder_(8191).add_(1)
    return torch.stack([flat.sum(), (flat * weights).sum()])


def _collect(tree: Any, name: str, tensors: dict[str, Tensor], plain: list[str]) -> None:
    if isinstance(tree, Tensor):
        tensors[name] = tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            _collect(value, f"{name}.{key}" if name else str(key), tensors, plain)
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            _collect(value, f"{name}.{number}", tensors, plain)
    else:
        plain.append(f"{name}={tree!r}")


class TorchFiles:
    """`StateFiles` for torch. With `on_device`, snapshots are copied to the host."""

    def __init__(self, on_device: bool = False) -> None:
        self.on_device = on_device

    def snapshot(self, component: StateComponent, state: Any, folder: Path | None = None) -> Any:
        return cloned(state, to_host=self.on_device)

    def write(self, folder: Path, component: StateComponent, state: Any, process_group: Any) -> list[str]:
        if component.format != "sharded":
            return write_component(folder, stem_of(component, process_group), component.format, state)
        try:
            return write_sharded(folder, component.key, state, process_group)
        except (SafetensorError, RuntimeError) as error:
            raise OSError(f"writing {folder / component.key} failed: {error}") from error

    read = staticmethod(read_component)
    read_file = staticmethod(read_single_file)

    def check_replicas(self, states: Mapping[StateComponent, Any], process_group: Any) -> None:
        """Compare replicated components over ranks before rank 0 saves its copy for all of them."""
        if process_group.is_single_process:
            return
        replicated = {c.key: state for c, state in states.items() if c.validate_replication}
        prints = process_group.all_gather_object({key: fingerprints(state) for key, state in replicated.items()})
        for key in replicated:
            differing = [
                (rank, next((name for name, mark in prints[0][key].items() if other[key].get(name) != mark), "?"))
                for rank, other in enumerate(prints)
                if other[key] != prints[0][key]
            ]
            if differing:
                where = ", ".join(f"rank {rank} ({name})" for rank, name in differing)
                raise ReplicasDiffer(
                    f"Expected the {key} to be the same on all ranks, received another one on {where} than on rank 0. "
                    "Nothing was saved. Does a callback or the task change something on one rank only, or draw random "
                    "numbers that should be the same everywhere?"
                )

    def versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__)}
