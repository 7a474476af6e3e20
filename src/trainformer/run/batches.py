"""The batches of a run as others want to see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainformer.core.types import DataSource


class Batches:
    """The batches of a source as callbacks written for other trainers know them: a loader with a length."""

    def __init__(self, source: DataSource, batch_size: int) -> None:
        self._source = source
        self.batch_size = batch_size

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches, where that is known."""
        return self._source.batches_per_epoch

    @property
    def dataset(self) -> Any:
        """What the batches are made of."""
        loader = getattr(self._source, "loader", None)
        return getattr(self._source, "dataset", None) or getattr(loader, "dataset", loader)

    def __bool__(self) -> bool:
        return True  # also of a stream, which has no length to be asked for

    def __len__(self) -> int:
        length = self.batches_per_epoch
        if length is None:
            raise TypeError("these batches come from a stream, which has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        return (batch.data for batch in self._source.batches(0))
