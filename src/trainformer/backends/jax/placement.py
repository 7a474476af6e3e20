"""Batches on their way from the host to the devices of the mesh."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.mesh import data_shards
from trainformer.backends.jax.processes import rows_of_process
from trainformer.backends.jax.sharding import batch_sharding, check_rows
from trainformer.core.errors import DataError, expected
from trainformer.core.types import DeviceBatch, HostBatch

logger = logging.getLogger("trainformer")


class Placer:
    """Puts batches of NumPy arrays onto the mesh, rows divided over its data axes, one batch ahead of the step.

    Copying does not wait: while the devices compute a step, the next batch is already on its way. With several
    processes each brings its own rows, and together they are one batch.

    With `on_host` the arrays of a run with one process stay NumPy's, and none is taken ahead: for a jitted function
    that knows where they belong. Calling it copies them just as well, at a tenth of the cost on the host.

    With `whole_shards` a batch whose rows do not divide over the devices is an error; without, it goes to all of them.
    `waiting` is the number of training batches that were taken from their source and not yet handed out.
    """

    def __init__(
        self,
        mesh: Mesh,
        accumulation: int = 1,
        ahead: int = 1,
        *,
        whole_shards: bool = True,
        on_host: bool = False,
    ) -> None:
        self.mesh = mesh
        self._on_host = on_host and jax.process_count() == 1
        self.waiting = 0
        self._whole_shards = whole_shards
        self._accumulation = accumulation
        self._ahead = 0 if self._on_host else ahead
        self._rows = batch_sharding(mesh)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._noted: set[str] = set()
        self._checked: tuple[Any, bool] = (None, False)  # the last shapes that were looked at, and what was found

    def feed(self, batches: Iterable[HostBatch], train: bool = True) -> Iterator[DeviceBatch]:
        """Batches on the device, in order. Training batches have to divide into the step's micro-batches."""
        waiting: deque[DeviceBatch] = deque()
        for batch in batches:
            waiting.append(self.place(batch, self._accumulation if train else 1))
            if len(waiting) > self._ahead:
                yield self._next(waiting, train)
        while waiting:
            yield self._next(waiting, train)

    def _next(self, waiting: deque[DeviceBatch], train: bool) -> DeviceBatch:
        batch = waiting.popleft()
        if train:
            self.waiting = len(waiting)
        return batch

    def place(self, batch: HostBatch, accumulation: int = 1) -> DeviceBatch:
        """One batch. The copy has begun when this returns, and may still be under way."""
        data = self._arrays(batch.data)
        if batch.global_size is not None and not self._whole_shards and jax.process_count() > 1:
            check_rows(
                batch.global_size, self.mesh
            )  # processes whose parts differ in size would not agree on the shape
        divides = self._divides(data, accumulation)
        tokens = count_tokens(data) if batch.size else 0
        placed = {name: self._put(array, divides) for name, array in data.items()}
        return DeviceBatch(placed, batch.size, tokens, batch.bad, False, batch.global_size, batch.consumed)

    def _arrays(self, data: Any) -> dict[str, np.ndarray | jax.Array]:
        """The columns of a batch that a device can hold; texts and other objects stay behind."""
        if not isinstance(data, Mapping):
            raise DataError(
                expected(
                    "a batch that is a mapping of names to arrays", type(data).__name__, "Let the collator name them."
                )
            )
        arrays: dict[str, Any] = {}
        left: list[str] = []
        for name, value in data.items():
            array = value if isinstance(value, jax.Array) else _as_array(name, value)
            if array.dtype.kind in "OUSMm" and array.dtype != jax.dtypes.bfloat16:
                left.append(name)
            else:
                arrays[name] = array
        if not arrays:
            raise DataError(expected("a batch with at least one column of numbers", list(data)))
        new = sorted(set(left) - self._noted)
        if new:
            self._noted.update(new)
            logger.info("Columns that are no numbers stay on the host: %s", ", ".join(new))
        return arrays

    def _divides(self, data: Mapping[str, Any], accumulation: int) -> bool:
        """Whether the rows of a batch divide over the devices; raises if they have to and do not."""
        shapes = [array.shape[:1] for array in data.values()], accumulation
        if shapes != self._checked[0]:
            self._checked = shapes, self._find_out(data, accumulation)
        return self._checked[1]

    def _find_out(self, data: Mapping[str, Any], accumulation: int) -> bool:
        rows = {name: array.shape[0] for name, array in data.items() if array.ndim}
        if len(set(rows.values())) > 1:
            raise DataError(expected("columns of a batch with equally many rows", rows))
        whole = {count * processes_of_rows(self.mesh) for count in rows.values()}
        if not self._whole_shards and jax.process_count() == 1 and any(n % data_shards(self.mesh) for n in whole):
            return False
        for count in whole:
            check_rows(count, self.mesh, accumulation)
        return True

    def _put(self, array: Any, divides: bool) -> Any:
        if self._on_host:
            return array
        sharding = self._rows if array.ndim and divides else self._everywhere
        if jax.process_count() == 1 or isinstance(array, jax.Array):
            return jax.device_put(array, sharding)
        return jax.make_array_from_process_local_data(sharding, array)


def processes_of_rows(mesh: Mesh) -> int:
    """Over how many processes the rows of a batch are divided; those that share rows bring the same ones."""
    return rows_of_process(mesh).count


def _as_array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of unequal length
        raise DataError(
            f"Expected column {name!r} to be an array, received {type(value).__name__} that cannot be made one: {error}"
        ) from error


def count_tokens(data: Mapping[str, Any]) -> int:
    """Tokens of a batch on the host: those of `input_ids` that the attention mask does not leave out, else none.

    >>> count_tokens({"input_ids": np.ones((2, 3)), "attention_mask": np.array([[1, 1, 1], [1, 0, 0]])})
    4
    """
    ids = data.get("input_ids")
    if ids is None:
        return 0
    mask = data.get("attention_mask")
    if isinstance(mask, np.ndarray) and mask.shape == ids.shape:
        return int(mask.sum())
    return int(ids.size)  # from the shape alone: no device is asked
