"""A config as JSON, as a tree or a graph of its objects, and as the Python program that builds them.

Nothing is imported for it.
"""

from __future__ import annotations

import builtins
import datetime
import json
import keyword
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from trainformer.config.builtins import NAMES as BUILTINS
from trainformer.config.nodes import (
    Call,
    Config,
    ConfigTuple,
    Missing,
    Secret,
    Var,
    as_call,
    at,
    free_name,
    holds_calls,
    is_shared,
    names_of_shared,
    parts,
)
from trainformer.config.yaml_format import plain_value
from trainformer.core.errors import BadArgument, expected
from trainformer.core.secrets import variable_name

_WIDTH = 100
# Functions without a module as Python; "": of `operator`.
_BUILTINS = {
    **{name: name for name in BUILTINS},
    **{f"named_{name}": name for name in ("list", "tuple", "dict")},
    **{name: f"dict.{name}" for name in ("items", "keys", "values")},
    "getitem": "",
    "call": "",
}


# -- JSON ------------------------------------------------------------------------------------------------------------


def to_json(config: Any) -> str:
    """JSON for programs. A call is an object with the tag as its key; a repeated one is a reference."""
    return json.dumps(_jsonable(config, names_of_shared(config), set()), indent=2, ensure_ascii=False)


def _jsonable(value: Any, names: Mapping[int, str], seen: set[str]) -> Any:
    name = names.get(id(value)) if is_shared(value) else None
    if name in seen:
        return {"!ref": name}
    if name is not None:
        seen.add(name)
    if isinstance(value, Call):
        named = {"name": name} if name is not None else {}
        args = [_jsonable(item, names, seen) for item in value.args]
        kwargs = {key: _jsonable(item, names, seen) for key, item in value.kwargs.items()}
        return {f"!{value.kind}": value.title, **named, "args": args, "kwargs": kwargs}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item, names, seen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, names, seen) for item in value]
    if isinstance(value, Secret):
        return {"!secret": value.name}
    if isinstance(value, Var):
        default = {} if value.default is Missing else {"default": _jsonable(value.default, names, seen)}
        return {"!var": value.name, **default}
    plain = plain_value(value)
    if isinstance(plain, list):
        return [_jsonable(item, names, seen) for item in plain]
    is_json = plain is None or isinstance(plain, str | int) or (isinstance(plain, float) and math.isfinite(plain))
    return plain if is_json else str(plain)


# -- trees and graphs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One line of the tree."""

    depth: int
    step: str
    text: str
    number: int  # of the object
    above: int | None
    again: bool  # shown before


def to_tree(config: Config) -> str:
    """Step, kind and class of every object, indented; `-> name` where an object is used again.

    >>> print(to_tree(Config({"model": {"type": "Net", "head": {"type": "torch.nn.Linear", "in_features": 8}}})))
    model: Net
      head: torch.nn.Linear
    """
    return "\n".join(f"{'  ' * row.depth}{row.step}: {row.text}" for row in _rows(config))


def to_dot(config: Config) -> str:
    """The graph in Graphviz's DOT language."""
    lines = ["digraph config {", "  rankdir=LR;", "  node [shape=box];"]
    for row in _rows(config):
        if not row.again:
            label = f"{row.step}\n{row.text}" if row.above is None else row.text
            lines.append(f"  n{row.number} [label={json.dumps(label, ensure_ascii=False)}];")
        if row.above is not None:
            step = json.dumps(row.step, ensure_ascii=False)
            lines.append(f"  n{row.above} -> n{row.number} [label={step}];")
    return "\n".join([*lines, "}"])


def _rows(config: Config) -> Iterator[_Row]:
    names = names_of_shared(config)
    numbers: dict[int, int] = {}
    count = iter(range(1 << 30))

    def walk(value: Any, step: str, depth: int, above: int | None) -> Iterator[_Row]:
        if not holds_calls(value):
            return
        name = names.get(id(value)) if is_shared(value) else None
        if name is not None and id(value) in numbers:
            yield _Row(depth, step, f"-> {name}", numbers[id(value)], above, again=True)
            return
        number = next(count)
        if name is not None:
            numbers[id(value)] = number
        own = getattr(value, "name", None) or name
        yield _Row(depth, step, _described(value, own if own != step else None), number, above, again=False)
        for inner, part in parts(as_call(value) or value):
            yield from walk(part, str(inner), depth + 1, number)

    for key, value in config.items():
        yield from walk(value, str(key), 0, None)


def _described(value: Any, name: str | None) -> str:
    call = as_call(value)
    if call is None:
        text = "dict" if isinstance(value, dict) else "list"
    else:
        text = f"{call.kind} {call.title}" if isinstance(value, Call) else call.title
    return f"{text} ({name})" if name else text


# -- Python ----------------------------------------------------------------------------------------------------------


def to_python(config: Config) -> str:
    """A program with a variable for every top-level key and every shared object.

    Where the module of a dotted path ends is inferred from its first capital letter. Parameters `x_cfg` are not filled
    in: only the class knows that it has them.
    """
    return _Program(config).text()


class _Program:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.taken = {*dir(builtins), *keyword.kwlist, "datetime", "os"}
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
        """A unique variable name."""
        base = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "value"
        base = f"_{base}" if base[0].isdigit() else base
        name = free_name(base, self.taken)
        self.taken.add(name)
        return name

    def value(self, value: Any, depth: int) -> str:
        """The expression for a value; a shared value gets a variable first."""
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
        if type(value) in (tuple, ConfigTuple):
            items = [self.value(item, depth + 1) for item in value]
            return f"({items[0]},)" if len(items) == 1 else _bracketed("(", items, ")", depth)
        return self.literal(value)

    def call(self, call: Call, depth: int) -> str:
        if call.kind == "meta":
            raise BadArgument(f"Expected calls that Python can write{at(call.place)}, received !meta:{call.title}.")
        items = [self.value(item, depth + 1) for item in call.args]
        named, more = self._named(call)
        if call.kind == "lambda":  # builds its arguments again in every call
            items.append("*args")
            more = {**named, **more}
            more_items = [f"{self.literal(key)}: {self.value(item, depth + 1)}" for key, item in more.items()]
            items.append(f"**{{{', '.join([*more_items, '**kwargs'])}}}" if more else "**kwargs")
            return _bracketed(f"lambda *args, **kwargs: {self.target(call)}(", items, ")", depth)
        items += [f"{key}={self.value(item, depth + 1)}" for key, item in named.items()]
        if more:
            items.append(f"**{self.expression(Config(more, source=call.kwargs.source), depth + 1)}")
        target = self.target(call)
        if call.kind == "partial":
            items.insert(0, target)
            target = self.imported("functools", "partial")
        return _bracketed(f"{target}(", items, ")", depth)

    def _named(self, call: Call) -> tuple[dict[str, Any], dict[Any, Any]]:
        """The keyword arguments, and those whose names are no names in Python."""
        latent = call.kwargs.get("latent_args", {})
        latent = latent.default if isinstance(latent, Var) else latent
        own = {key: item for key, item in call.kwargs.items() if key not in ("latent_args", "submodule_searchpath")}
        given = {**own, **latent} if isinstance(latent, Mapping) else dict(call.kwargs)
        good = {key for key in given if str(key).isidentifier() and not keyword.iskeyword(str(key))}
        return {key: given[key] for key in given if key in good}, {
            key: item for key, item in given.items() if key not in good
        }

    def target(self, call: Call) -> str:
        if not isinstance(call.target, str):
            return self.imported(call.target.__module__, call.target.__qualname__)
        module, colon, name = call.target.partition(":")
        if not colon and "." not in module:
            if call.target in _BUILTINS:
                return _BUILTINS[call.target] or self.imported("operator", call.target)
            return f"{self.imported('trainformer.config', 'REGISTRY')}[{call.target!r}]"
        return self.imported(module, name) if colon else self.imported(*_split(module))

    def imported(self, module: str, name: str) -> str:
        """The expression for a name of a module, which is imported at the top."""
        first, *rest = name.split(".")
        if (module, first) not in self.imports:
            self.imports[module, first] = self.name(first)
        return ".".join([self.imports[module, first], *rest])

    def literal(self, value: Any) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or type(value) in (str, int, float, bool, bytes, complex):
            return repr(value)
        if isinstance(value, Var):
            if value.default is not Missing:
                return self.value(value.default, 0)
            if value.name == "pp_config":
                return repr(self.config.pp_config)
            do = f"Pass it as a keyword or with --var {value.name}=value."
            raise BadArgument(expected(f"a variable that has a value{at(value.place)}", value.name, do))
        if isinstance(value, Secret):
            self.modules.add("os")
            return f"os.environ[{variable_name(value.name)!r}]"
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
    """Module and name of a dotted path: the name starts at the first capital letter, or is the last word."""
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
