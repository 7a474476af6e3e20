"""Processes that compute something together: starting them, waiting for them, and what each of them found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

Results = Callable[[int, int], dict[str, Tensor]]


def on_ranks(results: Results, world: int, folder: Path) -> list[dict[str, Tensor]]:
    """What ``results(rank, world)`` returns in each of `world` processes; the processes import it by its name."""
    context = mp.start_processes(_worker, (results, world, str(folder)), nprocs=world, join=False, start_method="spawn")
    deadline = time.monotonic() + 120
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the {world} processes did not end within two minutes")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _worker(rank: int, results: Results, world: int, folder: str) -> None:
    """Join the group, compute, and leave the results in the folder."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.save(results(rank, world), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
