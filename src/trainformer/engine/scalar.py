"""A number that is still on the device."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from functools import partial
from typing import Any


class LazyScalar:
    """Behaves as a float; waits for the device only when somebody looks at it.

    It is what `on_step_end` gets as loss, so that a callback which does not read the loss costs nothing.

    >>> reads = []
    >>> loss = LazyScalar(lambda: reads.append(1) or 0.25)
    >>> reads
    []
    >>> loss < 0.5, f"{loss:.3f}", loss * 2, reads
    (True, '0.250', 0.5, [1])
    """

    __slots__ = ("_read", "_value")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read: Callable[[], float] | None = read
        self._value = 0.0

    def __float__(self) -> float:
        if self._read is not None:
            self._value, self._read = float(self._read()), None
        return self._value

    def item(self) -> float:
        """The value, as a tensor would give it."""
        return float(self)

    def __int__(self) -> int:
        return int(float(self))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __hash__(self) -> int:
        return hash(float(self))


def _delegate(name: str, function: Callable[..., Any]) -> None:
    def method(self: LazyScalar, *others: Any) -> Any:
        return function(float(self), *(float(o) if isinstance(o, LazyScalar) else o for o in others))

    method.__name__ = name
    setattr(LazyScalar, name, method)


def _swapped(function: Callable[..., Any], a: Any, b: Any) -> Any:
    return function(b, a)


for _name in ("lt", "le", "eq", "ne", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _delegate(f"__{_name}__", getattr(operator, _name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _delegate(f"__r{_name}__", partial(_swapped, getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    _delegate(f"__{_name}__", getattr(operator, _name))
_delegate("__round__", round)

# isinstance(loss, numbers.Real) is how careful code asks for "a number".
numbers.Real.register(LazyScalar)
