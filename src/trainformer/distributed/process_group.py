"""The process group of a run: joining it from any launcher, and collectives of Python objects on the host.

Collectives of gradients belong to the strategies.
"""

from __future__ import annotations

import atexit
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

from trainformer.backends.torch.placement import resolve_device
from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.engine.process_group import run_on_main

if TYPE_CHECKING:
    from trainformer.distributed.failure_detection import RankMonitor


@dataclass(frozen=True)
class Launch:
    """Rank and world size as the launcher set them."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read the environment variables of torchrun (and Kubernetes' PyTorchJob), or those of ``srun``.

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
        # The tasks of the step, not of the allocation: a script that sbatch starts without srun is one process.
        tasks = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
        if tasks > 1 and "SLURM_PROCID" in environment:
            return cls(_number(environment, "SLURM_PROCID", 0), tasks, _number(environment, "SLURM_LOCALID", 0))
        if world_size > 1:
            raise BadArgument(
                f"Expected RANK to be set along with WORLD_SIZE={world_size}, received no RANK. Start the processes "
                "with torchrun or `trainformer launch`, or unset WORLD_SIZE."
            )
        return cls(0, 1, 0)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.strip().isdecimal():
        raise BadArgument(expected(f"the environment variable {name} to be an integer", text))
    return int(text)


def slurm_rendezvous(environment: Mapping[str, str]) -> tuple[str, int]:
    """Master address and port for processes started by ``srun``: the first host of the step, a port from the job id.

    >>> slurm_rendezvous({"SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1", "SLURM_JOB_ID": "4711"})
    ('gpu07', 19711)
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise BadArgument(expected("SLURM_STEP_NODELIST to name the hosts of the step", nodes, "Set MASTER_ADDR."))
    return match[1] + (match[2] or ""), 15000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000


@dataclass(frozen=True)
class Subgroup:
    """The subgroup that this rank belongs to, and whether this rank is its first."""

    number: int
    is_first: bool


class TorchProcessGroup:
    """The processes that train together. A single process is a group of one, and nothing is communicated.

    `dp_rank` and `dp_world_size` say which shard of each batch this rank computes. Ranks that hold parts of one model
    (tensor or pipeline parallelism) compute the same shard.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.dp_rank = rank
        self.dp_world_size = world_size
        self.groups: dict[str, Subgroup] = {}
        self.monitor: RankMonitor | None = None

    @classmethod
    def join(cls, device: str | None, timeout: float) -> TorchProcessGroup:
        """Initialise the process group if several processes were launched. One that exists already is used as it is."""
        if dist.is_available() and dist.is_initialized():
            local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
            return cls(dist.get_rank(), dist.get_world_size(), local)
        launch = Launch.find()
        if launch.world_size == 1:
            return cls()
        _init_process_group(launch, device, timeout)
        return cls(launch.rank, launch.world_size, launch.local_rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, records and prunes checkpoints."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether the world size is 1."""
        return self.world_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (process {os.getpid()} on {socket.gethostname()})"

    def group(self, name: str | None) -> Subgroup:
        """The subgroup of this rank under a name that the strategy registered; else one group of all ranks."""
        return self.groups.get(name or "", Subgroup(0, self.is_main))

    def local_device(self, device: Any) -> torch.device:
        """The device of this rank: the CUDA device of its local rank, unless another one is requested in full."""
        requested = None if device is None or device == "auto" else torch.device(device)
        if requested is not None and (requested.type != "cuda" or requested.index is not None):
            return resolve_device(device)
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return resolve_device(device)

    # -- collectives; every rank must call them --------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.is_single_process:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def all_gather_dp(self, value: Any) -> list[Any]:
        """One value per data-parallel rank. Ranks that hold parts of one model have consecutive numbers."""
        found = self.all_gather_object(value)
        return [found[index * self.world_size // self.dp_world_size] for index in range(self.dp_world_size)]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank 0, or another one."""
        if self.is_single_process:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def scatter(self, parts: list[Any] | None) -> Any:
        """Send one value per data-parallel rank from rank 0; returns the value for this rank."""
        if self.is_single_process:
            assert parts is not None
            return parts[0]
        values = None
        if parts is not None:
            values = [parts[rank * self.dp_world_size // self.world_size] for rank in range(self.world_size)]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values, src=0)
        return box[0]

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over data-parallel ranks."""
        if self.is_single_process:
            return values
        return (self._sums(values) * self.dp_world_size / self.world_size).tolist()

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Which flags are set on at least one rank."""
        return flags if self.is_single_process else (self._sums([float(flag) for flag in flags]) > 0).tolist()

    def _sums(self, values: list[float]) -> torch.Tensor:
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0 and return its result on all ranks. If it fails there, all ranks raise."""
        return function() if self.is_single_process else run_on_main(self, function)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 runs the block first and fills caches; the others follow. If rank 0 fails, all ranks raise."""
        if not self.is_main:
            failure = self.broadcast(None)
            if failure is not None:
                raise TrainformerError(f"Rank 0 failed while the other ranks waited for it. {failure}")
        failure = None
        try:
            yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self.is_main:
                self.broadcast(failure)

    @contextmanager
    def monitoring(self, timeout: float) -> Iterator[None]:
        """Detect ranks that die inside this context: errors name them, and no rank waits for them forever."""
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
            _AtExit.skip_destroy = True
            raise
        finally:
            self.monitor = None


def _init_process_group(launch: Launch, device: str | None, timeout: float) -> None:
    if "RANK" not in os.environ:
        host, port = slurm_rendezvous(os.environ)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", str(port))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BadArgument(
            f"Expected {' and '.join(missing)} to be set along with WORLD_SIZE={launch.world_size}, received nothing. "
            "Start the processes with torchrun or `trainformer launch`."
        )
    on_cuda = torch.cuda.is_available() and (device is None or str(device).startswith("cuda"))
    if on_cuda:
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    wait = timedelta(seconds=timeout)
    store, rank, world_size = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=wait))
    # torchrun keeps its store over restarts. Without a prefix per attempt, restarted processes would find the
    # addresses of those that are gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=dist.PrefixStore(f"trainformer/attempt {attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=wait,
    )
    atexit.register(_destroy_process_group)


class _AtExit:
    skip_destroy = False  # set when a run failed


def _destroy_process_group() -> None:
    """Destroy the group we created: its threads must end before the interpreter does.

    Not after a failure: destroying it may wait for ranks that are gone.
    """
    if dist.is_initialized() and not _AtExit.skip_destroy:
        dist.destroy_process_group()
