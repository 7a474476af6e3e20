"""Recipes of runs on JAX: their settings are in a section of their own, the `arguments` of the trainer.

Owns how changes that a command makes, under the names that all commands share, get into that section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainformer.config import Config, build_from_cfg
from trainformer.config.nodes import as_call

_SECTION = "arguments"
_DATA = ("dataset_eval", "eval_dataset")
_NOT_HERE = ("load_components",)  # a run on JAX resumes completely


def arguments_of(part: Any) -> Any:
    """The section with the arguments of a trainer on JAX; None if the part describes no such trainer."""
    call = as_call(part)
    if call is None:
        return None
    section = call.kwargs.get(_SECTION, call.args[0] if call.args else None)
    return section if as_call(section) is not None else None


def build(part: Any, *, trust: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Any:
    """Build the trainer that a part of a config describes; `changes` are arguments by any of their names.

    A change named `dataset_eval` is the evaluation data, whichever of its names the part uses.
    """
    rest, call = dict(changes or {}), as_call(part)
    assert call is not None
    data = {}
    if _DATA[0] in rest:
        data = {next((name for name in _DATA if name in call.kwargs), _DATA[0]): rest.pop(_DATA[0])}
    arguments = build_from_cfg(arguments_of(part), trust=trust)
    arguments = arguments.replace(**{name: value for name, value in rest.items() if name not in _NOT_HERE})
    return build_from_cfg(part, trust=trust, **{_SECTION: arguments}, **data)


def changed(recipe: Config, changes: Mapping[str, Any]) -> Config:
    """The recipe with other arguments: a change replaces the argument under any of its names."""
    from trainformer.jax.aliases import ALIASES

    section = arguments_of(recipe["trainer"])
    values = section if isinstance(section, Config) else as_call(section).kwargs  # type: ignore[union-attr]
    for name, value in changes.items():
        own = ALIASES.get(name, name)
        for known in [key for key in values if ALIASES.get(key, key) == own]:
            del values[known]
        if value is not None:
            values[own] = value
    return recipe
