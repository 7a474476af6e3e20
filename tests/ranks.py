"""Run a function in several processes that share a process group, and collect what each returns."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from forking import SERVER

#: Only a failing test waits this long: two cores may be shared by ten other jobs.
MAX_SECONDS = 1200

Results = Callable[[int, int], dict[str, Tensor]]


def on_ranks(results: Results, world: int, folder: Path) -> list[dict[str, Tensor]]:
    """What ``results(rank, world)`` returns in each of `world` processes, which import it by name.

    They work in the folder, and save there what they return.
    """
    args = results, world, str(folder), dict(os.environ)
    context = mp.start_processes(_worker, args, nprocs=world, join=False, start_method=SERVER.get_start_method())
    deadline = time.monotonic() + MAX_SECONDS
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the {world} processes did not end within {MAX_SECONDS} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def named(found: dict[str, Tensor], beginning: str) -> dict[str, Tensor]:
    """Entries whose names start with a prefix, by the rest of the name.

    >>> named({"a/x": 1, "a/y": 2, "b/x": 3}, "a/")
    {'x': 1, 'y': 2}
    """
    return {key.removeprefix(beginning): value for key, value in found.items() if key.startswith(beginning)}


def set_rank_variables(rank: int, world: int) -> None:
    """Set the environment variables of torchrun: some libraries look nowhere else."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in variables.items()})


def share_of(count: int, rank: int, world: int) -> slice:
    """The samples of one rank: a different number on the first and the last one.

    >>> [share_of(12, rank, 4) for rank in (0, 3)]
    [slice(0, 4, None), slice(10, 12, None)]
    """
    first, last = (place * count // world + (0 < place < world) for place in (rank, rank + 1))
    return slice(first, last)


def all_reduced(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All-reduce the values in place."""
    for value in values.values() if dist.is_initialized() else ():
        dist.all_reduce(value)
    return values


def _worker(rank: int, results: Results, world: int, folder: str, environment: dict[str, str]) -> None:
    """Join the process group, compute, and save the results. An exception reaches the parent."""
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=MAX_SECONDS)
    )
    torch.save(results(rank, world), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter shutdown: Python 3.11 ends autograd and gloo threads that ask for the GIL during it in a way that
    # C++ takes for a failure ("terminate called without an active exception").
    os._exit(0)
