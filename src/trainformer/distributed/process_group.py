"""The processes of a run: who they are, how they meet, and what they tell each other on the host.

Owns joining the process group, from whatever started the processes, and the few exchanges of plain values that a run
needs beside its gradients. Nothing here knows how a model is divided over ranks; that is a strategy's business.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.engine.process_group import run_on_main

if TYPE_CHECKING:
    from trainformer.distributed.failure_detection import RankMonitor

logger = logging.getLogger("trainformer")


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read it from the environment: torchrun and Kubernetes' PyTorchJob say it alike, ``srun`` in its own words.

        >>> Launch.find({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
        Launch(rank=3, world_size=4, local_rank=1)
        >>> Launch.find({})
        Launch(rank=0, world_size=1, local_rank=0)
        """
        world_size = _number(environment, "WORLD_SIZE", 1)
        if "RANK" in environment and "WORLD_SIZE" in environment:
            rank = _number(environment, "RANK", 0)
            if rank >= world_size:
                raise BadArgument(expected(f"RANK to be below WORLD_SIZE, which is {world_size}", rank))
            return cls(rank, world_size, _number(environment, "LOCAL_RANK", rank))
        # Of the step, not of the allocation: a script that sbatch starts without srun is one process.
        tasks = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
        if tasks > 1 and "SLURM_PROCID" in environment:
            return cls(_number(environment, "SLURM_PROCID", 0), tasks, _number(environment, "SLURM_LOCALID", 0))
        if world_size > 1:
            raise BadArgument(
                f"WORLD_SIZE says that {world_size} processes train together, but RANK is not set. "
                "Start them with torchrun or `trainformer launch`, or unset WORLD_SIZE."
            )
        return cls(0, 1, 0)


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, str(otherwise))
    if not text.strip().isdecimal():
        raise BadArgument(expected(f"the environment variable {name} to be a whole number", text))
    return int(text)


def slurm_meeting_place(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where the processes that ``srun`` started can meet: the first host of the step, at a port of the job's own.

    >>> slurm_meeting_place({"SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1", "SLURM_JOB_ID": "4711"})
    ('gpu07', 19711)
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise BadArgument(expected("SLURM_STEP_NODELIST to name the hosts of the step", nodes, "Set MASTER_ADDR."))
    return match[1] + (match[2] or ""), 15000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000


@dataclass(frozen=True)
class Group:
    """A group of ranks: which of them this is, and whether this rank is its first."""

    number: int
    is_first: bool


class TorchProcessGroup:
    """The processes that train together. One process alone is a group of one, and nothing is exchanged.

    `index` and `count` say which part of each batch this rank computes, of how many; ranks that hold parts of one
    model compute the same part.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.dp_rank = rank
        self.dp_world_size = world_size
        self.groups: dict[str, Group] = {}
        self.monitor: RankMonitor | None = None

    @classmethod
    def join(cls, device: str | None, timeout: float) -> TorchProcessGroup:
        """Meet the other processes, if there are any. A group that exists already is used as it is."""
        if dist.is_available() and dist.is_initialized():
            local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
            return cls(dist.get_rank(), dist.get_world_size(), local)
        launch = Launch.find()
        if launch.world_size == 1:
            return cls()
        _meet(launch, device, timeout)
        return cls(launch.rank, launch.world_size, launch.local_rank)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints, records and prunes."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether there is nobody else."""
        return self.world_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (process {os.getpid()} on {socket.gethostname()})"

    def group(self, name: str | None) -> Group:
        """The group of this rank, of those a strategy has named; one for all, where it has not."""
        return self.groups.get(name or "", Group(0, self.is_main))

    # -- exchanges; every rank must take part ----------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.is_single_process:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: Any) -> Any:
        """The value that rank 0 has."""
        if self.is_single_process:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather_dp(self, value: Any) -> list[Any]:
        """The values of those that compute different samples, one for each part of a batch, in the order of the parts.

        Ranks that hold parts of one model compute the same samples, and follow each other.
        """
        found = self.all_gather_object(value)
        return [found[index * self.world_size // self.dp_world_size] for index in range(self.dp_world_size)]

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """What a function returns that rank 0 alone calls. If it fails there, all ranks fail: none waits for it."""
        return function() if self.is_single_process else run_on_main(self, function)

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the parts of a batch."""
        if self.is_single_process:
            return values
        return (self._sums(values) * self.dp_world_size / self.world_size).tolist()

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Which of them at least one rank has set."""
        return flags if self.is_single_process else (self._sums([float(flag) for flag in flags]) > 0).tolist()

    def _sums(self, values: list[float]) -> torch.Tensor:
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums

    def scatter(self, parts: list[Any] | None) -> Any:
        """On rank 0 a value for each part of the data; on every rank, the value for its part."""
        if self.is_single_process:
            assert parts is not None
            return parts[0]
        # Ranks that hold parts of one model follow each other.
        values = (
            None
            if parts is None
            else [parts[rank * self.dp_world_size // self.world_size] for rank in range(self.world_size)]
        )
        box: list[Any] = [None]
        dist.scatter_object_list(box, values, src=0)
        return box[0]

    @contextmanager
    def monitoring(self, timeout: float) -> Iterator[None]:
        """Meanwhile, a rank that dies is named, and the others do not wait for it for ever."""
        if self.is_single_process:
            yield
            return
        from trainformer.distributed.failure_detection import RankMonitor

        patience = min(60.0, timeout)
        store = dist.distributed_c10d._get_default_store()
        self.monitor = RankMonitor(store, self.rank, self.world_size, every=min(2.0, patience / 8), patience=patience)
        try:
            with self.monitor.guarding():
                yield
        except Exception:
            _Exit.skip_destroy = True
            raise
        finally:
            self.monitor = None

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 goes first and fills the caches; the others find them. If it fails, all of them fail."""
        if not self.is_main:
            self._wait_for_main()
        failure: str | None = None
        try:
            yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self.is_main:
                self.broadcast(failure)

    def _wait_for_main(self) -> None:
        failure = self.broadcast(None)
        if failure is not None:
            raise TrainformerError(f"Rank 0 failed while the others waited for it. {failure}")


def _meet(launch: Launch, device: str | None, timeout: float) -> None:
    if "RANK" not in os.environ:
        host, port = slurm_meeting_place(os.environ)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", str(port))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BadArgument(
            f"WORLD_SIZE is {launch.world_size}, but {' and '.join(missing)} are not set, "
            "so they cannot meet. Start them with torchrun or `trainformer launch`."
        )
    on_cuda = torch.cuda.is_available() and (device is None or str(device).startswith("cuda"))
    if on_cuda:
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    wait = timedelta(seconds=timeout)
    store, rank, world_size = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=wait))
    # torchrun keeps its store over restarts. Without a name of their own, processes that are started again would find
    # the addresses of those that are gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=dist.PrefixStore(f"trainformer/attempt {attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=wait,
    )
    atexit.register(_part)


class _Exit:
    skip_destroy = False  # a run has failed


def _part() -> None:
    """Leave the group that we joined. Its threads must be gone before the interpreter is.

    Not after a failure: to take leave of ranks that are gone may wait for them.
    """
    if dist.is_initialized() and not _Exit.skip_destroy:
        dist.destroy_process_group()
