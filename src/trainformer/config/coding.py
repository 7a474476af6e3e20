"""A config as the Python program that builds the same objects.

Nothing is imported for it: where the module of a dotted path ends is told by its first capital letter. Parameters
`x_cfg` are not filled in, for only the class knows that it has them.
"""

from __future__ import annotations

import builtins
import datetime
import keyword
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from trainformer.config.nodes import Call, Config, as_call, at, free_name, is_shared, names_of_shared
from trainformer.core.errors import BadArgument

_WIDTH = 100


def to_python(config: Config) -> str:
    """A program that has a variable for every key at the top and for every object that is shared."""
    return _Program(config).text()


class _Program:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.taken = {*dir(builtins), *keyword.kwlist, "datetime"}
        self.variables = {key: self.name(str(key)) for key in config}
        self.shared_names = names_of_shared(config)
        self.at_top = {id(value): self.variables[key] for key, value in config.items() if is_shared(value)}
        self.done: dict[int, str] = {}
        self.imports: dict[tuple[str, str], str] = {}
        self.modules: set[str] = set()
        self.lines: list[str] = []

    def text(self) -> str:
        for key, value in self.config.items():
            written = self.value(value, 0)
            if written != self.variables[key]:
                self.lines.append(f"{self.variables[key]} = {written}")
        froms = [
            f"from {module} import {name}" + (f" as {local}" if local != name else "")
            for (module, name), local in sorted(self.imports.items())
        ]
        head = [*(f"import {module}" for module in sorted(self.modules)), *froms]
        return "\n".join([*head, *([""] if head and self.lines else []), *self.lines, ""])

    def name(self, wanted: str) -> str:
        """A name that nothing else has."""
        base = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "value"
        base = f"_{base}" if base[0].isdigit() else base
        name = free_name(base, self.taken)
        self.taken.add(name)
        return name

    def value(self, value: Any, depth: int) -> str:
        """The expression for a value. What is shared is written before it, once."""
        if not is_shared(value) or id(value) not in self.shared_names:
            return self.expression(value, depth)
        if id(value) not in self.done:
            written = self.expression(value, 0)
            variable = self.at_top.get(id(value)) or self.name(self.shared_names[id(value)])
            self.lines.append(f"{variable} = {written}")
            self.done[id(value)] = variable
        return self.done[id(value)]

    def expression(self, value: Any, depth: int) -> str:
        call = as_call(value)
        if call is not None:
            return self.call(call, depth)
        if isinstance(value, Mapping):
            items = [f"{self.literal(key)}: {self.value(item, depth + 1)}" for key, item in value.items()]
            return _bracketed("{", items, "}", depth)
        if isinstance(value, list):
            return _bracketed("[", [self.value(item, depth + 1) for item in value], "]", depth)
        if type(value) is tuple:
            items = [self.value(item, depth + 1) for item in value]
            return f"({items[0]},)" if len(items) == 1 else _bracketed("(", items, ")", depth)
        return self.literal(value)

    def call(self, call: Call, depth: int) -> str:
        items = [self.value(item, depth + 1) for item in call.args]
        odd = {}
        for key, item in call.kwargs.items():
            if str(key).isidentifier() and not keyword.iskeyword(str(key)):
                items.append(f"{key}={self.value(item, depth + 1)}")
            else:
                odd[key] = item
        if odd:
            items.append(f"**{self.expression(Config(odd, source=call.kwargs.source), depth + 1)}")
        target = self.target(call)
        if call.kind == "partial":
            items.insert(0, target)
            target = self.imported("functools", "partial")
        return _bracketed(f"{target}(", items, ")", depth)

    def target(self, call: Call) -> str:
        if not isinstance(call.target, str):
            return self.imported(call.target.__module__, call.target.__qualname__)
        module, colon, name = call.target.partition(":")
        if not colon and "." not in module:
            return f"{self.imported('trainformer.config', 'REGISTRY')}[{call.target!r}]"
        return self.imported(module, name) if colon else self.imported(*_split(module))

    def imported(self, module: str, name: str) -> str:
        """The expression for something of a module, which is imported at the top."""
        first, *rest = name.split(".")
        if (module, first) not in self.imports:
            self.imports[module, first] = self.name(first)
        return ".".join([self.imports[module, first], *rest])

    def literal(self, value: Any) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or type(value) in (str, int, float, bool, bytes, complex):
            return repr(value)
        if isinstance(value, datetime.date):
            self.modules.add("datetime")
            return repr(value)
        if isinstance(value, PurePath):
            return f"{self.imported('pathlib', 'Path')}({str(value)!r})"
        if isinstance(value, set | frozenset):
            items = ", ".join(sorted(map(self.literal, value)))
            return f"{type(value).__name__}([{items}])"
        if isinstance(value, type) or hasattr(value, "__qualname__"):
            return self.imported(value.__module__, value.__qualname__)
        raise BadArgument(
            f"Expected values that can be written as Python{at(self.config.place)}, received a {type(value).__name__}."
        )


def _split(path: str) -> tuple[str, str]:
    """Module and name of a dotted path: the name begins at the first capital letter, or is the last word."""
    words = path.split(".")
    first = next((index for index, word in enumerate(words) if index and word[0].isupper()), len(words) - 1)
    return ".".join(words[:first]), ".".join(words[first:])


def _bracketed(start: str, items: Iterable[str], end: str, depth: int) -> str:
    items = list(items)
    line = f"{start}{', '.join(items)}{end}"
    if len(line) + 4 * depth <= _WIDTH and "\n" not in line:
        return line
    inner = "    " * (depth + 1)
    return "\n".join([start, *(f"{inner}{item}," for item in items), "    " * depth + end])
