"""Batches on their way from the host to the devices of the mesh."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.processes import process_shard
from trainformer.backends.jax.sharding import batch_sharding, check_rows, data_shards
from trainformer.core.errors import DataError, expected
from trainformer.core.types import DeviceBatch, HostBatch

logger = logging.getLogger("trainformer")


class Placer:
    """Copies batches of NumPy arrays to the mesh, rows sharded over its data axes, one batch ahead of the step.

    Copies are asynchronous: the next batch is transferred while the devices compute. With several processes each one
    contributes its own rows of the global batch.

    With `keep_on_host`, the arrays of a single-process run stay NumPy arrays and none is prefetched: a jitted function
    that knows its input shardings copies them itself, at a tenth of the host time.

    With `require_even`, a batch whose rows do not divide evenly over the devices is an error; otherwise it is
    replicated. `pending` is the number of training batches taken from their source but not yet handed out.
    """

    def __init__(
        self,
        mesh: Mesh,
        accumulation: int = 1,
        prefetch: int = 1,
        *,
        require_even: bool = True,
        keep_on_host: bool = False,
    ) -> None:
        self.mesh = mesh
        self.pending = 0
        self._keep_on_host = keep_on_host and jax.process_count() == 1
        self._require_even = require_even
        self._accumulation = accumulation
        self._prefetch = 0 if self._keep_on_host else prefetch
        self._sharded = batch_sharding(mesh)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._logged: set[str] = set()
        self._last_shapes: tuple[Any, bool] = (None, False)  # checked last, and whether they were even

    def feed(self, batches: Iterable[HostBatch], train: bool = True) -> Iterator[DeviceBatch]:
        """Batches on the devices, in order. Training batches must divide into the micro-batches of a step."""
        queue: deque[DeviceBatch] = deque()
        for batch in batches:
            queue.append(self.place(batch, self._accumulation if train else 1))
            if len(queue) > self._prefetch:
                yield self._next(queue, train)
        while queue:
            yield self._next(queue, train)

    def _next(self, queue: deque[DeviceBatch], train: bool) -> DeviceBatch:
        batch = queue.popleft()
        self.pending = len(queue) if train else self.pending
        return batch

    def place(self, batch: HostBatch, accumulation: int = 1) -> DeviceBatch:
        """Start copying one batch; the copy may still be in progress when this returns."""
        data = self.numeric_columns(batch.data)
        if batch.global_size is not None and not self._require_even and jax.process_count() > 1:
            # Processes with parts of different sizes would disagree on the shape.
            check_rows(batch.global_size, self.mesh)
        even = self._is_even(data, accumulation)
        tokens = count_tokens(data) if batch.size else 0
        placed = {name: self._put(array, even) for name, array in data.items()}
        of_batch = batch.global_size, batch.consumed, batch.sources
        return DeviceBatch(placed, batch.size, tokens, batch.bad, False, *of_batch)

    def numeric_columns(self, data: Any) -> dict[str, np.ndarray | jax.Array]:
        """The columns of a batch that a device can hold; strings and other objects stay on the host."""
        if not isinstance(data, Mapping):
            what = "a batch that is a mapping of names to arrays"
            raise DataError(expected(what, type(data).__name__, "Let the collate function name them."))
        arrays: dict[str, Any] = {}
        left: list[str] = []
        for name, value in data.items():
            try:
                array = value if isinstance(value, jax.Array) else np.asarray(value)
            except ValueError as error:  # lists of unequal length
                kind = f"{type(value).__name__} that numpy cannot convert: {error}"
                raise DataError(f"Expected column {name!r} to be an array, received {kind}") from error
            if array.dtype.kind in "OUSMm" and array.dtype != jax.dtypes.bfloat16:
                left.append(name)
            else:
                arrays[name] = array
        if not arrays:
            raise DataError(expected("a batch with at least one column of numbers", list(data)))
        new = sorted(set(left) - self._logged)
        if new:
            self._logged.update(new)
            logger.info("Non-numeric columns stay on the host: %s", ", ".join(new))
        return arrays

    def _is_even(self, data: Mapping[str, Any], accumulation: int) -> bool:
        """Whether the rows of a batch divide evenly over the devices; raises if they must and do not."""
        shapes = [array.shape[:1] for array in data.values()], accumulation
        if shapes == self._last_shapes[0]:
            return self._last_shapes[1]
        rows = {name: array.shape[0] for name, array in data.items() if array.ndim}
        if len(set(rows.values())) > 1:
            raise DataError(expected("the columns of a batch to have the same number of rows", rows))
        # Processes that hold the same rows (tp, sp) contribute them once.
        total = {count * process_shard(self.mesh).count for count in rows.values()}
        may_replicate = not self._require_even and jax.process_count() == 1
        even = not (may_replicate and any(n % data_shards(self.mesh) for n in total))
        for count in total if even else ():
            check_rows(count, self.mesh, accumulation)
        self._last_shapes = shapes, even
        return even

    def _put(self, array: Any, even: bool) -> Any:
        if self._keep_on_host:
            return array
        sharding = self._sharded if array.ndim and even else self._replicated
        if jax.process_count() == 1 or isinstance(array, jax.Array):
            return jax.device_put(array, sharding)
        return jax.make_array_from_process_local_data(sharding, array)


def count_tokens(data: Mapping[str, Any]) -> int:
    """Tokens of `input_ids` on the host that the attention mask does not exclude; 0 for other batches.

    >>> count_tokens({"input_ids": np.ones((2, 3)), "attention_mask": np.array([[1, 1, 1], [1, 0, 0]])})
    4
    """
    ids = data.get("input_ids")
    if ids is None:
        return 0
    mask = data.get("attention_mask")
    if isinstance(mask, np.ndarray) and mask.shape == ids.shape:
        return int(mask.sum())
    return int(ids.size)  # from the shape alone, without a device sync
