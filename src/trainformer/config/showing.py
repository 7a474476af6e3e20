"""A config as text again: YAML that reads back as the same config, or JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from trainformer.config.nodes import Call, Config, ConfigList, dotted_name, free_name, is_shared, names_of_shared
from trainformer.config.templates import literal
from trainformer.config.yamlfile import read_numbers_like_python, yaml

_ODD = ("\x85", "\u2028", "\u2029")  # ends of lines that PyYAML loses unless they are escaped


class _Writer(yaml.SafeDumper):  # type: ignore[misc]
    """Writes our nodes as the tags that they are read from."""

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
        tag = f"!dict{f':@{data.name}' if data.name else ''}" if data.tagged else "tag:yaml.org,2002:map"
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
        # Where a block would begin with a blank, PyYAML writes what it cannot read.
        block = "|" if newline and first == first.strip(" \t") else None
        style = '"' if any(mark in data for mark in _ODD) else block
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def other(self, data: Any) -> Any:
        return self.represent_data(_plain(data))


_Writer.add_representer(Config, _Writer.mapping)
_Writer.add_representer(ConfigList, _Writer.sequence)
_Writer.add_representer(Call, _Writer.call)
_Writer.add_representer(dict, lambda self, data: self._mapping("tag:yaml.org,2002:map", data))
_Writer.add_representer(str, _Writer.text)
_Writer.add_multi_representer(object, _Writer.other)
read_numbers_like_python(_Writer)


def to_yaml(config: Any) -> str:
    """YAML that `load_config` reads as the same config. Values of Python that YAML does not know become text."""
    text = yaml.dump(config, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)
    return literal(text.removesuffix("...\n"))


def to_json(config: Any) -> str:
    """JSON for programs. A call is an object with the tag as its key; one that was shown before is a reference."""
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
    plain = _plain(value)
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else _scalar(plain)


def _scalar(value: Any) -> Any:
    if isinstance(value, list):
        return [_scalar(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _plain(value: Any) -> Any:
    """A value of Python as one that YAML has a word for."""
    kind: Any
    for kind in (bool, int, float, str, list):  # subclasses of them, such as NumPy's float
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
    return value if _is_known(value) else dotted_name(value) if callable(value) else str(value)


def _is_known(value: Any) -> bool:
    return value is None or type(value) in yaml.SafeDumper.yaml_representers
