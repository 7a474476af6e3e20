"""An exponential moving average of a train state's weights: a pytree in fp32, sharded like the weights.

Only trained parameters and floating-point variables (batch statistics) are averaged. Frozen parameters and counters are
those of the state, and take no memory here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from trainformer.backends.jax.state import TrainState, combine, partition, path_string
from trainformer.core.errors import BadArgument, did_you_mean, expected


class StateAverage:
    """Averages the weights of the state that `state` returns. `modules` are the paths of the parts to average.

    Its arrays are a component of checkpoints of their own (`arrays`), which can be read on another mesh.
    """

    def __init__(self, state: Callable[[], TrainState], modules: Sequence[str] | None = None) -> None:
        self._state = state
        self._parts = None if modules is None else [name.replace(".", "/") for name in modules]
        self._check_parts(state())
        chosen = self._chosen(state())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, chosen)
        self.arrays: dict[str, Any] = jax.jit(_widened, out_shardings=shardings)(chosen)
        self._update = jax.jit(_lerp, donate_argnums=0, out_shardings=shardings)

    def _check_parts(self, state: TrainState) -> None:
        paths = [path_string(path) for path in flatten_dict(state.params)]
        for part in self._parts or ():
            if not any(path.startswith(f"{part}/") for path in paths):
                names = sorted(map(str, state.params))
                do = did_you_mean(part, names) or f"It has {', '.join(names)}."
                raise BadArgument(expected("EMA's modules to be parts of the model", part, do))

    def _chosen(self, state: TrainState) -> dict[str, Any]:
        """The arrays of a state that are averaged."""
        trained, _ = partition(state.params, state.trainable)
        return {"params": self._of_parts(trained), "variables": self._of_parts(state.variables)}

    def _of_parts(self, tree: Any) -> dict[Any, Any]:
        chosen = {
            path: leaf
            for path, leaf in flatten_dict(tree).items()
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            and (self._parts is None or any(path_string(path).startswith(f"{part}/") for part in self._parts))
        }
        return unflatten_dict(chosen)

    def update(self, weight: float) -> None:
        """Move the average towards the weights; with a weight of 1 it equals them. Returns before it is computed."""
        self.arrays = self._update(self.arrays, self._chosen(self._state()), np.float32(weight))

    @property
    def inference_model(self) -> TrainState:
        """The train state with the averaged weights, which evaluations use in place of the current one."""
        state = self._state()
        return state.replace(
            params=_replaced(state.params, self.arrays["params"]),
            variables=_replaced(state.variables, self.arrays["variables"]),
        )

    @property
    def model(self) -> nnx.Module:
        """The flax module with the averaged weights."""
        return self.inference_model.model

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the arrays are a component of their own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


def _widened(tree: Any) -> Any:
    """The arrays in fp32 or wider; copies, since a step donates the originals."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def _lerp(average: Any, trained: Any, weight: Any) -> Any:
    def move(a: Any, b: Any) -> Any:
        b = b.astype(a.dtype)
        # As in torch: the second form is exact at a weight of 1.
        return jnp.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))

    return jax.tree.map(move, average, trained)


def _replaced(tree: Any, averages: Any) -> dict[Any, Any]:
    return combine(dict(tree), averages) if averages else tree
