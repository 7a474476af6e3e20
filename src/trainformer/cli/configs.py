"""`trainformer run CONFIG` builds what a config describes and runs it; `trainformer config` only shows it."""

from __future__ import annotations

import argparse
import os
import pprint
import sys
from typing import TYPE_CHECKING, Any

from trainformer.cli import jax_recipes, recipes
from trainformer.cli.app import Command, add_action
from trainformer.cli.consent import add_trust_argument
from trainformer.cli.output import add_variable_argument, variables_of
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.secrets import mask_text

if TYPE_CHECKING:
    from trainformer.config import Config


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a .yaml, .json, .toml or .py file (only .py is executed), or the folder of a Forgather project",
    )
    change = "change a value (a.b=3) or add one (+a.b=3); the value is YAML"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=change)
    add_variable_argument(parser, "the value of a variable of a template, of !var or of !secret")
    folder = "a folder of templates, searched after the config's own"
    parser.add_argument("--search", action="append", default=[], metavar="FOLDER", help=folder)


def _read_config(args: argparse.Namespace, trust: list[str] | None = None) -> Config:
    """The config with its changes."""
    from trainformer.config import load_config

    # A .py file is a program that the user named; like every program it may import what lies beside it.
    if args.config.lower().endswith(".py") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    variables = variables_of(args)
    return load_config(args.config, args.overrides, search=args.search, trust=trust or (), variables=variables)


# -- run -------------------------------------------------------------------------------------------------------------


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config_arguments(parser)
    target = "the key to run; by default trainer, else main, else the only one that can be built; in a project main"
    parser.add_argument("--target", metavar="NAME", help=target)
    add_trust_argument(parser)


def _run(args: argparse.Namespace) -> None:
    from trainformer.config import materialize

    config = _read_config(args, args.trust)
    key = _target(config, args.target)
    recipes.seed(config[key])
    thing = materialize(config[key], root=config)
    if _is_instance(thing, "trainformer.trainer", "Trainer") or (
        _is_instance(thing, "trainformer.jax.base_trainer", "BaseTrainer")
        and jax_recipes.arguments_of(config[key]) is not None
    ):
        recipes.keep(thing, config, key)
    _start(thing, key)


def _target(config: Config, wanted: str | None = None) -> str:
    """The top-level key to run."""
    from trainformer.config.nodes import as_call

    is_forgather = config.source.forgather
    if is_forgather and "main" in config and wanted in (None, "main"):
        return "main"  # of any kind, also a list
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
    if _is_instance(thing, "trainformer.trainer", "Trainer"):
        thing.fit()
    elif _is_instance(thing, "torch.nn", "Module"):  # its train() only switches a mode
        do = "A model does not train itself: name a trainer."
        raise BadArgument(expected(f"{key!r} to be something that runs", type(thing).__name__, do))
    elif callable(getattr(thing, "train", None)):
        thing.train()
    elif callable(getattr(thing, "run", None)):
        thing.run()
    elif callable(thing):
        thing()
    elif isinstance(thing, list | tuple | dict | str | int | float):
        pprint.pp(thing)
    else:
        do = "A function to be called is written as !partial:module:function."
        raise BadArgument(expected(f"{key!r} to have fit(), train() or run(), or to be a function", thing, do))


def _is_instance(thing: Any, module: str, name: str) -> bool:
    """`isinstance` without an import: if the class was never imported, there are no instances of it."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(thing, kind)


# -- config ----------------------------------------------------------------------------------------------------------


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    show, graph, _ = (
        add_action(actions, name, purpose, has_json=False)
        for name, purpose in (
            ("show", "the config as YAML, with templates, variables and changes applied"),
            ("graph", "the objects that the config describes, and which of them are shared"),
            ("code", "the Python that builds the same objects"),
        )
    )
    for action in actions.choices.values():
        _add_config_arguments(action)
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--preprocessed", action="store_true", help="only the text of the file after templates")
    graph.add_argument("--format", choices=("text", "dot"), default="text", help="a tree, or a graph for Graphviz")


def _show(args: argparse.Namespace) -> None:
    """Print the config; nothing that it names is imported or built."""
    from trainformer import config as configs
    from trainformer.config.nodes import hide_secrets

    if args.action == "show" and args.preprocessed:
        from trainformer.config.loading import preprocessed_text

        text = mask_text(preprocessed_text(args.config, variables_of(args), args.search))
    else:
        config = hide_secrets(_read_config(args))
        if args.action == "show":
            text = configs.to_json(config) if args.json else configs.to_yaml(config)
        elif args.action == "graph":
            text = configs.to_dot(config) if args.format == "dot" else configs.to_tree(config)
        else:
            text = configs.to_python(config)
    print(text.removesuffix("\n"))


COMMANDS = {"run": Command(_add_run_arguments, _run), "config": Command(_add_show_arguments, _show)}
