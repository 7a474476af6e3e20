"""The nodes of a config: mappings and lists that remember where they were written, and calls that are not made yet.

A tag (`!singleton:module:Class`) and a dictionary with the key `type` are both a `Call`. Nothing here reads a file,
imports what a call names, or makes the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.secrets import find_mask, is_secret_name, mask, name_of, remember, variable_name

Kind = Literal["singleton", "factory", "partial", "lambda", "meta"]


@dataclass(frozen=True)
class Place:
    """A position in a file, for errors.

    >>> str(Place("run.yaml", 3)), str(Place("run.yaml", 3, preprocessed=True)), str(Place("run.toml"))
    ('run.yaml:3', 'run.yaml, line 3 after preprocessing', 'run.toml')
    """

    file: str
    line: int | None = None
    preprocessed: bool = False  # templates changed the text: the line is not one of the file

    def __str__(self) -> str:
        if self.line is None:
            return self.file
        return f"{self.file}, line {self.line} after preprocessing" if self.preprocessed else f"{self.file}:{self.line}"


def at(place: Place | None) -> str:
    """The place in brackets, to end a phrase with; empty if it is unknown."""
    return f" ({place})" if place else ""


@dataclass
class Source:
    """What all nodes of one config share."""

    root: Config | None = None
    file: str | None = None
    trust: tuple[str, ...] = ()
    pp_config: str | None = None
    forgather: bool = False  # in Forgather's syntax


class Config(dict[Any, Any]):
    """A mapping in a config; nested mappings are of this class too.

    >>> config = Config({"model": {"width": 8}})
    >>> config["model"].root is config
    True
    """

    # Defaults in the class: pickle fills a dictionary before it restores the attributes.
    _source: Source | None = None
    _places: Mapping[Any, Place] = {}
    place: Place | None = None
    name: str | None = None
    tagged = False  # written as !dict: one shared object, in which `type` is a plain key

    def __init__(
        self,
        values: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        /,
        *,
        source: Source | None = None,
        place: Place | None = None,
        places: Mapping[Any, Place] | None = None,
    ) -> None:
        super().__init__()
        self._source = source or Source(root=self)
        self._places = dict(places or {})
        self.place = place
        self.update(values)

    @property
    def source(self) -> Source:
        return self._source or Source(root=self)

    @property
    def root(self) -> Config:
        """The whole config."""
        root = self.source.root
        return self if root is None else root

    @property
    def file(self) -> str | None:
        """The file that it was read from."""
        return self.source.file

    @property
    def pp_config(self) -> str | None:
        """The text of a YAML file after templates."""
        return self.source.pp_config

    def where(self, path: str) -> Place | None:
        """The file, and in YAML the line, of the value at a dotted path."""
        holder, step = resolve_path(self, path)
        return place_in(holder, step)

    def copy(self) -> Config:
        """A shallow copy."""
        twin = Config(self, source=self._source, place=self.place, places=self._places)
        twin.name, twin.tagged = self.name, self.tagged
        return twin

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, adopt(value, self.source, self.place))

    def update(self, values: Any = (), /, **named: Any) -> None:
        for key, value in {**dict(values), **named}.items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, values: Any) -> Config:  # type: ignore[override,misc]
        self.update(values)
        return self


class ConfigList(list[Any]):
    """A list in a config, which remembers where its items were written."""

    _places: tuple[Place, ...] = ()
    place: Place | None = None
    name: str | None = None
    tagged = False  # written as !list: one shared object

    def __init__(
        self, values: Iterable[Any] = (), /, *, place: Place | None = None, places: Iterable[Place] = ()
    ) -> None:
        super().__init__(values)
        self.place = place
        self._places = tuple(places)


class ConfigTuple(tuple[Any, ...]):
    """A tuple in a config, written as !tuple.

    >>> ConfigTuple([1, 2])
    (1, 2)
    """

    name: str | None = None
    place: Place | None = None


@dataclass
class Call:
    """A call to make: once for all references (singleton), once per reference (factory), or later by others (partial).

    A lambda is a partial whose arguments are built again in every call. A meta is a singleton that gets its arguments
    as nodes. Calls are equal if they do the same, wherever they are written.
    """

    kind: Kind
    target: Any  # a registered name, "package.module.Class", "package.module:Class"; in Python also the object itself
    args: ConfigList = field(default_factory=ConfigList)
    kwargs: Config = field(default_factory=Config)
    name: str | None = None
    place: Place | None = field(default=None, compare=False)
    anchor: str | None = field(default=None, compare=False)  # its YAML anchor

    @property
    def title(self) -> str:
        """The target as text."""
        return self.target if isinstance(self.target, str) else dotted_name(self.target)


class Missing:
    """Stands for a value that is not there."""


@dataclass(frozen=True)
class Var:
    """`!var name` in Forgather's syntax: a variable that gets its value when something is built.

    >>> Var("width", default=8) == Var("width", 8)
    True
    """

    name: str
    default: Any = Missing
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Secret:
    """`!secret name` in a config that is written: what is read gets its value from a variable."""

    name: str

    @property
    def how_to_pass(self) -> str:
        """
        >>> Secret("token").how_to_pass
        'Pass --var token=..., or set the environment variable TRAINFORMER_VAR_TOKEN.'
        """
        return f"Pass --var {self.name}=..., or set the environment variable {variable_name(self.name)}."


def dotted_name(thing: Any) -> str:
    """Module and qualified name of a class or function, or of an object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def as_call(value: Any) -> Call | None:
    """The call that a value describes, if any: a tag, or a dictionary whose `type` names what to call."""
    if isinstance(value, Call):
        return value
    if not isinstance(value, Mapping) or getattr(value, "tagged", False):
        return None
    if isinstance(value, Config) and value.source.forgather:  # there only tags are calls
        return None
    target = value.get("type")
    if not isinstance(target, str) and not callable(target):
        return None
    rest = {key: item for key, item in value.items() if key != "type"}
    if isinstance(value, Config):
        kwargs = Config(rest, source=value.source, place=value.place, places=value._places)
    else:
        kwargs = Config(rest, source=Source())
    return Call("factory", target, kwargs=kwargs, place=getattr(value, "place", None))


def is_shared(value: Any) -> bool:
    """Whether all references to the value get the same object."""
    if isinstance(value, Call):
        return value.kind in ("singleton", "meta")
    return isinstance(value, Config | ConfigList) and value.tagged


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """The children of a value, each with its key or index."""
    if isinstance(value, Call):
        yield from enumerate(value.args)
        yield from value.kwargs.items()
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, Var) and value.default is not Missing:
        yield "default", value.default


def everything_in(value: Any, _seen: set[int] | None = None) -> Iterator[Any]:
    """The value and all its descendants. A shared one comes once per reference, its children only once."""
    seen = set() if _seen is None else _seen
    yield value
    if is_shared(value):
        if id(value) in seen:
            return
        seen.add(id(value))
    for _, part in parts(value):
        yield from everything_in(part, seen)


def check_secrets(value: Any, path: str = "", _done: set[int] | None = None) -> None:
    """Remember the secrets in a config, and refuse what stands in place of one."""
    done = set() if _done is None else _done
    if isinstance(value, str):
        if find_mask(value) is not None:
            do = f"Files do not contain secrets: write !secret {path.rpartition('.')[2]}, or pass --set {path}=..."
            raise BadArgument(expected(f"a value for {path}", value, do))
        if is_secret_name(path) and mask(value, path) != value and name_of(value) is None:
            remember(value, path.rpartition(".")[2])
    elif isinstance(value, Call | Mapping | list | tuple | Var) and id(value) not in done:
        done.add(id(value))
        for step, part in parts(value):
            check_secrets(part, f"{path}.{step}".lstrip("."), done)


def hide_secrets(value: Any) -> Any:
    """A copy of a config in which secrets are replaced by `Secret`."""
    copies: dict[int, Any] = {}
    names: dict[str, Any] = {}

    def hidden(value: Any, path: str) -> Any:
        if not isinstance(value, Call | Mapping | list | tuple | Var):
            plain = value if isinstance(value, str | int) else str(value)
            return _as_secret(value, path, names) if mask(plain, path) != plain else value
        if id(value) not in copies:
            items = {step: hidden(part, f"{path}.{step}".lstrip(".")) for step, part in parts(value)}
            copies[id(value)] = _with_parts(value, items)
        return copies[id(value)]

    return hidden(value, "")


def _as_secret(value: Any, path: str, names: dict[str, Any]) -> Secret:
    steps = [step for step in path.split(".") if not step.isdigit()] or ["value"]
    name = name_of(value) or steps[-1] if isinstance(value, str) else steps[-1]
    if names.setdefault(name, value) != value:  # another secret has this name
        name = free_name(".".join(steps), names)
        names[name] = value
    return Secret(name)


def _with_parts(value: Any, items: Mapping[Any, Any]) -> Any:
    """A copy of a node with other children."""
    if isinstance(value, Call):
        args = _with_parts(value.args, {step: items[step] for step in range(len(value.args))})
        kwargs = _with_parts(value.kwargs, {step: items[step] for step in value.kwargs})
        return replace(value, args=args, kwargs=kwargs)
    if isinstance(value, Var):
        return replace(value, **items)
    if isinstance(value, ConfigTuple):
        return ConfigTuple(items.values())
    if isinstance(value, Mapping):
        if not isinstance(value, Config):
            return dict(items)
        twin = Config(items, source=value.source, place=value.place, places=value._places)
        twin.name, twin.tagged = value.name, value.tagged
        return twin
    if isinstance(value, ConfigList):
        copied = ConfigList(items.values(), place=value.place, places=value._places)
        copied.name, copied.tagged = value.name, value.tagged
        return copied
    return list(items.values()) if isinstance(value, list) else tuple(items.values())


def holds_calls(value: Any) -> bool:
    """Whether anything in it has to be built."""
    return any(as_call(found) is not None for found in everything_in(value))


def names_of_shared(config: Any) -> dict[int, str]:
    """Names, by id, of shared values at the top level or with several references.

    The name is the top-level key, the name in the tag, the anchor, or the class.
    """
    at_top = {id(part): str(step) for step, part in parts(config)}
    found = [value for value in everything_in(config) if is_shared(value) and value is not config]
    often = Counter(map(id, found))
    names: dict[int, str] = {}
    for value in found:
        if id(value) not in names and (often[id(value)] > 1 or id(value) in at_top):
            wanted = at_top.get(id(value)) or value.name or getattr(value, "anchor", None) or _short(value)
            names[id(value)] = free_name(wanted, {*names.values()})
    return names


def free_name(wanted: str, taken: Container[str]) -> str:
    """The name, with a number appended if it is taken.

    >>> free_name("net", {"net", "net_2"})
    'net_3'
    """
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def _short(value: Any) -> str:
    if isinstance(value, Call):
        return value.title.replace(":", ".").split(".")[-1]
    return "items" if isinstance(value, list) else "values"


def adopt(value: Any, source: Source, place: Place | None = None, _above: frozenset[int] = frozenset()) -> Any:
    """Plain mappings and lists as nodes of a config; anything else unchanged."""
    if isinstance(value, Config | ConfigList | Call) or not isinstance(value, Mapping | list | tuple):
        return value
    if id(value) in _above:
        raise BadArgument(f"Expected a config without cycles, received one that contains itself{at(place)}.")
    above = _above | {id(value)}
    if isinstance(value, Mapping):
        adopted = {key: adopt(item, source, place, above) for key, item in value.items()}
        return Config(adopted, source=source, place=place)
    items = (adopt(item, source, place, above) for item in value)
    if isinstance(value, list):
        return ConfigList(items, place=place)
    return tuple(items) if type(value) is tuple else value


def place_in(holder: Any, step: Any) -> Place | None:
    """Where a child of a mapping, list or call is written; the parent's place if that is unknown."""
    if isinstance(holder, Call):
        inner = place_in(holder.args if isinstance(step, int) else holder.kwargs, step)
        return inner or holder.place
    if isinstance(holder, Config):
        return holder._places.get(step, holder.place)
    if isinstance(holder, ConfigList):
        return holder._places[step] if step < len(holder._places) else holder.place
    return None


def place_at(holder: Config | ConfigList, step: Any, place: Place) -> None:
    """Remember where a child is written."""
    if isinstance(holder, Config):
        holder._places = {**holder._places, step: place}
    else:
        known = [place_in(holder, index) or place for index in range(len(holder))]
        known[step] = place
        holder._places = tuple(known)


def find_step(holder: Any, word: str) -> Any:
    """The key or index that a word of a dotted path names; `None` if there is none."""
    steps = {str(step): step for step, _ in parts(holder)}
    return steps.get(word)


def resolve_path(config: Config, path: str) -> tuple[Any, Any]:
    """The parent of the value at a dotted path, and its key or index there."""
    holder: Any = None
    step: Any = None
    value: Any = config
    for word in path.split("."):
        holder, step = value, find_step(value, word)
        if step is None:
            raise BadArgument(unknown_part(holder, word, path))
        value = dict(parts(holder))[step]
    return holder, step


def unknown_part(holder: Any, word: str, path: str) -> str:
    """The error message for a path that does not exist."""
    known = [str(step) for step, _ in parts(holder)]
    if not known:
        return expected(f"{path!r} to lead to a value of the config", word, "Its parent has no parts.")
    some = f"There is {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}."
    return expected(f"{path!r} to lead to a value of the config", word, did_you_mean(word, known) or some)
