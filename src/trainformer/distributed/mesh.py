"""Ranks as a grid: which of them divide a model among themselves, and which hold the same part of it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainformer.core.errors import BadArgument, expected
from trainformer.distributed.process_group import TorchProcessGroup

REPLICA, SHARD = "replica", "shard"


def sharding_mesh(process_group: TorchProcessGroup, device: torch.device, replicas: int = 1) -> DeviceMesh:
    """A line of ranks that divide the model, or `replicas` such lines, in each of which the whole model is held once.

    Ranks of neighbouring numbers (on one machine, usually) are in one line: they exchange more than lines do.
    """
    if process_group.world_size % replicas:
        do = f"{process_group.world_size} processes can hold {divisors(process_group.world_size)} replicas."
        raise BadArgument(expected("replicas to divide the number of processes", replicas, do))
    if replicas == 1:
        return init_device_mesh(device.type, (process_group.world_size,), mesh_dim_names=(SHARD,))
    return init_device_mesh(
        device.type, (replicas, process_group.world_size // replicas), mesh_dim_names=(REPLICA, SHARD)
    )


def divisors(number: int) -> str:
    """What divides a number, in words.

    >>> divisors(6)
    '1, 2, 3, 6'
    """
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
