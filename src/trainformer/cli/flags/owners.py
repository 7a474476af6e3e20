"""The options of what was chosen: the parameters of a task, of an adapter and of the trainer, with types and defaults.

Here the classes are imported; what is said about their parameters comes from `source`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainformer.cli.flags import catalogue, source
from trainformer.cli.flags.hints import Kind, kind_of
from trainformer.core.errors import BadArgument, did_you_mean, expected

MISSING = inspect.Parameter.empty
_MODELS = ("model", "model_name", "backbone")  # what tasks of ours call it
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Flag:
    """One option. `shown` is its default in words."""

    owner: str
    name: str
    kind: Kind
    default: Any = MISSING
    shown: str = ""
    about: str = ""
    section: str = ""

    @property
    def option(self) -> str:
        """As it is typed."""
        return spelled(self.name)

    @property
    def full_option(self) -> str:
        """As it can always be typed."""
        return spelled(f"{self.owner}.{self.name}")


def spelled(name: str) -> str:
    """A parameter as an option.

    >>> spelled("batch_size")
    '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Owner:
    """The task, the adapter or the trainer: what is called with the options, and how a config names it."""

    role: str
    name: str
    target: str
    call: Callable[..., Any]
    leaves_out: tuple[str, ...] = ()

    @cached_property
    def flags(self) -> dict[str, Flag]:
        """Its options by name."""
        told = _told(self.call)
        values, _ = catalogue.paper_options(self.name)
        flags = {}
        for name, (hint, default) in _parameters(self.call, self.name).items():
            if name in self.leaves_out:
                continue
            known = told.get(name, source.Field(name))
            shown = default if values.get(name) is None else values[name]
            flags[name] = Flag(
                self.role, name, kind_of(hint, default), default, default_in_words(shown), known.about, known.section
            )
        return flags

    @property
    def takes_adapter(self) -> bool:
        """Whether an adapter can be put on its model."""
        return "adapter" in _parameters(self.call, self.name)

    @cached_property
    def model(self) -> str | None:
        """The parameter that `--model` stands for: the first one that takes a name, whatever it is called."""
        named = [name for name in _MODELS if name in self.flags]
        return next(iter(named or [name for name, flag in self.flags.items() if str in flag.kind.members]), None)


def default_in_words(value: Any) -> str:
    """A default as it would be typed."""
    if value is MISSING:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return repr(value) if value == "" else str(value)


def find_owner(role: str, name: str, leaves_out: tuple[str, ...] = ()) -> Owner:
    """A task or adapter by its name: one of ours, or `module:Class` of the user's own."""
    kind = f"{role}s"
    if ":" in name:
        return Owner(role, name, name, _imported(name, role), leaves_out)
    entry = catalogue.find(kind, name)
    if entry is None:
        known = [entry.name for entry in catalogue.entries(kind)]
        hint = did_you_mean(name, known) or f"There is {', '.join(known)}."
        raise BadArgument(expected(f"--{role} to name one", name, f"{hint} One of your own is --{role}=module:Class."))
    return Owner(role, name, entry.target, _imported(entry.target, role), leaves_out)


def trainer_owner() -> Owner:
    """The trainer, less what is chosen by options of its own."""
    return Owner("trainer", "Trainer", "trainformer:Trainer", _imported("trainformer:Trainer", "trainer"), ("task",))


def _imported(target: str, role: str) -> Callable[..., Any]:
    """What a target names. A user's own module is imported from the current folder, because the user asked for it."""
    module, _, path = target.partition(":")
    if not all(word.isidentifier() for word in [*module.split("."), *path.split(".")]):
        do = "Without .py, and with dots between folders and files."
        raise BadArgument(expected(f"--{role} to name one of your own as module:Class", target, do))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        thing: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise BadArgument(
            expected(f"--{role} to name a module that is there", module, "Is it in this folder?")
        ) from None
    for word in path.split("."):
        if not hasattr(thing, word):
            close = did_you_mean(word, [name for name in dir(thing) if not name.startswith("_")])
            raise BadArgument(expected(f"--{role}={target} to name something in {module}", word, close))
        thing = getattr(thing, word)
    if not callable(thing):
        raise BadArgument(expected(f"--{role} to name a class or function", target))
    return thing


# -- parameters ------------------------------------------------------------------------------------------------------


def _parameters(call: Callable[..., Any], name: str) -> dict[str, tuple[Any, Any]]:
    """What can be passed by name: hint and default of each."""
    owner = call.__self__ if inspect.ismethod(call) else None
    if not isinstance(owner, type):
        return _of_class(call) if isinstance(call, type) else _of_function(call)
    own = _of_function(call)
    if inspect.Parameter.VAR_KEYWORD not in {given.kind for given in inspect.signature(call).parameters.values()}:
        return own
    # What it hands on to the class; what the class must have and it does not take is what it chooses itself.
    _, others = catalogue.paper_options(name)
    rest = {key: known for key, known in _of_class(owner).items() if known[1] is not MISSING and key not in others}
    return {**own, **rest, **own}


def _of_class(kind: type) -> dict[str, tuple[Any, Any]]:
    maker = next(base for base in kind.__mro__ if "__init__" in vars(base))  # a subclass may have its own
    if "__dataclass_params__" not in vars(maker):
        return _of_function(kind.__init__, 1)  # type: ignore[misc]
    found = {}
    for field in dataclasses.fields(maker):
        if field.init:
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            found[field.name] = _hint(kind, field.name), MISSING if default is dataclasses.MISSING else default
    return found


def _of_function(function: Callable[..., Any], skip: int = 0) -> dict[str, tuple[Any, Any]]:
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    home = vars(sys.modules[function.__module__]) if function.__module__ in sys.modules else {}
    return {
        known.name: (_evaluated(known.annotation, home), known.default) for known in parameters if known.kind in _NAMED
    }


def _hint(kind: type, name: str) -> Any:
    """The annotation of a field, read where it is written: bases may use names that only type checkers know."""
    for base in kind.__mro__:
        annotations = inspect.get_annotations(base)
        if name in annotations:
            return _evaluated(annotations[name], vars(sys.modules[base.__module__]))
    return MISSING


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(names))  # source of a class that was imported
    except Exception:
        return MISSING


def _told(call: Callable[..., Any]) -> dict[str, source.Field]:
    """What the source says of the parameters, where there is a source."""
    kind = getattr(call, "__self__", call) if inspect.ismethod(call) else call
    try:
        file = inspect.getsourcefile(kind)  # type: ignore[arg-type]
        told = source.read_file(Path(file), kind.__name__) if file and isinstance(kind, type) else None
    except (OSError, TypeError, SyntaxError):
        told = None
    return told.fields if told else {}


def all_flags(owners: Iterable[Owner]) -> list[Flag]:
    """Those of several, in order."""
    return [flag for owner in owners for flag in owner.flags.values()]
