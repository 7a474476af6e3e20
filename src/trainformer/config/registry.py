"""A registry of classes and functions, so that a config can say `type: MyModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainformer.config.nodes import dotted_name
from trainformer.core.errors import BadArgument, did_you_mean, expected


class Registry:
    """Classes and functions by name. A config may build whatever a program registers.

    >>> registry = Registry("layers")
    >>> @registry.register()
    ... def double(x):
    ...     return 2 * x
    >>> registry["double"](4)
    8
    """

    def __init__(self, name: str = "registry") -> None:
        self.name = name
        self._things: dict[str, Any] = {}

    def register(self, name: str | None = None) -> Callable[[Any], Any]:
        """A decorator that registers a class or function, by default under its own name."""
        if name is not None and not isinstance(name, str):  # used without brackets: @REGISTRY.register
            return self.register()(name)

        def enter(thing: Any) -> Any:
            self._enter(thing.__name__ if name is None else name, thing)
            return thing

        return enter

    def _enter(self, name: str, thing: Any) -> None:
        if not callable(thing):
            raise BadArgument(expected(f"a class or function to register as {name!r}", thing))
        if not name or "." in name or ":" in name:
            do = "A name with a dot or colon would hide what can be imported under it."
            raise BadArgument(expected(f"a name to register {dotted_name(thing)} by", name, do))
        there = self._things.get(name)
        # Reloading a module or running a notebook cell again registers a new object of the same origin.
        if there is not None and there is not thing and dotted_name(there) != dotted_name(thing):
            raise BadArgument(
                f"Expected a name that is free in the {self.name}, received {name!r} for {dotted_name(thing)}: it is "
                f"{dotted_name(there)}. Register it by another one: register({name + '2'!r})."
            )
        self._things[name] = thing

    def __getitem__(self, name: str) -> Any:
        if name not in self._things:
            hint = did_you_mean(name, self._things) or f"There is: {', '.join(self._things) or 'nothing yet'}."
            raise BadArgument(expected(f"a name in the {self.name}", name, hint))
        return self._things[name]

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)


REGISTRY = Registry()
