"""Read YAML with tags into a `Config` that knows its lines, and write it back.

Built on PyYAML's SafeLoader, so that no tag creates a Python object; ours create `Call`s. It differs from PyYAML in
three points: `1e-4` is a number, a duplicate key is an error, and an alias to plain data is a copy. In Forgather's
syntax a later key replaces an earlier one, `!partial` builds its arguments when it is called, and a `!var` without a
value gets one when something is built.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NoReturn, get_args

from trainformer.config.line_syntax import uses_line_syntax
from trainformer.config.nodes import (
    Call,
    Config,
    ConfigList,
    ConfigTuple,
    Kind,
    Missing,
    Place,
    Secret,
    Source,
    Var,
    at,
    dotted_name,
    free_name,
    is_shared,
)
from trainformer.config.templates import literal
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.core.secrets import remember, variable_name

yaml: Any = require("yaml", "config", "to read YAML")

KINDS: dict[str, Kind] = {**{kind: kind for kind in get_args(Kind)}, "call": "singleton"}  # by their tags
COLLECTIONS = ("list", "dict", "tuple", "dlist")
MERGE = "tag:yaml.org,2002:merge"
FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_POSITION = re.compile(r"arg\d+")
# Nested aliases turn a small file into a huge config: nine levels of nine make 387 million values.
MOST_COPIES = 100_000
_MOST_BITS = 14_000  # Python converts at most 4,300 digits


class Reader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads one document. `variables` are the values of `!var`."""

    def __init__(
        self, text: str, source: Source, variables: Mapping[str, Any], place: Place, forgather: bool = False
    ) -> None:
        super().__init__(text)
        self.forgather = forgather
        self.source = source
        self.variables = variables
        self.whole = place
        self.anchors_of: dict[Any, str] = {}
        self.open: list[str | None] = []  # anchors of what is being read
        self.copies = 0

    def place(self, node: Any) -> Place:
        return _line(self.whole, node.start_mark)

    def refuse(self, node: Any, what: str, received: object, do: str = "") -> NoReturn:
        raise BadArgument(expected(f"{what}{at(self.place(node))}", received, do))

    # -- from text to nodes -----------------------------------------------------------------------------------------

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.open:
                do = "Break the cycle."
                self.refuse(event, "an alias to something that does not contain it", f"*{event.anchor}", do)
            return super().compose_node(parent, index)
        self.open.append(event.anchor)
        node = super().compose_node(parent, index)
        self.open.pop()
        if event.anchor:
            self.anchors_of[node] = event.anchor
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: dict[Any, int] = {}
        for key_node, _ in () if self.forgather else node.value:
            if key_node.tag == MERGE or not isinstance(key_node, yaml.ScalarNode):
                continue
            key = self.construct_object(key_node)
            if isinstance(key, Hashable) and key in seen:
                self.refuse(key_node, "each key once", key, f"It is also in line {seen[key]}.")
            if isinstance(key, Hashable):
                seen[key] = key_node.start_mark.line + 1
        return node

    # -- from nodes to values ---------------------------------------------------------------------------------------

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        again = node in self.constructed_objects
        try:
            value = super().construct_object(node, deep=True)
        except AttributeError:  # PyYAML, at `!!timestamp` before something else
            self.refuse(node, "a date or a time", node.value)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            self.refuse(node, "a number that can be written in decimal", f"one of {value.bit_length()} bits")
        return self._fresh(value, node) if again else value

    def _fresh(self, value: Any, node: Any) -> Any:
        """A copy of plain data, so that a change in one place does not affect the other."""
        if not isinstance(value, Config | ConfigList) or value.tagged:
            return value
        self.copies += len(value)
        if self.copies > MOST_COPIES:
            do = "Use !list or !dict at the anchors, which are not copied."
            self.refuse(node, f"aliases that expand to at most {MOST_COPIES} values", "more", do)
        if isinstance(value, ConfigList):
            return ConfigList((self._fresh(item, node) for item in value), place=value.place, places=value._places)
        items = {key: self._fresh(item, node) for key, item in value.items()}
        return Config(items, source=self.source, place=value.place, places=value._places)

    def mapping(self, node: Any) -> Config:
        self.flatten_mapping(node)
        values, places = {}, {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                self.refuse(key_node, "a key that is a string or a number", type(key).__name__)
            values[key] = self.construct_object(value_node)
            places[key] = self.place(key_node)
        return Config(values, source=self.source, place=self.place(node), places=places)

    def sequence(self, node: Any) -> ConfigList:
        items = [self.construct_object(item) for item in node.value]
        return ConfigList(items, place=self.place(node), places=[self.place(item) for item in node.value])

    def is_empty(self, node: Any) -> bool:
        return isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None

    def collection(self, kind: str, suffix: str, node: Any) -> Config | ConfigList | ConfigTuple:
        """`!list:@name`, `!dict:@name`, `!tuple:@name`, `!dlist:@name`, and all of them without a name."""
        wanted = yaml.MappingNode if kind in ("dict", "dlist") else yaml.SequenceNode
        if not self.is_empty(node) and not isinstance(node, wanted):
            what = "keys and values" if wanted is yaml.MappingNode else "items"
            self.refuse(node, f"{what} below !{kind}", node.id)
        if suffix and not suffix.startswith((":@", "@")):
            self.refuse(node, f"!{kind} or !{kind}:@name", f"!{kind}{suffix}")
        made = self._collected(kind, node)
        made.name = suffix[2:] or None if suffix.startswith(":") else None
        return made

    def _collected(self, kind: str, node: Any) -> Config | ConfigList | ConfigTuple:
        place = self.place(node)
        if kind == "dict":
            made = Config(source=self.source, place=place) if self.is_empty(node) else self.mapping(node)
            made.tagged = True
            return made
        if self.is_empty(node):
            items = ConfigList(place=place)
        elif kind == "dlist":
            items = ConfigList([item for item in self.mapping(node).values() if item is not None], place=place)
        else:
            items = self.sequence(node)
        if kind == "tuple":
            fixed = ConfigTuple(items)
            fixed.place = place
            return fixed
        items.tagged = True
        return items

    def call(self, tag: str, suffix: str, node: Any) -> Call:
        """`!singleton:module:Class`, followed by its arguments."""
        target, mark, name = suffix.partition("@")
        if not target or (mark and not name):
            self.refuse(node, f"!{tag}:module:Class or !{tag}:module:Class@name", node.tag)
        place = self.place(node)
        kind: Kind = "lambda" if self.forgather and tag == "partial" else KINDS[tag]
        made = Call(kind, target, ConfigList(place=place), Config(source=self.source, place=place), name or None)
        made.place, made.anchor = place, self.anchors_of.get(node)
        if self.is_empty(node):
            return made
        if isinstance(node, yaml.SequenceNode):
            made.args = self.sequence(node)
        elif isinstance(node, yaml.MappingNode):
            made.args, made.kwargs = self._arguments(node, made.args, self.mapping(node))
        else:
            do = f"Write a list for positional arguments: [{node.value}]"
            self.refuse(node, f"a list or a mapping as the arguments of {target}", node.value, do)
        for key in made.kwargs:
            if not isinstance(key, str):
                self.refuse(node, f"names of arguments of {target}", key)
        return made

    def _arguments(self, node: Any, none: ConfigList, given: Config) -> tuple[ConfigList, Config]:
        """Keyword arguments, unless the keys are just `args` and `kwargs`; `arg0`, `arg1`, ... are positional."""
        if not given or not given.keys() <= {"args", "kwargs"}:
            numbered = [key for key in given if isinstance(key, str) and _POSITION.fullmatch(key)]
            numbered.sort(key=lambda key: int(key.removeprefix("arg")))
            return ConfigList([given.pop(key) for key in numbered], place=none.place), given
        args, kwargs = given.get("args", none), given.get("kwargs", Config(source=self.source, place=none.place))
        if not isinstance(args, ConfigList) or not isinstance(kwargs, Config):
            do = "An argument of this name is written as kwargs: {args: ...}."
            self.refuse(node, "a list below args: and a mapping below kwargs:", dict(given), do)
        return args, kwargs

    def variable(self, node: Any) -> Any:
        """`!var "name"` or `!var {name: x, default: 3}`."""
        given = self.mapping(node) if isinstance(node, yaml.MappingNode) else {"name": getattr(node, "value", None)}
        name = given.get("name")
        if not isinstance(name, str) or not name or not given.keys() <= {"name", "default"}:
            self.refuse(node, '!var "name" or !var {name: x, default: 3}', dict(given))
        if name in self.variables:
            return self.variables[name]
        if self.forgather:
            return Var(name, given.get("default", Missing), self.place(node))
        if "default" in given:
            return given["default"]
        hint = did_you_mean(name, self.variables) or f"Pass it as a keyword or with --var {name}=value."
        self.refuse(node, "a variable that has a value", name, hint)

    def secret(self, node: Any) -> Any:
        """`!secret name`: a variable, which may also come from the environment. It is masked in all files."""
        name = getattr(node, "value", None)
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            self.refuse(node, "!secret name", name)
        value = self.variables.get(name) or os.environ.get(variable_name(name))
        if value is None:
            self.refuse(node, f"a value for the secret {name}", "none", Secret(name).how_to_pass)
        remember(value, name)
        return value

    def unknown(self, node: Any) -> NoReturn:
        known = [*(f"!{tag}:module:Class" for tag in KINDS), *(f"!{kind}" for kind in COLLECTIONS), "!var", "!secret"]
        word = node.tag.split(":")[0]
        close = [usage for usage in known if did_you_mean(word, [usage.split(":")[0]])]
        self.refuse(node, "a known tag", node.tag, f"There is: {', '.join(close[:1] or known)}.")


def _add_tags() -> None:
    for tag in KINDS:
        Reader.add_multi_constructor(f"!{tag}:", lambda self, suffix, node, tag=tag: self.call(tag, suffix, node))
    for kind in COLLECTIONS:
        Reader.add_constructor(f"!{kind}", lambda self, node, kind=kind: self.collection(kind, "", node))
        for mark in (":", "@"):
            Reader.add_multi_constructor(
                f"!{kind}{mark}",
                lambda self, suffix, node, kind=kind, mark=mark: self.collection(kind, mark + suffix, node),
            )
    Reader.add_constructor("!var", Reader.variable)
    Reader.add_constructor("!secret", Reader.secret)
    Reader.add_constructor("tag:yaml.org,2002:map", Reader.mapping)
    Reader.add_constructor("tag:yaml.org,2002:seq", Reader.sequence)
    Reader.add_constructor(None, Reader.unknown)


def read_numbers_like_python(resolver: Any) -> None:
    """Make a loader or dumper treat 1e-4 as a number: YAML 1.1 requires a dot and a sign."""
    old = resolver.yaml_implicit_resolvers
    tag = "tag:yaml.org,2002:float"
    resolver.yaml_implicit_resolvers = {
        first: [entry for entry in entries if entry[0] != tag] for first, entries in old.items()
    }
    resolver.add_implicit_resolver(tag, FLOAT, list("-+0123456789."))


_add_tags()
read_numbers_like_python(Reader)


def parse_yaml(
    text: str, source: Source, variables: Mapping[str, Any], place: Place, *, forgather: bool = False
) -> Any:
    """The value of the text. `place` is that of its first line, or has no line."""
    try:
        reader = Reader(text, source, variables, place, forgather)
        try:
            return reader.get_single_data()
        finally:
            reader.dispose()
    except yaml.MarkedYAMLError as error:
        where = _line(place, error.problem_mark or error.context_mark)
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise BadArgument(f"Expected YAML that can be read, received at {where}: {reason}") from error
    except yaml.YAMLError as error:  # characters that YAML does not allow
        reason = " ".join(str(error).split())
        raise BadArgument(f"Expected YAML that can be read, received in {place.file}: {reason}") from error
    except RecursionError:
        what = "Expected a config of reasonable depth, received one that is nested too deeply"
        raise BadArgument(f"{what} ({place.file}).") from None
    except BadArgument:
        raise
    except (ValueError, OverflowError) as error:  # such as the date 2001-99-99, or an integer of 5,000 digits
        raise BadArgument(f"Expected YAML that can be read, received in {place.file}: {error}") from error


def _line(place: Place, mark: Any) -> Place:
    return place if place.line is None or mark is None else replace(place, line=place.line + mark.line)


# -- writing ---------------------------------------------------------------------------------------------------------

_ODD = ("\x85", "\u2028", "\u2029")  # line ends that PyYAML loses unless they are escaped


class _Writer(yaml.SafeDumper):  # type: ignore[misc]
    """Writes nodes as the tags they were read from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names: dict[int, str] = {}
        self.used: set[str] = set()

    def ignore_aliases(self, data: Any) -> bool:
        return not is_shared(data)

    def generate_anchor(self, node: Any) -> str:
        wanted = re.sub(r"\W", "_", self.names.get(id(node)) or "shared", flags=re.ASCII)
        name = free_name(wanted, self.used)
        self.used.add(name)
        return name

    def named(self, node: Any, name: str | None) -> Any:
        if name:
            self.names[id(node)] = name
        return node

    def mapping(self, data: Config) -> Any:
        is_data = data.tagged or (data.source.forgather and "type" in data)
        tag = f"!dict{f':@{data.name}' if data.name else ''}" if is_data else "tag:yaml.org,2002:map"
        return self.named(self._mapping(tag, data), data.name)

    def _mapping(self, tag: str, data: Mapping[Any, Any]) -> Any:
        return self.represent_mapping(tag, list(data.items()))  # PyYAML sorts what is not a list

    def sequence(self, data: ConfigList) -> Any:
        tag = f"!list{f':@{data.name}' if data.name else ''}" if data.tagged else "tag:yaml.org,2002:seq"
        return self.named(self.represent_sequence(tag, data), data.name)

    def call(self, data: Call) -> Any:
        tag = f"!{data.kind}:{data.title}{f'@{data.name}' if data.name else ''}"
        if not data.kwargs:
            node = self.represent_sequence(tag, data.args)
        elif not data.args and not data.kwargs.keys() <= {"args", "kwargs"}:
            node = self._mapping(tag, data.kwargs)
        else:
            sections = {"args": list(data.args), "kwargs": dict(data.kwargs)}
            node = self._mapping(tag, {key: value for key, value in sections.items() if value})
        return self.named(node, data.name or data.anchor)

    def text(self, data: str) -> Any:
        first, newline, _ = data.partition("\n")
        # PyYAML cannot read its own block that starts with a space.
        block = "|" if newline and first == first.strip(" \t") else None
        style = '"' if any(mark in data for mark in _ODD) or uses_line_syntax(data) else block
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def variable(self, data: Var) -> Any:
        if data.default is Missing:
            return self.represent_scalar("!var", data.name)
        return self._mapping("!var", {"name": data.name, "default": data.default})

    def other(self, data: Any) -> Any:
        return self.represent_data(plain_value(data))


_Writer.add_representer(Config, _Writer.mapping)
_Writer.add_representer(ConfigList, _Writer.sequence)
_Writer.add_representer(Call, _Writer.call)
_Writer.add_representer(Var, _Writer.variable)
_Writer.add_representer(ConfigTuple, lambda self, data: self.represent_sequence("!tuple", data))
_Writer.add_representer(dict, lambda self, data: self._mapping("tag:yaml.org,2002:map", data))
_Writer.add_representer(str, _Writer.text)
_Writer.add_representer(Secret, lambda self, data: self.represent_scalar("!secret", data.name))
_Writer.add_multi_representer(object, _Writer.other)
read_numbers_like_python(_Writer)


def to_yaml(config: Any) -> str:
    """YAML that `load_config` reads as the same config. Values that YAML cannot express become text."""
    text = yaml.dump(config, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)
    return literal(text.removesuffix("...\n"))


def plain_value(value: Any) -> Any:
    """A Python value as one that YAML can express."""
    kind: Any
    for kind in (bool, int, float, str, list):  # also subclasses, such as NumPy's float
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, PurePath):
        return str(value)
    if value is None or type(value) in yaml.SafeDumper.yaml_representers:
        return value
    return dotted_name(value) if callable(value) else str(value)
