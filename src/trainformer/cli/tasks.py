"""`trainformer tasks`: what can be trained, adapted, observed and logged, and what each of these takes.

Everything is read from the source of the classes; nothing heavy is imported.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show what a task, adapter, callback or logger takes")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the list, or one of its entries."""
    if args.name is None:
        _list(args.json)
    else:
        _show(args.name, args.json)
    return 0


def _list(as_json: bool) -> None:
    from trainformer.cli import catalogue
    from trainformer.cli.output import print_json, print_table

    lists = {kind: catalogue.entries(kind) for kind in catalogue.KINDS}
    if as_json:
        print_json({kind: [{"name": e.name, "summary": e.summary} for e in found] for kind, found in lists.items()})
        return
    for kind, found in lists.items():
        print_table({kind: "left", "": "fold"}, [(entry.name, entry.summary) for entry in found])
    print("`trainformer tasks NAME` shows what one takes; timm's optimizers can be named too.")


def _show(name: str, as_json: bool) -> None:
    from trainformer.cli import catalogue
    from trainformer.cli.output import print_json, print_table

    entry = _find(name)
    fields = list(catalogue.fields_of(entry).values())
    if as_json:
        shown: dict[str, Any] = {"name": entry.name, "kind": entry.kind, "summary": entry.summary}
        keys = ("name", "annotation", "default", "about")
        print_json({**shown, "fields": [{key: getattr(field, key) for key in keys} for field in fields]})
        return
    print(f"{entry.name}: {entry.summary}")
    rows = [(field.name, field.annotation, field.default or "required", field.about) for field in fields]
    if rows:
        print_table({"field": "left", "type": "fold", "default": "fold", "": "fold"}, rows)
    if entry.kind == "tasks":
        print(f"On the command line: `trainformer train --task={entry.name} --help`.")


def _find(name: str) -> Any:
    from trainformer.cli import catalogue
    from trainformer.core.errors import BadArgument, did_you_mean, expected

    for kind in catalogue.KINDS:
        entry = catalogue.find(kind, name)
        if entry is not None:
            return entry
    known = [entry.name for kind in catalogue.KINDS for entry in catalogue.entries(kind)]
    hint = did_you_mean(name, known) or "`trainformer tasks` lists all."
    raise BadArgument(expected("the name of a task, adapter, callback, logger, optimizer or scheduler", name, hint))
