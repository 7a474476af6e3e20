"""Whether copies that should be equal on all ranks are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainformer.checkpointing import StateComponent
from trainformer.core.errors import TrainformerError
from trainformer.distributed import TorchProcessGroup


class ReplicasDiffer(TrainformerError):
    """Ranks that should hold the same have drifted apart; whatever is saved would be right for one of them only."""


def check_replicas(states: Mapping[StateComponent, Any], process_group: TorchProcessGroup) -> None:
    """Compare what should be the same on all ranks, before it is saved in the name of all of them."""
    if process_group.is_single_process:
        return
    marked = {c.key: state for c, state in states.items() if c.validate_replication}
    prints = process_group.all_gather_object({key: fingerprints(state) for key, state in marked.items()})
    for key in marked:
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


def fingerprints(state: Any) -> dict[str, str]:
    """A short mark for each tensor of a state, and one for all plain values. Costs one pass over the tensors."""
    tensors: dict[str, Tensor] = {}
    plain: list[str] = []
    _collect(state, "", tensors, plain)
    marks = {"plain values": hashlib.sha256("\n".join(plain).encode()).hexdigest()}
    if tensors:
        sums = torch.stack([_two_sums(tensor).cpu() for tensor in tensors.values()])
        marks |= {name: row.numpy().tobytes().hex() for name, row in zip(tensors, sums, strict=True)}
    return marks


def _two_sums(tensor: Tensor) -> Tensor:
    """The sum, and one in which places matter: what differs in one element differs in these."""
    flat = tensor.detach().reshape(-1)
    flat = flat.double() if flat.is_floating_point() else flat.to(torch.float64)
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
