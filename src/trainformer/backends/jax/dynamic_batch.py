"""Steps for batches of any number of rows: what a loss function needs that knows nothing of rows that do not count.

The last batch of an epoch is smaller than the others. Filled up, it would change the mean of its rows; so it is taken
as it is, by a step compiled for its size. Rows that do not divide over the devices go to all of them, and a batch is
cut into micro-batches that are never larger, on any device, than those of a full batch: no size needs more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.compiling import Compilations
from trainformer.backends.jax.mesh import data_shards
from trainformer.backends.jax.sharding import batch_sharding
from trainformer.backends.jax.state import TrainState
from trainformer.backends.jax.step import JittedStep


class AnyRowsStep(JittedStep):
    """A jitted step that is compiled once for every number of rows it meets, and counts that like any compilation.

    `make(accumulation)` makes the pure function, `per_device` are the rows of a micro-batch on one device.
    """

    def __init__(
        self,
        make: Callable[[int], Callable[..., Any]],
        mesh: Mesh,
        shardings: TrainState,
        *,
        per_device: int,
        train: bool,
    ) -> None:
        self.mesh = mesh
        self.compilations = Compilations("train step" if train else "eval step")
        self._make = make
        self._shardings = shardings
        self._per_device = per_device
        self._train = train
        self._by_rows: dict[int, Any] = {}

    def _with_shardings(self) -> None:
        """For a state with other static parts: every size is compiled again when it is next met."""
        self._by_rows = {}

    def _for(self, batch: Any) -> Any:
        """The one for as many rows."""
        leaves = batch.values() if type(batch) is dict else jax.tree.leaves(batch)
        rows = next(leaf.shape[0] for leaf in leaves if leaf.ndim)
        if rows not in self._by_rows:
            self._by_rows[rows] = self._jit(rows)
        return self._by_rows[rows]

    def _jit(self, rows: int) -> Any:
        shards, replicated = data_shards(self.mesh), NamedSharding(self.mesh, PartitionSpec())
        divides = rows % shards == 0
        step = self._make(micro_batches(rows // shards if divides else rows, self._per_device))
        return jax.jit(
            self.compilations.watch(step),
            in_shardings=(self._shardings, batch_sharding(self.mesh) if divides else replicated),
            out_shardings=(self._shardings, replicated) if self._train else replicated,
            donate_argnums=0 if self._train else (),
        )


def micro_batches(rows: int, most: int) -> int:
    """The fewest equal parts of so many rows that hold at most `most` of them.

    >>> [micro_batches(rows, most=4) for rows in (4, 8, 3, 6, 7)]
    [1, 2, 1, 2, 7]
    """
    return next(parts for parts in range(1, rows + 2) if rows % parts == 0 and rows // parts <= most)
