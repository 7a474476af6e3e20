"""Rewards of completions that Python functions give, with names and weights; and ready ones. Never imports torch."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.tasks.language.rollouts.rollout import Rollout

RewardFunction = Callable[..., Sequence[float | None]]
_OWN_COLUMNS = ("prompts", "completions", "completion_ids", "environments", "completion", "prompt")


class RewardFunctions:
    """Scores completions with one or several functions, each with a name and a weight.

    `rewards` is a function, ``"file.py:name"`` of a function in the working directory, a list of these, or a mapping
    from names to them. Functions in files are imported when the first completion is scored; in a config their code has
    to be trusted before.
    """

    def __init__(self, rewards: Any, weights: Sequence[float] | None = None) -> None:
        self.given = _named(rewards)
        self._trust = _trust_of_config([given for given in self.given.values() if _is_in_file(given)])
        self.names = list(self.given)
        self.weights = _checked_weights(weights, self.names)
        self._functions: dict[str, RewardFunction] = {}

    def __bool__(self) -> bool:
        return bool(self.names)

    def scores(self, rollouts: Sequence[Rollout], **context: Any) -> np.ndarray:
        """Rewards (B, number of functions) in float64; NaN where a function returned None."""
        columns = _columns(rollouts)
        found = [self._score(name, columns, context) for name in self.names]
        return np.asarray(found, np.float64).reshape(len(self.names), len(rollouts)).T

    def weighted(self, scores: np.ndarray) -> np.ndarray:
        """Weighted sums (B,); NaN where no function gave a reward.

        >>> RewardFunctions([len, sum], [1.0, 2.0]).weighted(np.array([[1.0, 3.0], [math.nan, 1.0]]))
        array([7., 2.])
        """
        return np.where(np.isnan(scores).all(1), math.nan, np.nansum(scores * np.asarray(self.weights), axis=1))

    def _score(self, name: str, columns: Mapping[str, Any], context: Mapping[str, Any]) -> list[float]:
        if name not in self._functions:
            self._functions[name] = self._function(name)
        found = self._call(name, self._functions[name], columns, context)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return _checked_scores(name, found, len(columns["completions"]))

    def _call(self, name: str, function: RewardFunction, columns: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
        return function(**_accepted(name, function, columns))

    def _function(self, name: str) -> RewardFunction:
        given = self.given[name]
        return import_function(given, self._trust) if _is_in_file(given) else given


# -- ready functions ---------------------------------------------------------------------------------------


def overlong_penalty(max_length: int, buffer: int) -> RewardFunction:
    """A reward of 0 for short completions that falls to -1 over the last `buffer` of `max_length` tokens (DAPO).

    Longer ones have -1. Tokens of observations count.

    >>> overlong_penalty(max_length=10, buffer=4)(completion_ids=[[1] * 6, [1] * 8, [1] * 12])
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise BadArgument(expected(f"buffer from 1 to max_length ({max_length})", buffer))

    def overlong(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        start = max_length - buffer
        return [-min(1.0, max(0.0, (len(ids) - start) / buffer)) + 0.0 for ids in completion_ids]

    return overlong


# -- functions in files ------------------------------------------------------------------------------------


def is_function_path(text: str) -> bool:
    """Whether a text names a function in a file.

    >>> is_function_path("rewards.py:correct"), is_function_path("org/reward-model")
    (True, False)
    """
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def module_of(text: str) -> str:
    """The module of ``"file.py:name"``, a file below the working directory.

    >>> _ = Path("rewards.py").write_text("")
    >>> module_of("rewards.py:correct")
    'rewards'
    """
    file = text.rpartition(":")[0]
    path = Path(os.path.relpath(file))
    if not path.is_file() or ".." in path.parts:
        raise BadArgument(expected("the file of a function in the working directory", file))
    return ".".join(path.with_suffix("").parts)


def import_function(text: str, trust: Sequence[str] = ()) -> Any:
    """The function that ``"file.py:name"`` names, if its code may be imported (see docs/security.md)."""
    from trainformer.config.registry import Registry
    from trainformer.config.trust import Importer

    found = Importer(Registry(), trust).find(_target(text))
    if not callable(found):
        raise BadArgument(expected(f"{text!r} to name a function", type(found).__name__))
    return found


def _target(text: str) -> str:
    return f"{module_of(text)}:{text.rpartition(':')[2]}"


def _is_in_file(reward: Any) -> bool:
    return isinstance(reward, str) and is_function_path(reward)


def _trust_of_config(functions: Sequence[str]) -> tuple[str, ...]:
    """What the user trusts in the config that is being built, if any; raises if it does not include the functions."""
    from trainformer.config.building import TRUST
    from trainformer.config.registry import Registry
    from trainformer.config.trust import Importer

    trust = TRUST.get()
    for text in functions if trust is not None else ():
        Importer(Registry(), trust or ()).check(_target(text))
    return trust or ()


# -- arguments and results ---------------------------------------------------------------------------------


def _named(rewards: Any) -> dict[str, Any]:
    if rewards is None:
        return {}
    if isinstance(rewards, Mapping):
        found = {str(name): reward for name, reward in rewards.items()}
    else:
        several = rewards if isinstance(rewards, list | tuple) else [rewards]
        found = {}
        for reward in several:
            name = _name_of(reward)
            number = 1 + sum(other == name or other.startswith(f"{name}#") for other in found)
            found[name if number == 1 else f"{name}#{number}"] = reward
    for name, reward in found.items():
        if isinstance(reward, type) or not (callable(reward) or isinstance(reward, str | Path)):
            what = f"the reward {name!r} to be a function, a reward model, or 'file.py:function'"
            raise BadArgument(expected(what, f"a {type(reward).__name__}: {reward!r}"))
        if _is_in_file(reward):
            module_of(reward)
    return found


def _name_of(reward: Any) -> str:
    if _is_in_file(reward):
        return str(reward).rpartition(":")[2]
    if isinstance(reward, str | Path):
        return Path(reward).name
    return getattr(reward, "__name__", type(reward).__name__)


def _checked_weights(weights: Sequence[float] | None, names: Sequence[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    found = list(weights)
    good = all(isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) for w in found)
    if len(found) != len(names) or not good:
        what = f"one number in reward_weights for each of {', '.join(names) or 'no rewards'}"
        raise BadArgument(expected(what, found))
    return [float(weight) for weight in found]


def _columns(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """What reward functions may ask for, one item per completion."""
    names = {name: None for rollout in rollouts for name in rollout.prompt.columns}
    columns = {
        name: [rollout.prompt.columns.get(name) for rollout in rollouts] for name in names if name not in _OWN_COLUMNS
    }
    return {
        "tools": [rollout.prompt.tools for rollout in rollouts],
        **columns,
        "prompts": [rollout.prompt.prompt for rollout in rollouts],
        "completions": [rollout.completion for rollout in rollouts],
        "completion_ids": [list(rollout.tokens) for rollout in rollouts],
        "environments": [rollout.environment for rollout in rollouts],
    }


def _accepted(name: str, function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function takes; all of them if it has **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    wanted = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    missing = [p.name for p in wanted if p.name not in columns and p.default is p.empty]
    if missing:
        what = f"the arguments of the reward {name!r} to be columns of the data ({', '.join(columns)})"
        raise DataError(expected(what, ", ".join(missing)))
    return {p.name: columns[p.name] for p in wanted if p.name in columns}


async def _awaited(found: Any) -> Any:
    return await found


def _checked_scores(name: str, found: Any, count: int) -> list[float]:
    if hasattr(found, "tolist"):
        found = found.tolist()
    if not isinstance(found, list | tuple) or len(found) != count:
        received = f"{len(found)} values" if isinstance(found, list | tuple) else type(found).__name__
        raise DataError(expected(f"the reward {name!r} to return a list of {count} numbers or None", received))
    scores = []
    for place, value in enumerate(found):
        value = value.item() if hasattr(value, "item") else value
        if value is None:
            scores.append(math.nan)
        elif isinstance(value, int | float) and math.isfinite(value):  # booleans too
            scores.append(float(value))
        else:
            what = f"the reward {name!r} to return finite numbers or None"
            raise DataError(expected(what, f"{value!r} for completion {place}"))
    return scores
