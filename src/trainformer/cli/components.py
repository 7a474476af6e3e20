"""The task, the adapter and the trainer as the command line sees them: their parameters, with types for jsonargparse.

The parameters are read here because jsonargparse's own `add_class_arguments` cannot read these classes; docs/design.md
says why. Where one takes an object, its type is `ConfigObject`: a value in the notation of configs, which is built
later by the rules of configs.
"""

from __future__ import annotations

import collections.abc
import functools
import importlib
import inspect
import operator
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin

from trainformer.config.building import signature_of
from trainformer.config.trust import import_named
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.plugins import load_plugin, plugin_names

CLASSES = ("tasks", "adapters", "callbacks", "loggers")
KINDS = (*CLASSES, "optimizers", "schedulers")
REQUIRED = inspect.Parameter.empty
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SCALARS = (bool, int, float)
_MODEL_NAMES = ("model", "model_name", "backbone")  # parameters that --model stands for
_LONGEST = 240  # characters of help for one parameter
_SENTENCE_END = re.compile(r"(?<=[.;])\s+(?=[`A-Z])")


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
    def takes_keys(self) -> bool:
        """Whether single keys can be set: in mappings, and in the parts of a mixture (`--data.weights.code=0.3`)."""
        return self.is_mapping or self.key in ("trainer.data", "trainer.val_data")

    def with_brackets(self, text: str) -> str:
        """The text of a list with its brackets, which may be left out where it can be nothing else."""
        is_list = any(_origin(member) in _LISTS for member in self.members) and str not in self.members
        is_number = any(scalar in self.members for scalar in _SCALARS) and "," not in text
        is_complete = text[:1] in ("[", "{", "!") or text in ("None", "null", *self.choices)
        return f"[{text}]" if is_list and not is_number and not is_complete else text

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
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What can be passed by name; for a self-supervised method without the options of others."""
        of_other_methods = _paper_options(self.name)[1]
        return {name: known for name, known in _parameters(self.call).items() if name not in of_other_methods}

    @cached_property
    def options(self) -> dict[str, Option]:
        """Its options by name; `--task` and `--adapter` are options of the command."""
        options = {}
        for name, known in self.parameters.items():
            if name not in ("task", "adapter"):
                kind = option_type(_evaluated(self.call, name, known.annotation), known.default)
                section, about = self._help.get(name, ("", ""))
                shown = default_text(self._usual(known))
                options[name] = Option(self.role, name, kind, known.default, shown, about, section)
        return options

    def _usual(self, parameter: inspect.Parameter) -> Any:
        """The default; for a self-supervised method that of its paper."""
        paper = _paper_options(self.name)[0].get(parameter.name)
        return parameter.default if paper is None else paper

    @cached_property
    def _help(self) -> dict[str, tuple[str, str]]:
        return _help(self.call)

    @property
    def fields(self) -> list[dict[str, str | None]]:
        """Its parameters as they would be written in Python, with their meaning."""
        fields = []
        for name, known in self.parameters.items():
            hint, default = known.annotation, None if known.default is REQUIRED else repr(self._usual(known))
            written = "" if hint is REQUIRED else hint if isinstance(hint, str) else inspect.formatannotation(hint)
            fields.append(
                {"name": name, "annotation": written, "default": default, "about": self._help.get(name, ("", ""))[1]}
            )
        return fields

    @cached_property
    def model(self) -> str | None:
        """The parameter that `--model` stands for: the first one that takes a name, whatever it is called."""
        named = [name for name in _MODEL_NAMES if name in self.options]
        return next(iter(named or [name for name, option in self.options.items() if str in option.members]), None)


# -- what there is ---------------------------------------------------------------------------------------------------


def summaries(kind: str) -> dict[str, str]:
    """What can be named, with a summary: the built-in ones, then those of installed plugins."""
    found = built_in(kind)
    plugins = plugin_names(kind) if kind not in ("adapters", "schedulers") else []  # type: ignore[arg-type]
    return {**found, **{name: "from an installed plugin" for name in plugins if name not in found}}


def built_in(kind: str) -> dict[str, str]:
    """The names of a kind that are ours, with a summary."""
    if kind == "schedulers":
        from trainformer.backends.torch.scheduler_declarations import SCHEDULES, TORCH_SCHEDULERS

        ours = {name: first_sentence(schedule) for name, schedule in SCHEDULES.items()}
        return ours | {name: f"torch.optim.lr_scheduler.{name}" for name in TORCH_SCHEDULERS}
    if kind == "optimizers":
        from trainformer.backends.torch.optimizer_names import BITSANDBYTES_OPTIMIZERS, TORCH_OPTIMIZERS

        torch_names = {name: f"torch.optim.{made.__name__}" for name, (made, _) in TORCH_OPTIMIZERS.items()}
        return torch_names | {name: f"bitsandbytes.optim.{made}" for name, (made, _) in BITSANDBYTES_OPTIMIZERS.items()}
    return dict(sorted(_classes(kind)))


def _classes(kind: str) -> Iterator[tuple[str, str]]:
    """Public classes; of a class with class methods that make instances, these."""
    package = importlib.import_module(f"trainformer.{kind}")
    for name in package.__all__:
        found = getattr(package, name)
        home = getattr(found, "__module__", "")
        if not inspect.isclass(found) or not home.startswith(f"trainformer.{kind}.") or home.endswith(".base"):
            continue
        summary = first_sentence(found)
        methods = {key: part.__func__ for key, part in vars(found).items() if isinstance(part, classmethod)}
        makers = [key for key, method in methods.items() if method.__annotations__.get("return") == name]
        for maker in makers:
            yield f"{name}.{maker}", f"{summary.partition(':')[0]}; {first_sentence(getattr(found, maker))}"
        if not makers:
            yield name, summary


def first_sentence(thing: Any) -> str:
    """What the docstring of a class or function begins with."""
    paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].replace("`", "").split())
    sentence = re.split(r"(?<=[^.]\.)\s", paragraph, maxsplit=1)[0]
    return sentence if sentence.endswith("..") else sentence.removesuffix(".")


def find_components(task_name: str, adapter_name: str | None) -> list[Component]:
    """The task, the adapter if there is one, and the trainer."""
    task, trainer = find_component("task", task_name), trainer_component()
    if adapter_name in (None, "None", "null", "~"):
        return [task, trainer]
    if "adapter" not in task.parameters:
        able = [name for name in built_in("tasks") if "adapter" in find_component("task", name).parameters]
        raise BadArgument(f"{task_name} takes no adapter. Tasks that do: {', '.join(able)}.")
    return [task, find_component("adapter", str(adapter_name)), trainer]


def trainer_component() -> Component:
    """The trainer, whose parameters are the settings of a run."""
    from trainformer import Trainer

    return Component("trainer", "Trainer", "trainformer:Trainer", Trainer)


def find_component(role: str, name: str) -> Component:
    """A task or adapter by its name: a built-in one, one of an installed plugin, or `module:Class`."""
    if ":" in name:
        return Component(role, name, name, _imported(name, role))
    kind = f"{role}s"
    known = summaries(kind)
    if name not in known and not any(entry.startswith(f"{name}.") for entry in known):
        hint = did_you_mean(name, known) or f"There is {', '.join(known)}."
        raise BadArgument(expected(f"--{role} to be a known name", name, hint + f" Your own is --{role}=module:Class."))
    package = importlib.import_module(f"trainformer.{kind}")
    if name.partition(".")[0] in package.__all__:
        return Component(role, name, f"trainformer.{kind}:{name}", operator.attrgetter(name)(package))
    plugin: Any = load_plugin(kind, name)  # type: ignore[arg-type]
    return Component(role, name, f"{plugin.__module__}:{plugin.__qualname__}", plugin)


def _paper_options(name: str) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Defaults of a self-supervised method where they follow its paper, and the options of other methods.

    >>> options, others = _paper_options("SSL.mae")
    >>> options["mask_ratio"], "queue_size" in others
    (0.75, True)
    """
    task, _, method = name.rpartition(".")
    if task != "SSL":
        return {}, frozenset()
    from trainformer.tasks.vision.ssl.options import DEFAULTS

    known = {**DEFAULTS.get(f"{method}_v3", {}), **DEFAULTS.get(method, {})}
    everything = {option for options in DEFAULTS.values() for option in options}
    others = everything - known.keys() | ({"version"} if f"{method}_v3" not in DEFAULTS else set())
    return known, frozenset(others)


def _imported(target: str, role: str) -> Callable[..., Any]:
    """What a target names. Modules in the current folder are imported, because the user typed their names."""
    module, _, path = target.partition(":")
    if not all(word.isidentifier() for word in [*module.split("."), *path.split(".")]):
        do = "Without .py, and with dots between folders and files."
        raise BadArgument(expected(f"--{role} to name your own class as module:Class", target, do))
    thing: Any = import_named(module, f"--{role}")
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


def _parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Each parameter that can be passed by name; where a dataclass has a `default_factory`, with what that returns.

    A class method that passes keywords on takes those of its class too, except for the required ones: it chooses these
    itself.
    """
    found = signature_of(call) or {}
    own = {}
    for name, parameter in found.items():
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            if repr(parameter.default) == "<factory>":  # how dataclasses mark it in the signature
                parameter = parameter.replace(default=call.__dataclass_fields__[name].default_factory())  # type: ignore[attr-defined]
            own[name] = parameter
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found.values())
    if not (inspect.ismethod(call) and isinstance(call.__self__, type) and passes_on):
        return own
    of_class = {name: known for name, known in _parameters(call.__self__).items() if known.default is not REQUIRED}
    return {**own, **of_class, **own}


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


# -- help ------------------------------------------------------------------------------------------------------------


def _help(call: Any) -> dict[str, tuple[str, str]]:
    """Section and meaning of each parameter, from the comments above and beside a field, or from a docstring."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(getattr(call.__self__ if inspect.ismethod(call) else call, "__mro__", ())):
        if "__dataclass_fields__" in vars(base):
            found |= _field_help(base)
    doc, own = inspect.getdoc(call) or "", signature_of(call) or {}
    for name in own:
        section, about = found.get(name, ("", ""))
        found[name] = section, about or _about(doc, name)
    return found


def _field_help(kind: type) -> dict[str, tuple[str, str]]:
    """Section and meaning of the fields that a dataclass declares itself; empty if there is no source."""
    try:
        lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    except (OSError, TypeError):
        return {}
    found, section, doc = {}, "", inspect.getdoc(kind) or ""
    for line in lines:
        if heading := re.fullmatch(r" {4}# (.*)", line):
            section = heading[1]
        elif declared := re.match(r" {4}(\w+): .*?(?:  # (.*))?$", line):
            found[declared[1]] = (section, declared[2] or _about(doc, declared[1]))
    return found


def _about(doc: str, name: str) -> str:
    """What a docstring says about a parameter: under `Args:`, or in the sentence that is about it."""
    text = _arguments(doc).get(name) or _sentence_about(doc, name)
    return textwrap.shorten(text.replace("`", ""), _LONGEST, placeholder=" ...")


@functools.cache
def _arguments(doc: str) -> dict[str, str]:
    if "Args:" not in doc:
        return {}
    import docstring_parser as parser

    return {known.arg_name: " ".join((known.description or "").split()) for known in parser.parse(doc).params}


def _sentence_about(doc: str, name: str) -> str:
    """The sentence that begins with the name of a parameter, or else a short one that mentions it."""
    sentences = [
        " ".join(sentence.split())
        for paragraph in doc.split("\n\n")
        if not paragraph.lstrip().startswith(">>>")
        for sentence in _SENTENCE_END.split(paragraph)
    ]
    mentions = [sentence for sentence in sentences if re.search(rf"`{name}[`=]", sentence)]
    best = next((sentence for sentence in mentions if sentence.startswith(f"`{name}`")), "")
    return (best or next((sentence for sentence in mentions if len(sentence) < _LONGEST), "")).rstrip(";")


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
