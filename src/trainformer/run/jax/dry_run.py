"""Trial steps on JAX that leave no trace: for the learning rate finder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.sharding import shardings_following
from trainformer.backends.jax.state import TrainState, partition
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import DeviceBatch

if TYPE_CHECKING:
    from trainformer.run.jax.run import JaxRun


class DryRun:
    """What can be done inside `JaxRun.sandbox`. No events are emitted and nothing is logged.

    The learning rate of a run is part of its compiled step. Here it is an input: a number in the optimizer's state.
    """

    def __init__(self, run: JaxRun) -> None:
        self._run = run
        self._step: Any = None

    def batches(self) -> Iterator[DeviceBatch]:
        """Training batches, epoch after epoch."""
        for epoch in count():
            empty = True
            for batch in self._run.backend.feed(self._run.train_source.batches(epoch), train=True):
                empty = False
                yield batch
            if empty:
                return

    def step(self, batch: DeviceBatch, lr: float | None = None) -> float:
        """One step on a batch, at a given learning rate or at that of the first step; its loss."""
        backend = self._run.backend
        if self._step is None:
            backend.state = self._with_injected_rate(backend.state)
            self._step = self._run.owner.configure_functions()[0]
        state = backend.state
        if lr is None:
            lr = backend.learning_rates(0)[0]
        rate = jax.device_put(np.float32(lr), state.opt_state.hyperparams["learning_rate"].sharding)
        hyperparams = {**state.opt_state.hyperparams, "learning_rate": rate}
        state = state.replace(opt_state=state.opt_state._replace(hyperparams=hyperparams))
        backend.state, output = self._step(state, batch.data)
        if isinstance(self._step, JittedStep):
            total, weight = backend.read(output["loss"])
            return total / weight if weight else float("nan")
        loss = backend.step_loss(output, batch.size)
        if loss is None:
            raise BadArgument(expected("train_step_fn to return the metric 'loss'", sorted(output)))
        return loss

    def _with_injected_rate(self, state: Any) -> TrainState:
        """The state with a new optimizer whose learning rate is an array in its state."""
        tx = optax.inject_hyperparams(lambda learning_rate: self._run.owner.optimizer_at(learning_rate))(
            learning_rate=0.0
        )
        trained, _ = partition(state.params, state.trainable)
        shapes = state.replace(tx=tx, opt_state=jax.eval_shape(tx.init, trained))
        placed = jax.tree.map(lambda leaf: leaf.sharding, state.params)
        shardings = shardings_following(shapes.opt_state, state.params, placed, self._run.backend.mesh)
        injected: TrainState = shapes.replace(opt_state=jax.jit(tx.init, out_shardings=shardings)(trained))
        return injected


class HostCopy:
    """A copy of a state in host memory, from which it is restored bit for bit, in the same shards.

    Steps donate the state, and the devices may have no room for two. Of equal shards there is one copy.
    """

    def __init__(self, state: Any) -> None:
        leaves, self._structure = jax.tree.flatten(state)
        self._leaves = [_ArrayCopy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]

    def restore(self) -> Any:
        """The state on its devices again."""
        leaves = [leaf.restore() if isinstance(leaf, _ArrayCopy) else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


class _ArrayCopy:
    def __init__(self, array: jax.Array) -> None:
        self._shape, self._sharding = array.shape, array.sharding
        shards = {str(shard.index): shard for shard in array.addressable_shards}
        self._parts = {index: np.array(shard.data) for index, shard in shards.items()}

    def restore(self) -> jax.Array:
        return jax.make_array_from_callback(self._shape, self._sharding, lambda index: self._parts[str(index)])
