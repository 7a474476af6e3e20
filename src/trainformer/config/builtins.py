"""The functions that a config may name without a module: `len`, `getitem`, `getattr`, `call` and a few others.

`getattr` and `call` together would reach all of Python, so both are restricted: `getattr` returns data, objects and a
few methods, but no other function, class or module; `call` calls what the config itself could have named. A user who
trusts one of them by its name (`--trust getattr`) lifts this.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

from trainformer.core.errors import BadArgument, expected

# Methods of objects of allowed packages. Those of objects of trusted code are all allowed.
_METHODS = ("save_pretrained", "parameters", "named_parameters", "state_dict", "items", "keys", "values")
_PLAIN: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, bool, dict, enumerate, float, int, len, list, max, min, range, round)},
    **{f.__name__: f for f in (set, sorted, str, sum, tuple, zip)},
    "named_list": list,
    "named_tuple": tuple,
    "named_dict": dict,
    "items": lambda mapping: mapping.items(),
    "keys": lambda mapping: mapping.keys(),
    "values": lambda mapping: mapping.values(),
}
NAMES = (*_PLAIN, "getattr", "getitem", "call")


class Deferred(functools.partial[Any]):
    """A function that a config made: `!partial` or `!lambda`. It may call only what the config may."""


def builtin(name: str, is_known: Callable[[Any], bool], is_trusted: bool) -> Callable[..., Any]:
    """The function of a name. `is_known` tells whether a config may use the methods of a class."""
    if name in _PLAIN:
        return _PLAIN[name]
    functions: dict[str, Callable[..., Any]] = {"getattr": getattr, "getitem": operator.getitem, "call": _call}
    plain = functions[name]
    if is_trusted:
        return plain
    if name == "call":

        def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if not (isinstance(function, Deferred) or _is_good_method(function, is_known)):
                do = "Name it by !partial:module:function. Or trust `call` for this command: --trust call."
                raise BadArgument(expected("`call` to get a function that the config made", repr(function), do))
            if kwargs.get("push_to_hub"):
                raise BadArgument("Expected no push_to_hub in a config: nothing is sent unless you ask for it.")
            return function(*args, **kwargs)

        return call

    def get(thing: Any, key: Any, *default: Any) -> Any:
        if name == "getattr" and (not isinstance(key, str) or key.startswith("_")):
            raise BadArgument(expected("`getattr` to get a public name", key))
        found = plain(thing, key, *default)
        if not _is_harmless(found, is_known):
            do = f"If you trust the config, say so: --trust {name}."
            raise BadArgument(expected(f"{name} of {key!r} to be data or an object, no function", repr(found), do))
        return found

    return get


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _is_harmless(value: Any, is_known: Callable[[Any], bool]) -> bool:
    """Whether it is no function, class or module; a container must have none in it either."""
    if isinstance(value, Mapping):
        return all(_is_harmless(item, is_known) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_harmless(item, is_known) for item in value)
    if isinstance(value, Deferred) or _is_good_method(value, is_known):
        return True
    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    return not (is_function or isinstance(value, type | ModuleType))


def _is_good_method(value: Any, is_known: Callable[[Any], bool]) -> bool:
    owner = getattr(value, "__self__", None)
    if not isinstance(value, MethodType | BuiltinFunctionType) or owner is None or isinstance(owner, type | ModuleType):
        return False
    return value.__name__ in _METHODS or is_known(type(owner))
