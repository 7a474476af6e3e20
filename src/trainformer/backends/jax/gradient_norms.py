"""Gradient norms of single parameters, computed inside the train step, and those of whole steps.

Parameters that stack many layers in one array have a norm for each layer, so that stacking does not change the values.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from trainformer.backends.jax.optimizers import STACKED
from trainformer.backends.jax.step_metrics import QueuedArray, read_scalars

NORMS = "parameter_norms"
"""Name of the norms in the output of a step that computes them."""


class GradientNorms:
    """The gradient norms of the steps since the last `take`. Nothing waits for the devices before that."""

    def __init__(self) -> None:
        self._totals: list[Any] = []
        self._parameters: tuple[list[str], Any] = [], None

    def record(self, output: Any, names: list[str]) -> None:
        """Keep the norms in the output of a step."""
        self._totals.append(output["grad_norm"])
        self._parameters = names, output[NORMS]

    def take(self) -> tuple[list[float], dict[str, float]]:
        """The total norms of the steps since the last call, and the norms by parameter in the last step."""
        totals, (names, norms) = self._totals, self._parameters
        self._totals = []
        norms = norms.array() if type(norms) is QueuedArray else norms
        norms = norms if norms.is_fully_addressable else norms.addressable_data(0)
        return read_scalars(totals), dict(zip(names, norms.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": read_scalars(self._totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._totals = list(state["norms"])


def parameter_norms(grads: Any) -> jax.Array:
    """The norm of each gradient, in the order of `parameter_names`."""
    norms = []
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        kept = _is_stacked(path)
        squares = jnp.sum(jnp.square(grad.astype(jnp.float32)), axis=tuple(range(kept, grad.ndim)))
        norms.append(jnp.sqrt(squares).reshape(-1))
    return jnp.concatenate(norms)


def parameter_names(params: Any) -> list[str]:
    """The paths of parameters, with the number of the layer where they are stacked.

    >>> parameter_names({"layers": {"kernel": jnp.zeros((2, 3))}, "out": {"bias": jnp.zeros(3)}})
    ['layers/0/kernel', 'layers/1/kernel', 'out/bias']
    """
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = _name(path)
        layers = range(leaf.shape[0]) if _is_stacked(path) else (None,)
        names += [name if n is None else re.sub(STACKED, rf"\g<0>{n}/", name, count=1) for n in layers]
    return names


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_stacked(path: Any) -> bool:
    return re.search(STACKED, _name(path)) is not None
