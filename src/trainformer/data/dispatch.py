"""Rank 0 reads the data and hands each rank its part: for data that only one process can, or should, read.

Owns the handing out. Which part is whose is said in `sharding`; how values travel is the business of a backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from trainformer.core.errors import DataError
from trainformer.core.types import HostBatch
from trainformer.data.sharding import Shard, check_divisible


class Receivers(Protocol):
    """The ranks, as far as it takes to hand something to each of them."""

    dp_world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        ...

    def scatter(self, parts: list[Any] | None) -> Any:
        """On rank 0 a value for each part of the data; on every rank, the value for its part."""
        ...


class DispatchedSource:
    """The batches of a source that only rank 0 reads. Everything else is asked of that source."""

    def __init__(self, source: Any, process_group: Receivers) -> None:
        self.source = source
        self.process_group = process_group

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "ranks"):  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches, where that is known."""
        return self.source.batches_per_epoch

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """What is left of an epoch, this rank's part of each batch."""
        if self.process_group.is_main:
            yield from self._read(self.source.batches(epoch, batch, position))
            return
        while (part := self.process_group.scatter(None)) is not None:
            if isinstance(part, str):
                raise DataError(f"Rank 0, which reads the data for all, failed. {part}")
            yield part

    def _read(self, batches: Iterator[HostBatch]) -> Iterator[HostBatch]:
        count = self.process_group.dp_world_size
        while True:
            try:
                batch = next(batches, None)
                if batch is not None:
                    check_divisible(batch)
            except Exception as error:
                self.process_group.scatter([f"{type(error).__name__}: {error}"] * count)
                raise
            if batch is None:
                self.process_group.scatter([None] * count)
                return
            yield self.process_group.scatter([Shard(index, count).cut(batch) for index in range(count)])
