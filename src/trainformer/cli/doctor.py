"""`trainformer doctor`: versions, devices, and what is missing, with what to do about it.

Owns how it is told; what there is on this machine is found out by `cli.diagnosis`. A package that cannot be imported is
a finding like any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from trainformer.cli.output import lines_of, print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    imports = "also import every package of the extras that are installed, which takes a while"
    parser.add_argument("--imports", action="store_true", help=imports)
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 if something is broken."""
    from trainformer.cli.diagnosis import diagnose

    found = diagnose(imports=args.imports)
    if args.json:
        print_json(found)
    else:
        _print(found)
    return 1 if any(problem["broken"] for problem in found["problems"]) else 0


def _print(found: Mapping[str, Any]) -> None:
    for title in ("versions", "machine"):
        print("\n".join([title, *lines_of({name: _text(value) for name, value in found[title].items()}), ""]))
    print("devices", end="")
    names = list(found["devices"][0])
    print_table(
        dict.fromkeys(names, "left") | {"name": "fold"},
        [[_text(device[name]) for name in names] for device in found["devices"]],
    )
    rows = [
        [extra["name"], extra["status"], ", ".join(extra["missing"]), extra["install"]] for extra in found["extras"]
    ]
    if rows:  # they are known where the package is installed
        print("extras", end="")
        print_table({"extra": "left", "status": "left", "missing": "fold", "to install": "left"}, rows)
    for problem in found["problems"]:
        kind = "broken" if problem["broken"] else "warning"
        print(f"{kind}: {problem['what']} {problem['do']}".rstrip())
    print("nothing is broken" if not any(problem["broken"] for problem in found["problems"]) else "something is broken")


def _text(value: Any) -> str:
    """Yes and no, and what nobody knows."""
    if value is None:
        return "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
