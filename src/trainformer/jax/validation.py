"""What a user brings along, as a run wants it: a model in the format that is kept, a state on the mesh; and what does
not go together with the arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from trainformer.backends.jax.precision import cast_floating, resolve_dtype
from trainformer.backends.jax.sharding import place, state_shardings
from trainformer.backends.jax.state import TrainState
from trainformer.core.errors import BadArgument, expected
from trainformer.jax.arguments import TrainingArguments

logger = logging.getLogger("trainformer")

_OF_THE_OPTIMIZER = ("learning_rate", "optimizer", "optimizer_kwargs", "scheduler", "weight_decay", "warmup_steps")


def kept_as(model: nnx.Module, arguments: TrainingArguments) -> nnx.Module:
    """The model with its parameters in `param_dtype`, where that was asked for; the given one is left alone."""
    if "param_dtype" not in arguments.passed:
        return model
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graph, cast_floating(params, resolve_dtype(arguments.param_dtype)), *rest)


def on_mesh(state: Any, mesh: Mesh) -> Any:
    """A state on the mesh: as it is if it lies there already, or else a copy."""
    leaves = jax.tree.leaves(state)
    if not isinstance(state, TrainState) or all(_lies_on(leaf, mesh) for leaf in leaves):
        return state
    rules = getattr(state.model, "partition_rules", None)
    return place(state, state_shardings(state, mesh, rules))


def _lies_on(leaf: Any, mesh: Mesh) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def warn_of_two_optimizers(arguments: TrainingArguments) -> None:
    """A state brings its optimizer along; what the arguments say of one is then not used."""
    said = [name for name in _OF_THE_OPTIMIZER if name in arguments.passed]
    if said:
        logger.warning(
            "model_state brings its own optimizer: %s not used. Pass model=state.model to begin with a new one",
            f"{', '.join(said)} {'is' if len(said) == 1 else 'are'}",
        )


def refuse_best_of_nothing(arguments: TrainingArguments) -> None:
    """Without data to evaluate on nothing is evaluated, and nothing is best."""
    if arguments.metric_for_best_model is not None:
        what = f"data to evaluate on, with metric_for_best_model={arguments.metric_for_best_model!r}"
        raise BadArgument(expected(what, "none", "Pass dataset_eval."))
    if arguments.evaluation_strategy != "no":
        logger.warning(
            "evaluation_strategy=%r, and no data to evaluate on: pass dataset_eval", arguments.evaluation_strategy
        )


def check_usable(state: Any, like: Any) -> None:
    """Raise if something is no state of this run, or one whose memory a step has taken."""
    if not isinstance(state, type(like)):
        raise BadArgument(expected(f"a state ({type(like).__name__})", type(state).__name__, "train() returns one."))
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        do = "Use the state that train() returned last, or trainer.model_state."
        raise BadArgument(expected("a state that is still there", "one that a later step has reused the memory of", do))


def checked_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of the user's that must give back a state, (state, metrics) or nothing."""

    def call(state: Any, *rest: Any) -> Any:
        returned = hook(state, *rest)
        is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        new = returned[0] if is_pair else returned
        if new is None:
            return (state, returned[1]) if is_pair else None
        if not isinstance(new, type(state)):
            what = f"{hook.__name__} to return nothing, or a state ({type(state).__name__})"
            raise BadArgument(expected(what, type(new).__name__))
        return returned

    return call
