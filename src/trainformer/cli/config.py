"""`trainformer config show|graph|code CONFIG`: look at a config; nothing that it names is built or imported."""

from __future__ import annotations

import argparse
from typing import Any

from trainformer.cli.frame import add_action
from trainformer.cli.run import add_config_arguments, read_config, variables_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    show = _action(actions, "show", "the config as YAML, with templates, variables and changes applied")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--preprocessed", action="store_true", help="only the text of the file after templates")
    graph = _action(actions, "graph", "the objects that the config describes, and which of them are shared")
    graph.add_argument("--format", choices=("text", "dot"), default="text", help="a tree, or a graph for Graphviz")
    _action(actions, "code", "the Python that builds the same objects")


def _action(actions: Any, name: str, purpose: str) -> argparse.ArgumentParser:
    parser = add_action(actions, name, purpose)
    add_config_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    print(_text(args).removesuffix("\n"))
    return 0


def _text(args: argparse.Namespace) -> str:
    from trainformer import config as configs

    if args.action == "show" and args.preprocessed:
        from trainformer.config.loading import preprocessed_text

        return preprocessed_text(args.config, variables_of(args), args.search)
    config = read_config(args)
    if args.action == "show":
        return configs.to_json(config) if args.json else configs.to_yaml(config)
    if args.action == "graph":
        return configs.to_dot(config) if args.format == "dot" else configs.to_tree(config)
    return configs.to_python(config)
