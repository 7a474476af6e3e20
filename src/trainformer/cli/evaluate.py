"""`trainformer evaluate RUN`: the metrics of a run's model, on its validation data or on other data."""

from __future__ import annotations

import argparse

from trainformer.cli.output import lines_of, print_json
from trainformer.cli.trained import (
    add_batch_size_argument,
    add_run_arguments,
    load_trained,
    only_the_result_on_stdout,
)
from trainformer.core.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_run_arguments(parser)
    parser.add_argument("--data", metavar="DATA", help="other data than the run's validation data: a path or a name")
    add_batch_size_argument(parser)
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the metrics."""
    with only_the_result_on_stdout():
        trained = load_trained(args)
        if args.data is None and trained.trainer.val_dataloader is None:
            raise DataError(f"{trained.run} was trained without validation data. Name some: --data DATA.")
        metrics = trained.trainer.evaluate(args.data)
    if not trained.trainer.is_main:
        return 0
    if args.json:
        print_json({**trained.source, "data": args.data, "metrics": metrics})
    else:
        print("\n".join([f"{trained.checkpoint.path} on {args.data or 'its validation data'}", *lines_of(metrics)]))
    return 0
