"""`trainformer run CONFIG`: build what a config describes, and run it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from trainformer.cli import recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_config_arguments(parser)
    target = "the key to run; by default trainer, else main, else the only one that can be built"
    parser.add_argument("--target", metavar="NAME", help=target)
    trust = "a package that may be imported for the config, besides the usual ones and the project's own"
    parser.add_argument("--trust", action="append", default=[], metavar="PACKAGE", help=trust)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """A config and what changes it; the same for all commands that read one."""
    parser.add_argument("config", metavar="CONFIG", help="a .yaml, .json, .toml or .py file; only .py is executed")
    change = "change a value (a.b=3) or add one (+a.b=3); the value is YAML"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=change)
    variable = "the value of a variable of a template or of !var"
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", dest="variables", help=variable)
    folder = "a folder of templates, after the config's own"
    parser.add_argument("--search", action="append", default=[], metavar="FOLDER", help=folder)


def read_config(args: argparse.Namespace, trust: list[str] | None = None) -> Any:
    """The config that the command line describes. What lies in the current folder can be imported from now on."""
    from trainformer.config import load_config

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return load_config(args.config, args.overrides, search=args.search, trust=trust or (), variables=variables_of(args))


def variables_of(args: argparse.Namespace) -> dict[str, Any]:
    """The values of --var by name."""
    from trainformer.config.overrides import parse_assignment

    return dict(parse_assignment(text, "a variable such as --var width=8") for text in args.variables)


def run(args: argparse.Namespace) -> int:
    """Build the target and let it do its work."""
    from trainformer.config import materialize

    config = read_config(args, args.trust)
    key = target_of(config, args.target)
    recipes.seed(config[key])
    thing = materialize(config[key])
    if _is_a(thing, "trainformer.trainer", "Trainer"):
        recipes.keep(thing, config, key)
    _start(thing, key)
    return 0


def target_of(config: Any, wanted: str | None = None) -> str:
    """The key at the top that is to be run."""
    from trainformer.config.nodes import as_call
    from trainformer.core.errors import BadArgument, did_you_mean, expected

    buildable = [key for key, value in config.items() if as_call(value) is not None]
    there = f"What can be built: {', '.join(map(str, buildable)) or 'nothing'}."
    if wanted is not None:
        if wanted in buildable:
            return wanted
        hint = did_you_mean(wanted, map(str, buildable)) or there
        raise BadArgument(expected(f"a target that {config.file} describes by a tag or `type`", wanted, hint))
    for key in ("trainer", "main"):
        if key in buildable:
            return key
    if len(buildable) == 1:
        return buildable[0]
    raise BadArgument(
        f"Expected {config.file} to have a key trainer or main, or only one that can be built. {there} "
        f"Choose by --target NAME."
    )


def _start(thing: Any, key: str) -> None:
    from trainformer.core.errors import BadArgument, expected

    if _is_a(thing, "trainformer.trainer", "Trainer"):
        thing.fit()
    elif _is_a(thing, "torch.nn", "Module"):  # its train() only switches a mode
        do = "A model does not train itself: name a trainer."
        raise BadArgument(expected(f"{key!r} to be something that runs", type(thing).__name__, do))
    elif callable(getattr(thing, "train", None)):
        thing.train()
    elif callable(thing):
        thing()
    else:
        do = "A function to be called is written as !partial:module:function."
        raise BadArgument(expected(f"{key!r} to have fit() or train(), or to be a function", thing, do))


def _is_a(thing: Any, module: str, name: str) -> bool:
    """Whether it is of a class, asked without importing the class: who never imported it has none of it."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(thing, kind)
