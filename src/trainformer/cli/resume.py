"""`trainformer resume RUN`: go on with a run that was cut short, or train one that has finished for longer."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.cli.trained import add_trust_argument, positive
from trainformer.core.errors import BadArgument, expected

if TYPE_CHECKING:
    from trainformer.live.runs import RunInfo

_NOT_TYPED = ("max_steps", "resume", "load_components")  # settings that going on implies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.epilog = "To train a run that has finished for longer: trainformer resume RUN --epochs 20"
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or its name under runs/")
    longer = parser.add_mutually_exclusive_group()
    longer.add_argument("--epochs", type=positive, metavar="N", help="epochs of the whole run, those done included")
    longer.add_argument("--max-steps", type=positive, metavar="N", help="the same in steps")
    change = "another setting of the trainer, such as batch_size=64; the value is YAML"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help=change)
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Build the trainer of the run again, and let it go on from its newest checkpoint."""
    from trainformer.live.runs import describe, find_run

    info = describe(find_run(args.run))
    if info.is_running:
        where = f" on {info.host}" if info.host else ""
        do = f"`trainformer ctl status {args.run}` shows how far it is."
        raise BadArgument(f"{info.path} is running (process {info.process}{where}): there is nothing to resume. {do}")
    changes = _changes(args)
    if info.status == "finished" and not changes.keys() & {"epochs", "max_steps"}:
        _say(f"{info.path} has finished at step {info.step}: there is nothing to resume.")
        _say(f"To train it for longer: trainformer resume {args.run} --epochs N")
        return 0
    _go_on(info, args.trust, changes)
    return 0


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """Settings by name; none that says where the run is or where it begins."""
    from trainformer.config.overrides import parse_assignment

    changes = dict(parse_assignment(text, "a setting such as --set batch_size=64") for text in args.settings)
    for name in ("run_dir", "name", "save_dir", "resume", "load_components"):
        if name in changes:
            do = "The run goes on in its folder, from its newest checkpoint."
            raise BadArgument(expected("a setting that a run which goes on can change", name, do))
    if args.epochs is not None:
        changes |= {"epochs": args.epochs, "max_steps": None}  # else the steps that were planned would count
    if args.max_steps is not None:
        changes["max_steps"] = args.max_steps
    return changes


def _go_on(info: RunInfo, trust: list[str], changes: dict[str, Any]) -> None:
    from trainformer.cli import recipes
    from trainformer.config import load_config
    from trainformer.run import RunSettings

    written, usual = recipes.settings_in(info.path, trust), RunSettings.defaults()
    settings = {
        name: value
        for name, value in {**changes, **_beginning(info)}.items()
        # A default that nobody has set stays one: `config.json` tells who set what.
        if name in written or name not in _NOT_TYPED or value != usual[name]
    }
    trainer = recipes.trainer_of(str(info.path), trust=trust, changes=settings)
    if changes:  # if it is cut short again, they still count
        lasting = [f"+trainer.{name}={json.dumps(settings[name])}" for name in changes if name in settings]
        recipes.keep(trainer, load_config(info.path / recipes.FILE, lasting, trust=trust))
    trainer.fit()


def _beginning(info: RunInfo) -> dict[str, Any]:
    """Where it goes on. Without a checkpoint of its own it begins as it began."""
    if info.checkpoint is None:
        return {}
    # One that somebody stopped does not go on by itself, which is right for the same command given again; here it is
    # asked for.
    stopped = info.status == "stopped"
    return {"resume": str(Path(info.checkpoint).absolute()) if stopped else "auto", "load_components": None}


def _say(text: str) -> None:
    """Once, also where `trainformer launch` has started several of us."""
    if os.environ.get("RANK", "0") == "0":
        print(text)
