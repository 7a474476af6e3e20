"""From a type hint to what can be typed for it on a command line, and from what was typed to a value.

Plain values are read and checked by jsonargparse. Whatever else a parameter takes (modules, callbacks, samplers, ...)
is written as in a config, `{type: package.Class, ...}` or with a tag, and is built by the rules of configs.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import re
import types
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin

from trainformer.core.errors import BadArgument, did_you_mean, expected

_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
NONE = ("None", "null", "~")
TRUE = ("true", "True", "yes", "on", "1")
FALSE = ("false", "False", "no", "off", "0")


@dataclass(frozen=True)
class Kind:
    """What may be typed. `hint` is that of the plain values, empty if there are none."""

    hint: Any
    words: str
    notation: Literal["", "calls", "any"] = ""  # which values in the notation of configs are taken

    @functools.cached_property
    def members(self) -> tuple[Any, ...]:
        """The plain types."""
        return _members(self.hint) if self.hint is not inspect.Parameter.empty else ()

    @property
    def is_switch(self) -> bool:
        """Whether the option alone means true, and with `no-` before it false."""
        return bool in self.members

    @property
    def is_mapping(self) -> bool:
        """Whether single keys can be given, as in `--model-kwargs.depth=2`."""
        return any(_origin(member) in _MAPPINGS for member in self.members)

    @property
    def takes_none(self) -> bool:
        """Whether it can be None."""
        return type(None) in self.members or self.notation == "any"


YAML = Kind(Any, "YAML")


def kind_of(hint: Any, default: Any = inspect.Parameter.empty) -> Kind:
    """What may be typed for a parameter with this hint and default."""
    if hint is inspect.Parameter.empty:
        hint = type(default) if type(default) in (bool, int, float, str) else Any
        if hint is Any and default is inspect.Parameter.empty:
            return YAML
    if hint is Any:
        if default is None or default is inspect.Parameter.empty or isinstance(default, str):
            # A name, nearly always; what looks like a number is the name of a folder.
            return Kind(str, f"str or object{' or None' if default is None else ''}", "any")
        return YAML
    members = _members(hint)
    if any(_origin(member) in _LISTS and Any in get_args(member) for member in members):  # lists of objects
        return Kind(inspect.Parameter.empty, "[object, ...]", "any")
    plain = sorted((member for member in members if _is_plain(member)), key=_rank)
    if str in plain:
        plain = [member for member in plain if not _is_path(member)]
    is_all = all(_is_plain(member) for member in members)
    nothing = type(None) in plain
    named = [_words(member) for member in plain if member is not type(None)]
    shown = " or ".join([*named, *([] if is_all else ["object"]), *(["None"] if nothing else [])])
    if is_all or named:
        return Kind(_union(plain), shown, "" if is_all else "calls")
    return Kind(inspect.Parameter.empty, shown, "any" if nothing else "calls")


def value_of(kind: Kind, text: str, option: str) -> Any:
    """What was typed, as a value: plain, or a part of a config."""
    if kind.takes_none and text in NONE:
        return None
    if kind.hint is Any:
        return _yaml(text, option)
    if kind.notation:
        found, written = _notation(kind, text, option)
        if found:
            return written
    if kind.members:
        for form in _forms(kind, text):
            found, value = _plain_value(kind, form)
            if found:
                return value
    raise BadArgument(expected(f"{option} to be {kind.words}", text, _hint(kind, text)))


def shorthand(text: str, package: str, known: collections.abc.Collection[str]) -> list[Any] | None:
    """Objects of a package of ours as they are written in Python: `EMA(decay=0.9)`, or several with commas.

    >>> shorthand("EarlyStopping, EMA(decay=0.9)", "trainformer.callbacks", ["EarlyStopping", "EMA"])
    [{'type': 'trainformer.callbacks.EarlyStopping'}, {'type': 'trainformer.callbacks.EMA', 'decay': 0.9}]

    None for text that is something else.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        sections = []
        for item in items:
            call = item if isinstance(item, ast.Call) else ast.Call(item, [], [])
            if not isinstance(call.func, ast.Name) or call.args:
                return None
            if call.func.id not in known:
                hint = did_you_mean(call.func.id, known) or f"There is {', '.join(known)}."
                raise BadArgument(expected(f"a name of {package}", call.func.id, hint))
            arguments = {str(word.arg): _literal(word.value) for word in call.keywords}
            sections.append({"type": f"{package}.{call.func.id}", **arguments})
    except (SyntaxError, ValueError) as error:
        if isinstance(error, BadArgument):
            raise
        return None
    return sections


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    return ast.literal_eval(node)


# -- hints -----------------------------------------------------------------------------------------------------------


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in get_args(hint) for member in _members(part))
    return (hint,)


def _is_path(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, PurePath)


def _is_plain(hint: Any) -> bool:
    if hint in (bool, int, float, str, type(None)) or _is_path(hint) or get_origin(hint) is Literal:
        return True
    if _origin(hint) in (*_LISTS, *_MAPPINGS):
        inside = [part for part in get_args(hint) if part is not Ellipsis]
        return all(part is Any or any(map(_is_plain, _members(part))) for part in inside)
    return False


def _rank(hint: Any) -> int:
    """In which order types are tried: text is everything, and a whole number is a number."""
    order = [bool, int, float, Literal, *_LISTS, *_MAPPINGS, type(None)]
    return order.index(_origin(hint)) if _origin(hint) in order else len(order)


def _union(members: collections.abc.Sequence[Any]) -> Any:
    return Union[tuple(map(_reduced, members))]  # noqa: UP007


def _reduced(hint: Any) -> Any:
    """Without the objects that a list may hold beside plain values."""
    inside = get_args(hint)
    if get_origin(hint) is Literal or not inside:
        return hint
    kept = tuple(
        part if part in (Any, Ellipsis) else _union([inner for inner in _members(part) if _is_plain(inner)])
        for part in inside
    )
    return _origin(hint)[kept if len(kept) > 1 else kept[0]]


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if _origin(hint) in _MAPPINGS:
        return "{name: value, ...}"
    if _origin(hint) in _LISTS:
        inside = [part for part in get_args(hint) if part is not Ellipsis]
        words = [" or ".join(_words(inner) for inner in _members(part) if _is_plain(inner)) for part in inside]
        fixed = _origin(hint) is tuple and Ellipsis not in get_args(hint)
        return f"[{', '.join(words)}{'' if fixed else ', ...'}]"
    if hint is type(None):
        return "None"
    return "str" if _is_path(hint) else getattr(hint, "__name__", str(hint))


# -- values ----------------------------------------------------------------------------------------------------------


def _forms(kind: Kind, text: str) -> list[str]:
    """The text as it may be meant: a list needs no brackets where nothing else could be meant."""
    forms = [text]
    if kind.is_switch and text in (*TRUE, *FALSE) and int not in kind.members:
        forms = ["true" if text in TRUE else "false"]
    is_list = any(_origin(member) in _LISTS for member in kind.members)
    return [*forms, f"[{text}]"] if is_list and str not in kind.members else forms


def _plain_value(kind: Kind, text: str) -> tuple[bool, Any]:
    import jsonargparse as library

    try:
        return True, _reader(kind.hint).parse_args([f"--value={text}"], defaults=False).value
    except library.ArgumentError:
        return False, None


@functools.cache
def _reader(hint: Any) -> Any:
    import jsonargparse as library

    parser = library.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--value", type=hint)
    return parser


def _yaml(text: str, option: str) -> Any:
    """The text as it would be read in a config."""
    from trainformer.config.nodes import Place, Source
    from trainformer.config.yamlfile import parse_yaml

    return parse_yaml(text, Source(), {}, Place(option))


def _notation(kind: Kind, text: str, option: str) -> tuple[bool, Any]:
    """Whether the text is in the notation of configs, and what it says."""
    from trainformer.config.nodes import holds_calls

    if not text.lstrip().startswith(("{", "[", "!")):
        return False, None
    try:
        written = _yaml(text, option)
    except BadArgument:
        if str in kind.members and not re.match(r"\s*(!|\{\s*type\b)", text):
            return False, None
        raise
    return kind.notation == "any" or holds_calls(written), written


def _hint(kind: Kind, text: str) -> str:
    choices = [str(choice) for member in kind.members if get_origin(member) is Literal for choice in get_args(member)]
    close = did_you_mean(text, choices)
    if close or not kind.notation:
        return close
    return "An object is written as in a config: '{type: package.module.Class, argument: value}'."
