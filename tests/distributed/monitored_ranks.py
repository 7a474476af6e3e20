"""Monitored ranks, each a process, that a test kills, stops or makes fail."""

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from forking import SERVER
from trainformer.distributed import heartbeats
from trainformer.distributed.failure_detection import RankMonitor

MAX_SECONDS = 300  # for whatever should happen; only a failing test waits that long


@dataclass(frozen=True)
class Case:
    """What the ranks do: all-reduce until something happens to them, or until a file ``enough`` appears."""

    patience: float = 600.0  # far longer than the test may take: nothing is found by waiting
    grace: float = 600.0
    failing: int | None = None  # the rank that raises an error
    leaving: int | None = None  # the rank that finishes too early
    stuck: int | None = None  # the rank whose thread waits for something that raises no error when another one dies
    late: int | None = None  # the rank that comes two seconds after the others
    places: tuple[str, ...] = ()  # pretend that ranks run on several machines
    runs: int = 1


class Fleet:
    """Three running ranks."""

    def __init__(self, case: Case, folder: Path, world: int = 3) -> None:
        self.folder = folder
        os.environ["OMP_NUM_THREADS"] = "1"
        targets = [(case, rank, world, str(folder)) for rank in range(world)]
        self.processes = [SERVER.Process(target=be_rank, args=target) for target in targets]
        for rank in self.processes:
            rank.start()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *error) -> None:
        for rank in self.processes:
            if rank.exitcode is None:
                rank.kill()

    def hit(self, rank: int, signal: int) -> str:
        """Send a signal to a rank once all are running. Returns the name that errors must use for it."""
        self.wait_until_busy()
        os.kill(self.processes[rank].pid, signal)
        return self.name(rank)

    def wait_until_busy(self) -> None:
        """Wait until all ranks are running and have seen each other's heartbeats."""
        until = time.monotonic() + MAX_SECONDS
        while not all((self.folder / f"{i}.busy").exists() for i in range(len(self.processes))):
            assert time.monotonic() < until, f"the ranks did not start:\n{self.output(0)}"
            time.sleep(0.02)

    def name(self, rank: int) -> str:
        """The name that errors must use for a rank."""
        return f"ank {rank} on {os.uname().nodename} (process {self.processes[rank].pid})"

    def end(self, *ranks: int) -> list[int]:
        """Wait for ranks to end; their exit codes."""
        for rank in ranks:
            self.processes[rank].join(MAX_SECONDS)
            assert self.processes[rank].exitcode is not None, f"rank {rank} hangs:\n{self.output(rank)}"
        return [self.processes[rank].exitcode for rank in ranks]

    def output(self, rank: int) -> str:
        """Everything that a rank printed."""
        return (self.folder / f"{rank}.txt").read_text()


def be_rank(case: Case, rank: int, world: int, folder: str) -> None:
    """The main function of a rank."""
    os.chdir(folder)
    output = os.open(f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if case.places:
        heartbeats._pid_namespace = lambda: case.places[rank]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=_rendezvous(rank, world), rank=rank, world_size=world)
    monitor = RankMonitor(_get_default_store(), rank, world, every=0.2, patience=case.patience, grace=case.grace)
    threads = threading.active_count()
    for _ in range(case.runs):
        if rank == case.late:
            time.sleep(2)
        with monitor.guarding():
            _work(case, rank)
    assert threading.active_count() == threads, threading.enumerate()
    dist.destroy_process_group()


def _work(case: Case, rank: int) -> None:
    wishes, done = torch.zeros(1), 0
    while not wishes:
        wishes.fill_(os.path.exists("enough"))
        dist.all_reduce(wishes)
        done += 1
        if done == 20:
            # Every rank, including the late one, has sent a heartbeat by now.
            time.sleep(1)
            Path(f"{rank}.busy").touch()
            if rank == case.failing:
                raise ValueError("there is no such token")
            if rank == case.leaving:
                return
            if rank == case.stuck:
                threading.Event().wait()


def _rendezvous(rank: int, world: int) -> dist.TCPStore:
    """The store, which rank 0 hosts at a free port."""
    place, limit = Path("port"), timedelta(seconds=MAX_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        Path("port.new").write_text(str(store.port))
        Path("port.new").rename(place)
        return store
    while not place.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), None, False, limit)
