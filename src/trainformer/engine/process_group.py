"""The processes of a run, as the engine sees them. How they exchange values is the business of a backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from trainformer.core.errors import TrainformerError


class ProcessGroup(Protocol):
    """The processes that train together; every rank must take part in an exchange."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        ...

    @property
    def is_single_process(self) -> bool:
        """Whether there is nobody else."""
        ...

    @property
    def rank(self) -> int:
        """Number of this process."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    @property
    def monitor(self) -> Any:
        """The failure detector, whose `lost_ranks()` names ranks that are gone; None without one."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The value that rank 0 has."""
        ...

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """What a function returns that rank 0 alone calls. If it fails there, all ranks fail."""
        ...

    def monitoring(self, timeout: float) -> AbstractContextManager[None]:
        """Meanwhile, a rank that dies is named, and the others do not wait for it for ever."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        ...

    def all_gather_dp(self, value: Any) -> list[Any]:
        """The values of those that compute different samples: one for each part of a batch, in their order."""
        ...

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the parts of a batch."""
        ...

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Which of them at least one rank has set."""
        ...


class SingleProcess:
    """One process."""

    is_main = True
    is_single_process = True
    rank = 0
    world_size = 1
    monitor = None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def all_gather_dp(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """The values."""
        return values

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """The flags."""
        return flags

    def broadcast(self, value: Any) -> Any:
        """The value."""
        return value

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """What the function returns."""
        return function()

    def monitoring(self, timeout: float) -> AbstractContextManager[None]:
        """There is nobody to watch."""
        return nullcontext()


def run_on_main(process_group: ProcessGroup, function: Callable[[], Any]) -> Any:
    """What a function returns that rank 0 alone calls. If it fails there, all ranks fail: none waits for it."""
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
        raise TrainformerError(f"Rank 0 failed in what it does for all. {problem}")
    return result
