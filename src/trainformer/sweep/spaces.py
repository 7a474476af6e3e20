"""What a setting may be: the spaces a sweep draws from, and how they are told to Optuna.

Owns the checks of ranges, how a space is written down, and the way from what Optuna stores to the value a function
gets. Optuna's categories are numbers, texts, truth values and None; other objects are stored under a label.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected

PLAIN = (str, int, float, bool, type(None))


@dataclass
class _Values:
    values: list[Any]

    def __post_init__(self) -> None:
        kind = type(self).__name__.lower()
        self.values = list(self.values)
        if not self.values:
            raise BadArgument(expected(f"{kind}() to have at least one value", self.values))
        for place, value in enumerate(self.values):
            # `True == 1`, and Optuna could not tell the two apart either.
            if any(_same(value, other) for other in self.values[:place]):
                raise BadArgument(expected(f"{kind}() to have different values", self.values, f"{value!r} is twice."))

    @property
    def labels(self) -> list[Any]:
        """What Optuna stores: the values themselves if it can, else texts."""
        if all(isinstance(value, PLAIN) for value in self.values):
            return self.values
        return [f"{place}: {in_words(value)}" for place, value in enumerate(self.values)]

    def suggest(self, trial: Any, name: str) -> Any:
        """Let an Optuna trial choose."""
        labels = self.labels
        return self.values[labels.index(trial.suggest_categorical(name, labels))]

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(map(in_words, self.values))})"


@dataclass
class Grid(_Values):
    """Each of the values, in a grid sweep; else one of them."""


@dataclass
class Choice(_Values):
    """One of the values; in a grid sweep each of them."""


@dataclass
class Uniform:
    """A number between two others; with `log` its logarithm is uniform."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        kind = "log_uniform" if self.log else "uniform"
        _check_range(kind, self.low, self.high, float)
        if self.log and self.low <= 0:
            raise BadArgument(expected("the lower end of log_uniform() to be above 0", self.low))

    def suggest(self, trial: Any, name: str) -> float:
        """Let an Optuna trial choose."""
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{'log_uniform' if self.log else 'uniform'}({_exactly(self.low)}, {_exactly(self.high)})"


@dataclass
class IntUniform:
    """A whole number from one to another, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range("int_uniform", self.low, self.high, int)

    def suggest(self, trial: Any, name: str) -> int:
        """Let an Optuna trial choose."""
        return trial.suggest_int(name, self.low, self.high)

    def __str__(self) -> str:
        return f"int_uniform({self.low}, {self.high})"


Space = Grid | Choice | Uniform | IntUniform


def grid(*values: Any) -> Grid:
    """Each of these values, in a grid sweep."""
    return Grid(list(values))


def choice(*values: Any) -> Choice:
    """One of these values, which may be any objects."""
    return Choice(list(values))


def uniform(low: float, high: float) -> Uniform:
    """A number between two others."""
    return Uniform(low, high)


def log_uniform(low: float, high: float) -> Uniform:
    """A number between two others, as likely between 1e-5 and 1e-4 as between 1e-4 and 1e-3."""
    return Uniform(low, high, log=True)


def int_uniform(low: int, high: int) -> IntUniform:
    """A whole number from one to another, both included."""
    return IntUniform(low, high)


def check_names(function: Callable[..., Any], spaces: Mapping[str, Any]) -> None:
    """Refuse a sweep whose settings are not those of its function."""
    called = getattr(function, "__name__", type(function).__name__)
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    for name in spaces:
        if name not in named and not takes_any:
            hint = did_you_mean(name, named) or f"It has {', '.join(named) or 'none'}."
            raise BadArgument(expected(f"a parameter of {called}()", name, hint))
    for name, parameter in parameters.items():
        optional = parameter.default is not kinds.empty or parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if not optional and name not in spaces:
            do = f"Give it a space such as {name}=choice(1, 2), a plain value, or a default."
            raise BadArgument(f"Expected the sweep to say what {called}() gets as {name!r}. {do}")


def suggest(trial: Any, spaces: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call, as an Optuna trial chooses them. A plain value is a constant."""
    return {n: space.suggest(trial, n) if isinstance(space, Space) else space for n, space in spaces.items()}


def combinations(spaces: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All combinations of the values of grids and choices, as Optuna stores them.

    >>> combinations({"r": choice(4, 8), "alpha": grid(16, 32), "lr": uniform(0, 1)})[1]
    {'r': 4, 'alpha': 32}
    """
    listed = {name: space.labels for name, space in spaces.items() if isinstance(space, _Values)}
    return [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]


def described(spaces: Mapping[str, Any]) -> dict[str, str]:
    """How the spaces are written. Two sweeps with the same text search the same space."""
    return {name: str(space) if isinstance(space, Space) else in_words(space) for name, space in spaces.items()}


def in_words(value: Any) -> str:
    """A value as it is shown: the same text in every process."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(map(in_words, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{in_words(k)}: {in_words(v)}" for k, v in value.items()) + "}"
    text = getattr(value, "__name__", None) or repr(value)
    return type(value).__name__ if " at 0x" in text or len(text) > 60 else text


def _exactly(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b


def _check_range(kind: str, low: Any, high: Any, number: type) -> None:
    allowed = (int,) if number is int else (int, float)
    for value in (low, high):
        if not isinstance(value, allowed) or isinstance(value, bool) or not math.isfinite(value):
            what = "whole numbers" if number is int else "finite numbers"
            raise BadArgument(expected(f"both ends of {kind}() to be {what}", value))
    if low >= high:
        do = "A constant is written without a space." if low == high else f"Write {kind}({high!r}, {low!r})."
        raise BadArgument(expected(f"the lower end of {kind}() first", (low, high), do))
