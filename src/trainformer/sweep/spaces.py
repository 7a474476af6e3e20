"""Search spaces: what values a parameter of the swept function may take.

Owns the validation of ranges, the text form of a space, and the mapping between a value and what Optuna stores.
Optuna's categories are numbers, strings, booleans and None; any other object is stored under a label.
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
        for index, value in enumerate(self.values):
            # `True == 1`, and Optuna cannot distinguish the two either.
            if any(_same(value, other) for other in self.values[:index]):
                raise BadArgument(expected(f"{kind}() to have distinct values", self.values, f"{value!r} is repeated."))

    @property
    def labels(self) -> list[Any]:
        """What Optuna stores: the values themselves if it can, otherwise strings."""
        if all(isinstance(value, PLAIN) for value in self.values):
            return self.values
        return [f"{index}: {format_value(value)}" for index, value in enumerate(self.values)]

    def suggest(self, trial: Any, name: str) -> Any:
        """Let an Optuna trial choose."""
        labels = self.labels
        return self.values[labels.index(trial.suggest_categorical(name, labels))]

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(map(format_value, self.values))})"


@dataclass
class Grid(_Values):
    """Every value in a grid sweep; one of them with any other method."""


@dataclass
class Choice(_Values):
    """One of the values; every value in a grid sweep."""


@dataclass
class Uniform:
    """A float in a range; with `log` it is sampled on a log scale."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        kind = "log_uniform" if self.log else "uniform"
        _check_range(kind, self.low, self.high, float)
        if self.log and self.low <= 0:
            raise BadArgument(expected("the lower bound of log_uniform() to be above 0", self.low))

    def suggest(self, trial: Any, name: str) -> float:
        """Let an Optuna trial choose."""
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{'log_uniform' if self.log else 'uniform'}({_exact(self.low)}, {_exact(self.high)})"


@dataclass
class IntUniform:
    """An integer in a range, both bounds included."""

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
    """Every one of these values, in a grid sweep.

    >>> str(grid(4, 8))
    'grid(4, 8)'
    """
    return Grid(list(values))


def choice(*values: Any) -> Choice:
    """One of these values, which may be any objects.

    >>> str(choice("adamw", None))
    "choice('adamw', None)"
    """
    return Choice(list(values))


def uniform(low: float, high: float) -> Uniform:
    """A float between two bounds.

    >>> str(uniform(0, 0.5))
    'uniform(0, 0.5)'
    """
    return Uniform(low, high)


def log_uniform(low: float, high: float) -> Uniform:
    """A float on a log scale: as likely between 1e-5 and 1e-4 as between 1e-4 and 1e-3.

    >>> str(log_uniform(1e-5, 1e-3))
    'log_uniform(1e-05, 0.001)'
    """
    return Uniform(low, high, log=True)


def int_uniform(low: int, high: int) -> IntUniform:
    """An integer between two bounds, both included.

    >>> str(int_uniform(1, 4))
    'int_uniform(1, 4)'
    """
    return IntUniform(low, high)


def check_names(function: Callable[..., Any], spaces: Mapping[str, Any]) -> None:
    """Refuse a sweep whose names do not match the parameters of its function."""
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
            do = f"Give it a space such as {name}=choice(1, 2), a constant, or a default."
            raise BadArgument(f"Expected a space or a value for {name!r} of {called}(), received none. {do}")


def suggest(trial: Any, spaces: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call, as an Optuna trial chooses them. A plain value is a constant."""
    return {n: space.suggest(trial, n) if isinstance(space, Space) else space for n, space in spaces.items()}


def original_value(space: Any, stored: Any) -> Any:
    """The value that Optuna stored, or the object behind its label; constants are not stored.

    >>> original_value(choice(int, float), "1: float")
    <class 'float'>
    """
    if isinstance(space, _Values):
        return space.values[space.labels.index(stored)] if stored in space.labels else stored
    return stored if isinstance(space, Space) else space


def combinations(spaces: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All combinations of the values of grids and choices, as Optuna stores them.

    >>> combinations({"r": choice(4, 8), "alpha": grid(16, 32), "lr": uniform(0, 1)})[1]
    {'r': 4, 'alpha': 32}
    """
    listed = {name: space.labels for name, space in spaces.items() if isinstance(space, _Values)}
    return [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]


def describe_spaces(spaces: Mapping[str, Any]) -> dict[str, str]:
    """The text form of each space. Two sweeps with the same text search the same space."""
    return {name: str(space) if isinstance(space, Space) else format_value(space) for name, space in spaces.items()}


def format_value(value: Any) -> str:
    """A value as text, the same in every process.

    >>> format_value({"layers": (1, 2), "act": len})
    "{'layers': (1, 2), 'act': len}"
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(map(format_value, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(k)}: {format_value(v)}" for k, v in value.items()) + "}"
    text = getattr(value, "__name__", None) or repr(value)
    return type(value).__name__ if " at 0x" in text or len(text) > 60 else text


def format_setting(value: Any) -> str:
    """A setting in a table: floats with four digits, strings without quotes.

    >>> format_setting("adamw"), format_setting(0.000123456)
    ('adamw', '0.0001235')
    """
    if isinstance(value, float):
        return format_metric(value)
    return value if isinstance(value, str) else format_value(value)


def format_metric(value: float | None) -> str:
    """A metric with four digits.

    >>> format_metric(0.1234567), format_metric(None)
    ('0.1235', 'no value')
    """
    if value is None:
        return "no value"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _exact(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b)


def _check_range(kind: str, low: Any, high: Any, number: type) -> None:
    allowed = (int,) if number is int else (int, float)
    for value in (low, high):
        if not isinstance(value, allowed) or isinstance(value, bool) or not math.isfinite(value):
            what = "integers" if number is int else "finite numbers"
            raise BadArgument(expected(f"both bounds of {kind}() to be {what}", value))
    if low >= high:
        do = "Pass a constant without a space." if low == high else f"Write {kind}({high!r}, {low!r})."
        raise BadArgument(expected(f"the lower bound of {kind}() first", (low, high), do))
