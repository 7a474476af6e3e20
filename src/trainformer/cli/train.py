"""`trainformer train`, `check`, `resume` and `tasks`: start a training run, and what can be trained.

`train` and `check` take every parameter of the task, the adapter and the trainer as an option; see `cli.options`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.cli import jax_recipes, options, recipes
from trainformer.cli.app import Command
from trainformer.cli.consent import add_trust_argument
from trainformer.cli.output import (
    SECRET,
    add_variable_argument,
    positive,
    print_json,
    print_table,
    stdout_to_stderr,
    variables_of,
)
from trainformer.config import load_config
from trainformer.config.nodes import everything_in
from trainformer.config.trust import import_named
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.jax.tasks import ADAPTERS, TASKS

if TYPE_CHECKING:
    from trainformer.live.runs import RunInfo

# Settings that say where the run is or where it starts, also by their names on JAX.
_OF_THE_RUN = (
    *("run_dir", "name", "save_dir", "resume", "load_components"),
    *("output_dir", "save_directory", "model_name", "run_name", "resume_from_checkpoint"),
)
_IMPLIED_BY_RESUME = ("max_steps", "resume", "load_components")


def _add_train_arguments(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    dry_run = "print the config that these options describe, and exit"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    options.add_arguments(parser, words)


def _train(args: argparse.Namespace) -> None:
    """Build the trainer and train; an interrupted run is resumed."""
    if args.dry_run:
        print(recipes.text_of(args.config), end="")
        return
    _approve_functions(args.config["trainer"])
    trainer = recipes.build(args.config["trainer"], trust=args.trust)
    recipes.keep(trainer, args.config)
    (trainer.train if args.backend == "jax" else trainer.fit)()


def _approve_functions(part: Any) -> None:
    """Import the files of functions that were typed (``--rewards=file.py:name``), which approves their code."""
    for value in everything_in(part):
        if isinstance(value, str) and ".py:" in value:
            from trainformer.tasks.language.rollouts.rewards import is_function_path, module_of

            if is_function_path(value):
                import_named(module_of(value), value)


def _add_check_arguments(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options.add_arguments(parser, words)


def _check(args: argparse.Namespace) -> int:
    """Build the trainer and check it; 1 if something would go wrong."""
    _approve_functions(args.config["trainer"])
    with stdout_to_stderr() if args.json else contextlib.nullcontext():
        report = recipes.build(args.config["trainer"], trust=args.trust).check(raise_on_failure=False)
    if args.json:
        print_json({"ok": report.ok, **asdict(report)})
    return 0 if report.ok else 1


# -- resume ----------------------------------------------------------------------------------------------------------


def _add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "To train a finished run for longer: trainformer resume RUN --epochs 20"
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or its name under runs/")
    longer = parser.add_mutually_exclusive_group()
    longer.add_argument("--epochs", type=positive, metavar="N", help="total epochs, including those already trained")
    longer.add_argument("--max-steps", type=positive, metavar="N", help="total steps, likewise")
    change = "change a setting of the trainer, such as batch_size=64; the value is YAML"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help=change)
    add_trust_argument(parser)
    add_variable_argument(parser, SECRET)


def _resume(args: argparse.Namespace) -> None:
    """Rebuild the trainer of the run and continue from its newest checkpoint."""
    from trainformer.live.runs import describe, find_run

    info = describe(find_run(args.run))
    if info.is_running:
        where = f" on {info.host}" if info.host else ""
        do = f"`trainformer ctl status {args.run}` shows its progress."
        raise BadArgument(f"{info.path} is running (process {info.process}{where}): there is nothing to resume. {do}")
    changes = _changes(args)
    if info.status != "finished" or changes.keys() & {"epochs", "max_steps"}:
        _continue(info, args.trust, changes, variables_of(args))
    elif os.environ.get("RANK", "0") == "0":  # once, also under `trainformer launch`
        print(f"{info.path} has finished at step {info.step}: there is nothing to resume.")
        print(f"To train it for longer: trainformer resume {args.run} --epochs N")


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """Settings by name, except for those that say where the run is or where it starts."""
    from trainformer.config.loading import parse_assignment

    changes = dict(parse_assignment(text, "a setting such as --set batch_size=64") for text in args.settings)
    for name in _OF_THE_RUN:
        if name in changes:
            do = "A run is resumed in its folder, from its newest checkpoint."
            raise BadArgument(expected("a setting that a resumed run can change", name, do))
    if args.epochs is not None:
        changes |= {"epochs": args.epochs, "max_steps": None}  # the planned max_steps would override them
    if args.max_steps is not None:
        changes["max_steps"] = args.max_steps
    return changes


def _continue(info: RunInfo, trust: list[str], changes: dict[str, Any], variables: dict[str, Any]) -> None:
    file = info.path / recipes.FILE
    recipe = load_config(file, trust=trust, variables=variables) if file.is_file() else None
    if recipe is not None and jax_recipes.arguments_of(recipe.get("trainer")) is not None:
        settings = {**changes, **_start(info, changes)}
        trainer = recipes.trainer_of(str(info.path), trust=trust, changes=settings, variables=variables)
        if changes:
            recipes.keep(trainer, jax_recipes.changed(recipe, changes))
        trainer.train()
        return
    from trainformer.run import RunSettings

    written, defaults = recipes.settings_in(info.path, trust, variables), RunSettings.defaults()
    settings = {
        name: value
        for name, value in {**changes, **_start(info, changes)}.items()
        # A default that the user has not set stays one: `config.json` tells which settings the user set.
        if name in written or name not in _IMPLIED_BY_RESUME or value != defaults[name]
    }
    trainer = recipes.trainer_of(str(info.path), trust=trust, changes=settings, variables=variables)
    if changes:  # keep them for the next time the run is interrupted
        lasting = [f"+trainer.{name}={json.dumps(settings[name])}" for name in changes if name in settings]
        recipe = load_config(info.path / recipes.FILE, lasting, trust=trust, variables=variables)
        recipes.keep(trainer, recipe)
    trainer.fit()


def _start(info: RunInfo, changes: Collection[str]) -> dict[str, Any]:
    """The settings that resume from the newest checkpoint, if there is one."""
    if info.checkpoint is None:
        return {}
    from trainformer.run.provenance import ADJUSTABLE

    # `auto` does not resume a run that was stopped on purpose, or with other settings, which is right for the command
    # that started it.
    named = info.status == "stopped" or not ADJUSTABLE.issuperset(changes)
    return {"resume": str(Path(info.checkpoint).absolute()) if named else "auto", "load_components": None}


# -- tasks -----------------------------------------------------------------------------------------------------------


def _add_tasks_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="show the fields of a task, adapter, callback or logger"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _tasks(args: argparse.Namespace) -> None:
    """Print the list, or one of its entries."""
    from trainformer.cli.components import KINDS, summaries

    lists = {kind: summaries(kind) for kind in KINDS}
    if args.name is not None:
        _print_entry(args.name, lists, args.json)
    elif args.json:
        shown = {
            kind: [{"name": name, "summary": text} for name, text in found.items()] for kind, found in lists.items()
        }
        print_json(shown)
    else:
        for kind, found in lists.items():
            print_table({kind: "left", "": "fold"}, found.items())
        print(f"On JAX (`--backend=jax`) there is {', '.join(TASKS)}, with the adapter {', '.join(ADAPTERS)}.")
        print("`trainformer tasks NAME` shows the fields of one; timm's optimizers can be named too.")


def _print_entry(name: str, lists: dict[str, dict[str, str]], as_json: bool) -> None:
    from trainformer.cli.components import CLASSES, find_component, first_sentence

    # A class of which the list has only the class methods (`SSL`) is found too.
    kinds = [kind for kind, found in lists.items() if name in found or any(n.startswith(f"{name}.") for n in found)]
    if not kinds:
        hint = did_you_mean(name, [n for found in lists.values() for n in found]) or "`trainformer tasks` lists all."
        raise BadArgument(expected("the name of a task, adapter, callback, logger, optimizer or scheduler", name, hint))
    kind = kinds[0]
    summary, fields = lists[kind].get(name), []
    if kind in CLASSES:
        component = find_component(kind[:-1], name)
        summary, fields = summary or first_sentence(component.call), component.fields
    if as_json:
        backends = {"backends": ["torch", *(["jax"] if name in TASKS else [])]} if kind == "tasks" else {}
        print_json({"name": name, "kind": kind, "summary": summary, "fields": fields, **backends})
        return
    print(f"{name}: {summary}")
    rows = [(field["name"], field["annotation"], field["default"] or "required", field["about"]) for field in fields]
    if rows:
        print_table({"field": "left", "type": "fold", "default": "fold", "": "fold"}, rows)
    if kind == "tasks":
        print(f"On the command line: `trainformer train --task={name} --help`.")
        if name in TASKS:
            print(f"On JAX: `trainformer train --backend=jax --task={name} --help`.")


COMMANDS = {
    "train": Command(_add_train_arguments, _train, options.parse, reads_words=True),
    "check": Command(_add_check_arguments, _check, options.parse, reads_words=True),
    "resume": Command(_add_resume_arguments, _resume),
    "tasks": Command(_add_tasks_arguments, _tasks),
}
