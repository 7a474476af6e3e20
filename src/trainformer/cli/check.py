"""`trainformer check`, with the options of `train`: see in seconds whether the training would work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainformer.cli import options
from trainformer.cli.output import print_json
from trainformer.cli.trained import only_the_result_on_stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes, as far as it does not depend on the task."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options.add_arguments(parser)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """With the options of the task that they name."""
    return options.parse(parser, words)


def run(args: argparse.Namespace) -> int:
    """Build the trainer and check it; 1 if something would go wrong."""
    if not args.json:
        return 0 if _check(args).ok else 1
    with only_the_result_on_stdout():
        report = _check(args)
    print_json({"ok": report.ok, **asdict(report)})
    return 0 if report.ok else 1


def _check(args: argparse.Namespace) -> Any:
    from trainformer.cli import recipes

    return recipes.build(args.config["trainer"], trust=args.trust).check(raise_on_failure=False)
