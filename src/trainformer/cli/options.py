"""The options of `train` and `check`: every parameter of the task, of the adapter and of the trainer is one.

Before the task is known only the options of the command and of the trainer are. Once `--task` and `--adapter` are read,
an option belongs to the component that has a parameter of this name. One that several have is refused with the
spellings that are unique (`--task.dropout`, `--adapter.dropout`), an unknown one with the nearest name or with the
component that has it. jsonargparse reads and checks the values.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from trainformer.cli import jax_options
from trainformer.cli.components import (
    Component,
    ConfigObject,
    ConfigValue,
    Option,
    built_in,
    find_component,
    find_components,
    summaries,
    trainer_component,
)
from trainformer.cli.consent import add_trust_argument
from trainformer.cli.named_data import named_data
from trainformer.cli.vocabulary import suggest_option
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

if TYPE_CHECKING:
    import jsonargparse

    from trainformer.config import Config

Values = dict[str, dict[str, Any]]

_SPELLING = (
    "Options are --name=value or --name value, with dashes or underscores; booleans also --name and --no-name. Lists "
    "and mappings are YAML: --topk='[1, 5]', --model-kwargs='{depth: 2}', or --model-kwargs.depth=2. An object is "
    "written as in a config: '{type: package.module.Class, argument: value}'. If several components have an option of "
    "the same name, say which you mean: --task.x, --adapter.x, --trainer.x."
)
_WHAT = "what to train"
_METAVARS = {"int": "N", "float": "X", "[": "LIST", "{": "MAPPING", "Any": "VALUE", "str": "TEXT", "object": "OBJECT"}
# The docstrings of these describe the Python arguments.
_HELP = {
    "data": "training data: a path or name that the task can load; of a mixture: --data.sources.NAME=PATH",
    "val_data": "validation data, likewise; several sets with names: --val clean=DATA --val shifted=DATA",
    "val_split": "fraction or number of training samples to hold out for validation instead",
    "callbacks": "such as EarlyStopping or 'EarlyStopping(patience=3), EMA'; `trainformer tasks` lists them",
}
_VAL_DATA = "trainer.val_data"
_OBJECT = "An object is written as in a config: '{type: package.module.Class, argument: value}'."
_BOOLEANS = ("true", "True", "yes", "on", "1", "false", "False", "no", "off", "0")


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Add the options that do not depend on the task. Except for `--trust` they have no values here; see `parse`."""
    on_jax = _backend(parser, words) == "jax"
    if not on_jax:
        require("torch", "torch", f"for `{parser.prog}` (with jax: --backend=jax)")
    parser.usage = f"{parser.prog} --task=TASK --data=DATA [--model=MODEL] [OPTION ...]"
    parser.formatter_class = functools.partial(argparse.HelpFormatter, max_help_position=28)  # type: ignore[assignment]
    parser.epilog = f"Options of a task: {parser.prog} --task=TASK --help. {_SPELLING}"
    add_trust_argument(parser)
    group = parser.add_argument_group(_WHAT)
    where = f"what trains: torch (default), or jax for {', '.join(jax_options.TASKS)}"
    group.add_argument("--backend", choices=jax_options.BACKENDS, default="torch", help=where)
    if on_jax:
        names = {"tasks": list(jax_options.TASKS), "adapters": list(jax_options.ADAPTERS)}
    else:
        names = {kind: list(summaries(kind)) for kind in ("tasks", "adapters")}
    own = (
        "your own trainer is described in a config; see `trainformer run`"
        if on_jax
        else "or your own class: module:Class"
    )
    for name, help_text in (
        ("task", f"one of {', '.join(names['tasks'])}; {own}"),
        ("model", "name or folder of the model or backbone"),
        ("adapter", f"parameter-efficient fine-tuning: {', '.join(names['adapters'])}; {own}"),
    ):
        choices = names.get(f"{name}s")  # for shell completion
        group.add_argument(
            f"--{name}", metavar=name.upper(), choices=choices, default=argparse.SUPPRESS, help=_escaped(help_text)
        )
    _add_component(parser, jax_options.settings_component() if on_jax else trainer_component(), {})


def _backend(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    try:
        return jax_options.backend_in(words)
    except BadArgument as error:
        parser.error(str(error))


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The options of the command itself, and `config`: a config whose key `trainer` builds the trainer."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--task", "--adapter"):  # the last one counts
        first.add_argument(name, nargs="?")
    chosen, _ = first.parse_known_args(words)
    on_jax = _backend(parser, words) == "jax"
    if not chosen.task:
        if {"-h", "--help"} & set(words):
            parser.print_help()
            parser.exit(0)
        known = ", ".join(jax_options.TASKS if on_jax else summaries("tasks"))
        unknown = [flag for word in words if (flag := word.partition("=")[0]) not in parser._option_string_actions]
        typos = [flag for flag in unknown if did_you_mean(flag.lstrip("-"), ["task"])]
        parser.error(f"expected --task=TASK, received {typos[0] if typos else 'none'}; there is {known}")
    try:
        find = jax_options.find_components if on_jax else find_components
        table = OptionTable(find(chosen.task, chosen.adapter or None), _command_actions(parser), on_jax)
        given = list(_split(words, table.is_alone))
        if any(word.name == "help" for word in given):
            _help_page(parser, table).print_help()
            parser.exit(0)
        of_command = [word for word in given if word.name in table.command]
        args = parser.parse_args(
            [as_flag(word.name) + ("" if word.text is None else f"={word.text}") for word in of_command]
        )
        values = table.values(word for word in given if word.name not in ("task", "adapter", *table.command))
        args.config = (jax_options.config_of if on_jax else config_of)(table.components, values)
    except BadArgument as error:
        parser.error(str(error))
    # Typing where a class is, or the name of an installed plugin, means to trust that module.
    named = [part for part in table.components if ":" in part.name or not part.target.startswith("trainformer")]
    args.trust = [*args.trust, *(part.target.partition(":")[0] for part in named)]
    return args


def _command_actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Options of the command itself, by name: the others have no default in the parser."""
    return {
        flag[2:].replace("-", "_"): action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--") and action.default is not argparse.SUPPRESS
    }


def config_of(components: Sequence[Component], values: Values) -> Config:
    """The config that describes the same trainer as the options."""
    from trainformer.config import Call, Config

    targets = {component.role: component.target for component in components}
    task = dict(values["task"])
    if "adapter" in targets:
        task["adapter"] = Call("factory", targets["adapter"], kwargs=Config(values["adapter"]))
    trainer = {"task": Call("factory", targets["task"], kwargs=Config(task)), **values["trainer"]}
    return Config({"trainer": Call("singleton", targets["trainer"], kwargs=Config(trainer))})


# -- from words to values --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """An option as it was typed, with its value."""

    typed: str
    name: str  # with underscores, without the leading dashes
    text: str | None = None


def _split(words: Sequence[str], is_alone: Callable[[str, str], bool]) -> Iterator[Word]:
    """The options in order. `is_alone` says whether the word after an option is not its value."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            yield Word(word, "help")
            continue
        if not word.startswith("--") or word == "--":
            raise BadArgument(expected("options such as --epochs=3", word, "Quote values that contain spaces."))
        typed, equals, text = word.partition("=")
        name = typed[2:].replace("-", "_")
        has_value = bool(rest) and not rest[0].startswith("--") and not is_alone(name, rest[0])
        yield Word(typed, name, text if equals else rest.pop(0) if has_value else None)


class OptionTable:
    """The options of all components, by the names they can be typed by."""

    def __init__(
        self, components: Sequence[Component], command: Mapping[str, argparse.Action], on_jax: bool = False
    ) -> None:
        self.components = components
        self.on_jax = on_jax
        self.command = command  # options of the command itself
        self.by_key = {option.key: option for component in components for option in component.options.values()}
        self.by_name: dict[str, list[Option]] = {}
        for option in self.by_key.values():
            self.by_name.setdefault(option.name, []).append(option)
        self.task = components[0]
        if self.task.model is not None and "model" not in self.by_name:
            self.by_name["model"] = [self.task.options[self.task.model]]

    def find(self, name: str) -> Option | None:
        """The option of a name, if there is exactly one."""
        found = self.by_name.get(name, [])
        return self.by_key.get(name) or (found[0] if len(found) == 1 else None)

    def is_alone(self, name: str, follows: str) -> bool:
        """Whether the word after an option is not its value."""
        if name in self.command:
            return self.command[name].nargs == 0
        option = self.find(name) or self.find(_affirmed(name))
        return option is not None and option.members == (bool,) and follows not in _BOOLEANS

    def values(self, words: Iterable[Word]) -> Values:
        """The values by role and name, in the order of the words."""
        given: dict[str, tuple[Word, str]] = {}
        keyed: list[tuple[Option, str, str]] = []
        val_sets: list[str] = []
        for word in words:
            if word.name == "val" and word.text is not None and "val" not in self.by_name:
                val_sets.append(word.text)
                continue
            option, key, text = self._resolve(word)
            if key:  # jsonargparse sets one level of keys only
                keyed.append((option, key, text))
                given.setdefault(option.key, (word, "{}"))
            else:
                given[option.key] = word, _expanded(text) if option.key == "trainer.callbacks" else text
        self._check_complete(given)
        parsed = self._parse(given)
        for option, key, text in keyed:
            parsed[option.key] = _with_key(parsed[option.key], key.split("."), text)
        if val_sets:
            if _VAL_DATA in parsed:
                raise BadArgument("Expected --val or --val-data, received both. They are the same option.")
            parsed[_VAL_DATA] = named_data(val_sets, "--val")
        values: Values = {component.role: {} for component in self.components}
        for name, value in parsed.items():
            option = self.by_key[name]
            values[option.role][option.name] = _as_data(value) if option.is_mapping else value
        return values

    def _parse(self, given: Mapping[str, tuple[Word, str]]) -> dict[str, Any]:
        """The values by key, as jsonargparse reads them."""
        from jsonargparse import ArgumentError

        parser = _value_parser(self.by_key.values())
        values = {}
        for key, (word, text) in given.items():
            option = self.by_key[key]
            try:
                value = parser.parse_args([f"--{key}={option.with_brackets(text)}"], defaults=False)[key]
            except ArgumentError:
                hint = did_you_mean(text, option.choices) or (_OBJECT if "object" in option.type_text else "")
                raise BadArgument(expected(f"{word.typed} to be {option.type_text}", text, hint)) from None
            if isinstance(value, str) and re.match(r"\s*(!|\{\s*type\b)", text):
                load_value(text)  # broken notation would pass for a name: raise its error
            values[key] = value.value if isinstance(value, ConfigObject) else value
        return values

    def _resolve(self, word: Word) -> tuple[Option, str, str]:
        """The option that a word means, the path of keys if it sets one in a mapping, and the text of the value."""
        parts = word.name.split(".")
        for name in (".".join(parts[:end]) for end in range(len(parts), 0, -1)):
            if name not in self.by_key and len(self.by_name.get(name, ())) > 1:
                roles = [option.role for option in self.by_name[name]]
                spellings = " or ".join(as_flag(f"{role}.{name}") for role in roles)
                owners = " and ".join(f"the {role}" for role in roles)
                raise BadArgument(f"{word.typed} is an option of {owners}. Write {spellings}.")
            option, key = self.find(name), word.name[len(name) + 1 :]
            if option is not None and (not key or option.takes_keys):
                text = "true" if word.text is None and option.is_switch else word.text
                if text is None:
                    raise BadArgument(f"Expected {word.typed} to be {option.type_text}, received nothing.")
                return option, key, text
        switch = self.find(_affirmed(word.name))
        if switch is None or not switch.is_switch:
            self._refuse_unknown(word)
        if word.text is not None:
            raise BadArgument(
                expected(f"{word.typed} without a value", word.text, f"{as_flag(switch.name)} takes one.")
            )
        return switch, "", "false"

    def _check_complete(self, given: Collection[str]) -> None:
        for component in self.components:
            missing = [o for o in component.options.values() if o.is_required and o.key not in given]
            if missing:
                wanted = ", ".join(f"{as_flag(option.name)} ({option.type_text})" for option in missing)
                purpose = "to train on" if missing[0].name == "data" else f"for {component.name}"
                raise BadArgument(f"Expected {wanted} {purpose}, received none.")

    def _refuse_unknown(self, word: Word) -> NoReturn:
        first, _, last = word.name.partition(".")
        name = last if first in ("task", "adapter", "trainer") and last else word.name
        if self.on_jax:
            jax_options.refuse_unknown(word.typed, name.removeprefix("no_"), self)
        roles = {component.role: component.name for component in self.components}
        for kind in ("adapters", "tasks"):
            found = [known for known in built_in(kind) if name in find_component(kind[:-1], known).parameters]
            if found and kind == "adapters" and "adapter" not in roles:
                if "adapter" not in self.task.parameters:
                    continue
                raise BadArgument(f"{word.typed} is an option of an adapter: add --adapter={found[0]}.")
            if found:
                some = f"{', '.join(found[:4])}{', ...' if len(found) > 4 else ''}"
                raise BadArgument(f"{word.typed} is an option of {some}, not of {roles[kind[:-1]]}.")
        close = suggest_option(name, [*self.by_name, "task", "adapter", *self.command])
        raise BadArgument(f"There is no option {word.typed}. {close or f'`--task={self.task.name} --help` lists all.'}")


def _value_parser(options: Iterable[Option]) -> jsonargparse.ArgumentParser:
    """Reads `--KEY=VALUE`. Values are read as in a config: 1e-4 is a number, and tags name objects."""
    import jsonargparse
    from jsonargparse.typing import register_type

    def refuse(value: Any) -> NoReturn:
        raise ValueError("not in the notation of configs")

    def is_value(value: Any, _: type) -> bool:
        return value is None or isinstance(value, ConfigObject | dict | list)

    jsonargparse.set_loader("trainformer", _load_opaque, exceptions=(BadArgument,))
    register_type(ConfigObject, deserializer=refuse)
    register_type(ConfigValue, deserializer=refuse, type_check=is_value)
    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, parser_mode="trainformer")
    for option in options:
        # In a mapping a key `type` names no object; see `_as_data`.
        parser.add_argument(f"--{option.key}", type=option.type | ConfigObject if option.is_mapping else option.type)
    return parser


def _load_opaque(text: str) -> Any:
    """A value for jsonargparse, which copies dictionaries in a way that objects of configs do not survive."""
    from trainformer.config.nodes import holds_calls

    value = load_value(text)
    return ConfigObject(value) if holds_calls(value) else value


def load_value(text: str) -> Any:
    """A value as it would be read in a config; `None` also by its name in Python."""
    from trainformer.config import materialize
    from trainformer.config.nodes import Place, Source, holds_calls
    from trainformer.config.yaml_format import parse_yaml

    value = None if text == "None" else parse_yaml(text, Source(), {}, Place("command line"))
    return value if holds_calls(value) else materialize(value)  # plain data as plain data


def as_flag(name: str) -> str:
    """A parameter's name as an option.

    >>> as_flag("batch_size")
    '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


def _affirmed(name: str) -> str:
    """The name without the `no_` that negates it.

    >>> _affirmed("no_packing"), _affirmed("task.no_packing"), _affirmed("nonfinite")
    ('packing', 'task.packing', '')
    """
    owner, dot, last = name.rpartition(".")
    return f"{owner}{dot}{last[3:]}" if last.startswith("no_") else ""


def _with_key(holder: Any, path: Sequence[str], text: str) -> dict[str, Any]:
    """A mapping with one more value at a path of keys."""
    first, *rest = path
    mapping = holder if isinstance(holder, Mapping) else {}
    return {**mapping, first: _with_key(mapping.get(first), rest, text) if rest else load_value(text)}


def _as_data(value: Any) -> Any:
    """Plain values, also where a key is called `type`: in a config that would name an object."""
    from trainformer.config import Config

    if isinstance(value, list):
        return [_as_data(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    data = Config({key: _as_data(inner) for key, inner in value.items()})
    data.tagged = "type" in data
    return data


def _expanded(text: str) -> str:
    """Callbacks written as in Python, in the notation of configs; any other text as it is.

    >>> _expanded("EarlyStopping, EMA(decay=0.9)")
    '[{"type": "trainformer.callbacks.EarlyStopping"}, {"type": "trainformer.callbacks.EMA", "decay": 0.9}]'
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        calls = [item if isinstance(item, ast.Call) else ast.Call(item, [], []) for item in items]
        if any(not isinstance(call.func, ast.Name) or call.args for call in calls):
            return text
        named = [
            (call.func.id, {str(word.arg): _literal(word.value) for word in call.keywords})  # type: ignore[attr-defined]
            for call in calls
        ]
    except (SyntaxError, ValueError):
        return text
    sections, known = [], summaries("callbacks")
    for name, arguments in named:
        if name not in known:
            hint = did_you_mean(name, known) or f"There is {', '.join(known)}."
            raise BadArgument(expected("the name of a callback", name, hint))
        # The trainer itself finds callbacks of plugins by name.
        kind = {"type": f"trainformer.callbacks.{name}"} if name in built_in("callbacks") else {"name": name}
        sections.append({**kind, **arguments})
    return json.dumps(sections)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    return ast.literal_eval(node)


# -- help ------------------------------------------------------------------------------------------------------------


def _help_page(parser: argparse.ArgumentParser, table: OptionTable) -> argparse.ArgumentParser:
    """A parser with the options of all components, to print its help."""
    page = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, description=parser.description)
    page.epilog, page.formatter_class = _SPELLING, parser.formatter_class
    page.add_argument_group(_WHAT)
    for action in dict.fromkeys(table.command.values()):
        page._add_action(action)
    for component in table.components:
        _add_component(page, component, table.by_name)
    return page


def _add_component(
    parser: argparse.ArgumentParser, component: Component, by_name: Mapping[str, Sequence[Option]]
) -> None:
    """The options of a component for the help, those of the trainer in the sections of its settings.

    `by_name` are all options of the page, to show the full spelling where several have the same name.
    """
    is_trainer = component.role == "trainer"
    for option in sorted(component.options.values(), key=lambda option: is_trainer and bool(option.section)):
        title = (option.section or _WHAT) if is_trainer else f"{component.role} {component.name}"
        title = title[:1].lower() + title[1:]
        spellings = [option.key if len(by_name.get(option.name, ())) > 1 else option.name]
        if by_name.get("model") == [option] and option.name != "model":
            spellings.insert(0, "model")
        group = next((known for known in parser._action_groups if known.title == title), None)
        group = group or parser.add_argument_group(title)
        about, type_text = _HELP.get(option.name, option.about), option.type_text
        ending = "required" if option.is_required else f"default: {option.shown}"
        keywords: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": _escaped(f"{about} ({type_text}; {ending})".strip()),
        }
        flags = list(map(as_flag, spellings))
        if type_text.startswith("bool"):
            group.add_argument(*flags, f"--no-{flags[0][2:]}", action="store_true", **keywords)
        else:
            metavar = next((mark for start, mark in _METAVARS.items() if type_text.startswith(start)), "VALUE")
            group.add_argument(*flags, metavar=metavar, **keywords)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
