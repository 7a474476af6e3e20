"""What `train` and `check` have in common: their options, their help, and the config that the options describe.

Before the task is known only the options of the command and of the trainer are: these are read from the source, so that
`--help` is quick. With the task known its class is imported, and so is that of the adapter.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from trainformer.cli.flags import catalogue, source
from trainformer.cli.flags.hints import NONE
from trainformer.cli.flags.owners import MISSING, Owner, all_flags, find_owner, spelled, trainer_owner
from trainformer.cli.flags.routing import Router, Values, chosen, read_words
from trainformer.core.errors import BadArgument, did_you_mean

_SPELLING = (
    "Options are --name=value or --name value, with dashes or underscores; those that are true or false also --name "
    "and --no-name. Lists and mappings are YAML: --topk='[1, 5]', --model-kwargs='{depth: 2}', or "
    "--model-kwargs.depth=2. An object is written as in a config: '{type: package.module.Class, argument: value}'. "
    "A name that several have is spelled in full: --task.x, --adapter.x, --trainer.x."
)
_WHAT = "what to train"
_METAVARS = {"int": "N", "float": "X", "[": "LIST", "{": "MAPPING", "Any": "VALUE", "str": "TEXT", "object": "OBJECT"}
# Of these the docstring speaks to whoever writes Python.
_ABOUT = {
    "data": "what to train on: a path or name that the task can load",
    "val_data": "what to evaluate on, likewise",
    "val_split": "instead: the share, or the number, of the training samples to evaluate on",
    "callbacks": "such as EarlyStopping or 'EarlyStopping(patience=3), EMA'; `trainformer tasks` lists them",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What there is before a task is chosen. None of it is given a value here; see `parse`."""
    parser.usage = f"{parser.prog} --task=TASK --data=DATA [--model=MODEL] [OPTION ...]"
    parser.formatter_class = functools.partial(argparse.HelpFormatter, max_help_position=28)  # type: ignore[assignment]
    names = {kind: [entry.name for entry in catalogue.entries(kind)] for kind in ("tasks", "adapters")}
    parser.epilog = f"Options of a task: {parser.prog} --task=TASK --help. {_SPELLING}"
    trust = "a package that may be imported for objects in options, besides the usual ones and the project's own"
    parser.add_argument("--trust", action="append", default=[], metavar="PACKAGE", help=trust)
    what = parser.add_argument_group(_WHAT)
    own = "or one of your own, in this folder: module:Class"
    for name, words in (
        ("task", f"one of {', '.join(names['tasks'])}; {own}"),
        ("model", "name of the model or backbone, or its folder"),
        ("adapter", f"train few parameters beside the model's: {', '.join(names['adapters'])}; {own}"),
    ):
        choices = names.get(f"{name}s")  # for the completion in shells
        what.add_argument(
            f"--{name}", metavar=name.upper(), choices=choices, default=argparse.SUPPRESS, help=_escaped(words)
        )
    written = source.read("trainformer.trainer", "Trainer")
    assert written is not None
    for field in sorted(written.fields.values(), key=lambda field: bool(field.section)):
        if field.name != "task":
            words = field.annotation.replace(" | ", " or ").replace(" or Path", "")
            _add(parser, field.section or _WHAT, [field.name], words, field)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The options of the command itself, and `config`: a config whose key `trainer` builds the trainer."""
    own = {option[2:].replace("-", "_"): action for option, action in _own_actions(parser).items()}
    name = chosen(words, "task")
    if name is None:
        if {"-h", "--help"} & set(words):
            parser.print_help()
            parser.exit(0)
        known = ", ".join(entry.name for entry in catalogue.entries("tasks"))
        meant = [word.partition("=")[0] for word in words if _is_like_task(word, parser)]
        parser.error(f"expected --task=TASK, received {meant[0] if meant else 'none'}; there is {known}")
    adapter = chosen(words, "adapter")
    try:
        owners = _owners(name, None if adapter in NONE else adapter)
        router = Router(owners, ("task", "adapter", *own))
        given = list(read_words(words, functools.partial(_stands_alone, own, router)))
        if any(word.name == "help" for word in given):
            _help_parser(parser, owners).print_help()
            parser.exit(0)
        args = parser.parse_args([word.plain for word in given if word.name in own])
        values = router.values(word for word in given if word.name not in ("task", "adapter", *own))
        _check_complete(owners, values)
    except BadArgument as error:
        parser.error(str(error))
    args.config = config_of(owners, values)
    # Whoever types where a class is has trusted that module.
    args.trust = [*args.trust, *(owner.target.partition(":")[0] for owner in owners if ":" in owner.name)]
    return args


def config_of(owners: Sequence[Owner], values: Values) -> Any:
    """The config that says the same as the options."""
    from trainformer.config.nodes import Call, Config

    by_role = {owner.role: owner for owner in owners}
    task = dict(values["task"])
    if "adapter" in by_role:
        task["adapter"] = Call("factory", by_role["adapter"].target, kwargs=Config(values["adapter"]))
    trainer = {"task": Call("factory", by_role["task"].target, kwargs=Config(task)), **values["trainer"]}
    return Config({"trainer": Call("singleton", by_role["trainer"].target, kwargs=Config(trainer))})


# -- reading ---------------------------------------------------------------------------------------------------------


def _own_actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Options of the command itself: those that have a value also when they are not given."""
    return {
        option: action
        for option, action in parser._option_string_actions.items()
        if option.startswith("--") and action.default is not argparse.SUPPRESS
    }


def _is_like_task(word: str, parser: argparse.ArgumentParser) -> bool:
    """Whether somebody has mistyped `--task`."""
    option = word.partition("=")[0]
    return option not in parser._option_string_actions and bool(did_you_mean(option.lstrip("-"), ["task"]))


def _owners(task_name: str, adapter_name: str | None) -> list[Owner]:
    task = find_owner("task", task_name, ("adapter",))
    owners = [task, trainer_owner()]
    if adapter_name is None:
        return owners
    if not task.takes_adapter:
        entries = catalogue.entries("tasks")
        able = [entry.name for entry in entries if "adapter" in catalogue.fields_of(entry)]
        raise BadArgument(f"{task_name} takes no adapter. Tasks that do: {', '.join(able)}.")
    return [task, find_owner("adapter", adapter_name), owners[1]]


def _stands_alone(own: dict[str, argparse.Action], router: Router, name: str, follows: str) -> bool:
    if name in own:
        return own[name].nargs == 0
    return router.stands_alone(name, follows)


def _check_complete(owners: Iterable[Owner], values: Values) -> None:
    for owner in owners:
        missing = [
            flag for name, flag in owner.flags.items() if flag.default is MISSING and name not in values[owner.role]
        ]
        if missing:
            wanted = ", ".join(f"{flag.option} ({flag.kind.words})" for flag in missing)
            who = "to train on" if missing[0].name == "data" else f"for {owner.name}"
            raise BadArgument(f"Expected {wanted} {who}, received none.")


# -- help ------------------------------------------------------------------------------------------------------------


def _help_parser(parser: argparse.ArgumentParser, owners: Sequence[Owner]) -> argparse.ArgumentParser:
    """The options of everything that was chosen."""
    page = argparse.ArgumentParser(
        prog=parser.prog,
        usage=parser.usage,
        description=parser.description,
        epilog=_SPELLING,
        formatter_class=parser.formatter_class,
    )
    page.add_argument_group(_WHAT)
    for action in dict.fromkeys(_own_actions(parser).values()):
        page._add_action(action)
    names = [flag.name for flag in all_flags(owners)]
    for owner in owners:
        for flag in sorted(owner.flags.values(), key=lambda flag: owner.role == "trainer" and bool(flag.section)):
            title = (flag.section or _WHAT) if owner.role == "trainer" else f"{owner.role} {owner.name}"
            spellings = [flag.name if names.count(flag.name) == 1 else f"{owner.role}.{flag.name}"]
            if owner.role == "task" and flag.name == owner.model and "model" not in names:
                spellings.insert(0, "model")
            default = None if flag.default is MISSING else flag.shown
            field = source.Field(flag.name, default=default, about=flag.about)
            _add(page, title, spellings, flag.kind.words, field)
    return page


def _add(parser: argparse.ArgumentParser, section: str, spellings: list[str], words: str, field: source.Field) -> None:
    """One option, in the group of its section, with type and default."""
    title = section[:1].lower() + section[1:]
    group = next((known for known in parser._action_groups if known.title == title), None)
    group = group or parser.add_argument_group(title)
    about = _ABOUT.get(field.name, field.about)
    default = "required" if field.default is None else f"default: {field.default}"
    help_text = _escaped(" ".join([*([about] if about else []), f"({words}; {default})"]))
    names = list(map(spelled, spellings))
    if words.startswith("bool"):
        names.append(f"--no-{names[0][2:]}")
        group.add_argument(*names, action="store_true", default=argparse.SUPPRESS, help=help_text)
    else:
        metavar = next((mark for start, mark in _METAVARS.items() if words.startswith(start)), "VALUE")
        group.add_argument(*names, metavar=metavar, default=argparse.SUPPRESS, help=help_text)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
