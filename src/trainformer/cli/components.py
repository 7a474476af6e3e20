"""The task, the adapter and the trainer as the command line sees them: their parameters, with types for jsonargparse.

jsonargparse's own `add_class_arguments` cannot read these classes: it evaluates no field of a class with annotations
for type checkers only, sees no parameter behind a `__new__(*args, **kwargs)`, and imports any class path in a value. So
the parameters are read here. Where one takes an object, its type is `ConfigObject`: a value in the notation of configs,
which is built later by the rules of configs.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin

from trainformer.cli import catalogue
from trainformer.config.building import signature_of
from trainformer.core.errors import BadArgument, did_you_mean, expected

REQUIRED = inspect.Parameter.empty
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SCALARS = (bool, int, float)
_MODEL_NAMES = ("model", "model_name", "backbone")  # parameters that --model stands for


@dataclass(frozen=True)
class ConfigObject:
    """A value with objects in the notation of configs: `{type: package.Class, ...}`, or with a tag."""

    value: Any


class ConfigValue:
    """The type of any list, mapping or object in the notation of configs, and of None."""


@dataclass(frozen=True, eq=False)
class Option:
    """A parameter of a component. `shown` is its default as it would be typed."""

    role: str  # task, adapter or trainer
    name: str
    type: Any
    default: Any = REQUIRED
    shown: str = ""
    about: str = ""
    section: str = ""

    @property
    def key(self) -> str:
        """Its unique name: `trainer.batch_size`."""
        return f"{self.role}.{self.name}"

    @cached_property
    def members(self) -> tuple[Any, ...]:
        """The types that a value may have."""
        return _members(self.type)

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED

    @property
    def is_switch(self) -> bool:
        """Whether `--name` means true and `--no-name` false."""
        return bool in self.members

    @property
    def is_mapping(self) -> bool:
        """Whether single keys can be set: `--model-kwargs.depth=2`."""
        return any(_origin(member) in _MAPPINGS for member in self.members)

    @property
    def is_bare_list(self) -> bool:
        """Whether a list needs no brackets: a text can be nothing else."""
        return any(_origin(member) in _LISTS for member in self.members) and str not in self.members

    @property
    def is_scalar(self) -> bool:
        """Whether a value may be a number or a boolean."""
        return any(scalar in self.members for scalar in _SCALARS)

    @property
    def type_text(self) -> str:
        """The type for help and errors."""
        return _type_text(self.type)

    @property
    def choices(self) -> list[str]:
        """The values of a `Literal`."""
        return [str(value) for member in self.members if get_origin(member) is Literal for value in get_args(member)]


@dataclass(frozen=True)
class Component:
    """What is called with the options of a role, and how a config names it."""

    role: str
    name: str
    target: str
    call: Callable[..., Any]

    @cached_property
    def parameters(self) -> dict[str, tuple[Any, Any]]:
        """Type hint and default of each parameter."""
        _, of_other_methods = catalogue.paper_options(self.name)
        return {name: known for name, known in _parameters(self.call).items() if name not in of_other_methods}

    @cached_property
    def options(self) -> dict[str, Option]:
        """Its options by name; `--task` and `--adapter` are options of the command."""
        described = catalogue.fields_of_class(self.call)
        paper, _ = catalogue.paper_options(self.name)
        options = {}
        for name, (hint, default) in self.parameters.items():
            if name not in ("task", "adapter"):
                field = described.get(name, catalogue.Field(name))
                shown = default_text(default if paper.get(name) is None else paper[name])
                kind = option_type(hint, default)
                options[name] = Option(self.role, name, kind, default, shown, field.about, field.section)
        return options

    @cached_property
    def model(self) -> str | None:
        """The parameter that `--model` stands for: the first one that takes a name, whatever it is called."""
        named = [name for name in _MODEL_NAMES if name in self.options]
        return next(iter(named or [name for name, option in self.options.items() if str in option.members]), None)


def find_components(task_name: str, adapter_name: str | None) -> list[Component]:
    """The task, the adapter if there is one, and the trainer."""
    task = find_component("task", task_name)
    trainer = Component("trainer", "Trainer", "trainformer:Trainer", _imported("trainformer:Trainer", "trainer"))
    if adapter_name in (None, "None", "null", "~"):
        return [task, trainer]
    if "adapter" not in task.parameters:
        able = [entry.name for entry in catalogue.entries("tasks") if "adapter" in catalogue.fields_of(entry)]
        raise BadArgument(f"{task_name} takes no adapter. Tasks that do: {', '.join(able)}.")
    return [task, find_component("adapter", str(adapter_name)), trainer]


def find_component(role: str, name: str) -> Component:
    """A task or adapter by its name: a built-in one, one of an installed plugin, or `module:Class`."""
    if ":" in name:
        return Component(role, name, name, _imported(name, role))
    entry = catalogue.find(f"{role}s", name)
    if entry is None:
        known = [entry.name for entry in catalogue.entries(f"{role}s")]
        hint = did_you_mean(name, known) or f"There is {', '.join(known)}."
        raise BadArgument(expected(f"--{role} to be a known name", name, f"{hint} Your own is --{role}=module:Class."))
    if role == "task":
        from trainformer.tasks import find_task

        return Component(role, name, entry.target, find_task(name))
    return Component(role, name, entry.target, _imported(entry.target, role))


def _imported(target: str, role: str) -> Callable[..., Any]:
    """What a target names. The user's own modules are imported from the current folder, because the user named them."""
    module, _, path = target.partition(":")
    if not all(word.isidentifier() for word in [*module.split("."), *path.split(".")]):
        do = "Without .py, and with dots between folders and files."
        raise BadArgument(expected(f"--{role} to name your own class as module:Class", target, do))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        thing: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise BadArgument(expected(f"--{role} to name a module that exists", module, "Is it in this folder?")) from None
    for word in path.split("."):
        if not hasattr(thing, word):
            close = did_you_mean(word, [name for name in dir(thing) if not name.startswith("_")])
            raise BadArgument(expected(f"--{role}={target} to name something in {module}", word, close))
        thing = getattr(thing, word)
    if not callable(thing):
        raise BadArgument(expected(f"--{role} to name a class or function", target))
    return thing


def default_text(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return repr(value) if value == "" else str(value)


# -- parameters ------------------------------------------------------------------------------------------------------


def _parameters(call: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Type hint and default of each parameter that can be passed by name.

    A class method that passes keywords on takes those of its class too, except for the required ones: it chooses these
    itself.
    """
    found = signature_of(call) or {}
    own = {
        name: (_evaluated(call, name, parameter.annotation), _default(call, name, parameter.default))
        for name, parameter in found.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found.values())
    if not (inspect.ismethod(call) and isinstance(call.__self__, type) and passes_on):
        return own
    of_class = {name: known for name, known in _parameters(call.__self__).items() if known[1] is not REQUIRED}
    return {**own, **of_class, **own}


def _default(call: Any, name: str, default: Any) -> Any:
    """The default; where a dataclass has a `default_factory`, what that returns."""
    is_factory = repr(default) == "<factory>"  # how dataclasses mark it in the signature
    return call.__dataclass_fields__[name].default_factory() if is_factory else default


def _evaluated(call: Any, name: str, annotation: Any) -> Any:
    """An annotation, evaluated in the module it is written in; `REQUIRED` if only type checkers can."""
    if not isinstance(annotation, str):
        return annotation
    home = next((base for base in getattr(call, "__mro__", ()) if name in inspect.get_annotations(base)), None)
    home = home or (call.__init__ if isinstance(call, type) else call)  # type: ignore[misc]
    try:
        return eval(annotation, dict(vars(sys.modules[home.__module__])))  # source of a class that was imported
    except Exception:
        return REQUIRED


# -- types -----------------------------------------------------------------------------------------------------------


def option_type(hint: Any, default: Any = REQUIRED) -> Any:
    """The type of the option for a parameter with this hint and default."""
    if hint is REQUIRED:
        if default is REQUIRED:
            return Any
        hint = type(default) if type(default) in (*_SCALARS, str) else Any
    if hint is not Any:
        return _reduced(hint)
    # A name, nearly always; what looks like a number is the name of a folder.
    is_name = default is REQUIRED or default is None or isinstance(default, str)
    optional = (None,) if default is None else ()
    return Union[(ConfigValue, *optional, str)] if is_name else Any  # type: ignore[return-value]


def _reduced(hint: Any) -> Any:
    """The hint with `ConfigObject` in place of each type whose values cannot be typed in."""
    members = _members(hint)
    if len(members) > 1:
        reduced = sorted(dict.fromkeys(map(_reduced, members)), key=_rank)
        kept = tuple(member for member in reduced if not (_is_path(member) and str in reduced))
        return Union[kept]  # noqa: UP007
    if not _is_plain(hint):
        return ConfigValue if _origin(hint) in _LISTS and Any in get_args(hint) else ConfigObject
    if get_origin(hint) in (None, Literal):
        return hint
    parts = tuple(part if part in (Any, Ellipsis) else _reduced(part) for part in get_args(hint))
    return _origin(hint)[parts if len(parts) > 1 else parts[0]]


def _is_plain(hint: Any) -> bool:
    if hint in (*_SCALARS, str, type(None)) or _is_path(hint) or get_origin(hint) is Literal:
        return True
    is_mapping = _origin(hint) in _MAPPINGS
    inside = [part for part in get_args(hint) if part is not Ellipsis]
    return (is_mapping or _origin(hint) in _LISTS) and all(
        is_mapping if part is Any else any(map(_is_plain, _members(part))) for part in inside
    )


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in get_args(hint) for member in _members(part))
    return (hint,)


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _is_path(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, PurePath)


def _rank(hint: Any) -> int:
    """The order in which types are tried: any text is a str, and a whole number is also a float."""
    order = [ConfigObject, ConfigValue, bool, int, float, Literal, *_LISTS, *_MAPPINGS, type(None)]
    return order.index(_origin(hint)) if _origin(hint) in order else len(order)


def _type_text(hint: Any) -> str:
    members = _members(hint)
    if len(members) > 1:
        last = (ConfigObject, ConfigValue, type(None))
        ordered = [*(member for member in members if member not in last), *(kind for kind in last if kind in members)]
        return " or ".join(map(_type_text, ordered))
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if _origin(hint) in _MAPPINGS:
        return "{name: value, ...}"
    if _origin(hint) in _LISTS:
        inside = ", ".join(_type_text(part) for part in get_args(hint) if part is not Ellipsis)
        is_fixed = _origin(hint) is tuple and Ellipsis not in get_args(hint)
        return f"[{inside}{'' if is_fixed else ', ...'}]"
    names = {ConfigObject: "object", ConfigValue: "object", type(None): "None", Any: "YAML"}
    return names.get(hint) or ("str" if _is_path(hint) else str(getattr(hint, "__name__", hint)))
