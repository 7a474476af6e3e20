"""The process group of a run as the engine sees it: rank, world size and collectives on Python objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from trainformer.core.errors import TrainformerError


class ProcessGroup(Protocol):
    """The processes that train together. Every rank must call a collective."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    @property
    def is_single_process(self) -> bool:
        """Whether the world size is 1."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def monitor(self) -> Any:
        """The failure detector, whose `lost_ranks()` names ranks that are gone; None without one."""

    def broadcast(self, value: Any) -> Any:
        """Broadcast the value of rank 0."""

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0 and broadcast its result. If it fails there, all ranks fail."""

    def monitoring(self, timeout: float) -> AbstractContextManager[None]:
        """Run the failure detector: a rank that dies is named, and the others do not wait for it forever."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """All-gather: the values of all ranks, in rank order."""

    def all_gather_dp(self, value: Any) -> list[Any]:
        """All-gather over data-parallel ranks only: one value per part of a batch, in order."""

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """All-reduce (sum) over data-parallel ranks."""

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """All-reduce (logical or): which flags at least one rank has set."""


class SingleProcess:
    """One process."""

    is_main = True
    is_single_process = True
    rank = 0
    world_size = 1
    monitor = None

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def all_gather_dp(self, value: Any) -> list[Any]:
        return [value]

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        return values

    def any_rank(self, flags: list[bool]) -> list[bool]:
        return flags

    def broadcast(self, value: Any) -> Any:
        return value

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        return function()

    def monitoring(self, timeout: float) -> AbstractContextManager[None]:
        return nullcontext()


def run_on_main(process_group: ProcessGroup, function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 and broadcast its result. If it fails there, all ranks fail: none waits for it."""
    result, failure, problem = None, None, None
    if process_group.is_main:
        try:
            result = function()
        except Exception as error:
            failure, problem = error, f"{type(error).__name__}: {error}"
    result, problem = process_group.broadcast((result, problem))
    if failure is not None:
        raise failure
    if problem is not None:
        raise TrainformerError(f"Rank 0 failed while all ranks waited for it. {problem}")
    return result
