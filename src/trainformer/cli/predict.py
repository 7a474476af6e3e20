"""`trainformer predict RUN DATA`: write the predictions of a run's model as JSON lines, CSV or Parquet.

A row has the index and the id of the sample (the name of its file, or the id of its record), what the task predicts as
numbers and lists, and class names or text where the task has them. For a language model it has the prompt and the
generated text. Rows are written as they are made, and a file appears complete or not at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from trainformer.cli.app import Command
from trainformer.cli.output import check_free, note, positive, stdout_to_stderr
from trainformer.cli.trained import add_batch_size_argument, add_run_arguments, load_trained
from trainformer.core.optional import require
from trainformer.run.predictions import FORMATS, SUFFIXES, WRITERS, Columns, write_file


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("data", metavar="DATA", help="a path or a name that the run's task can load")
    out = "the file to write: .jsonl, .csv or .parquet; without it, JSON lines are printed"
    parser.add_argument("--out", metavar="FILE", type=Path, help=out)
    parser.add_argument("--format", choices=FORMATS, help="if the suffix of the file does not say it")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    add_batch_size_argument(parser)
    longest = "tokens that a language model generates per prompt (default: 64)"
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help=longest)


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Also find out which format is meant."""
    args = parser.parse_args(words)
    args.format = args.format or (SUFFIXES.get(args.out.suffix.lower()) if args.out else "jsonl")
    if args.format is None:
        suffixes = ", ".join(SUFFIXES)
        parser.error(f"--out: expected a file that ends in {suffixes}, or --format; received {str(args.out)!r}")
    if args.out is None and args.format == "parquet":
        parser.error("--format parquet: expected --out FILE as well, because it cannot be printed")
    return args


def _run(args: argparse.Namespace) -> None:
    if args.out is not None:
        check_free(args.out, args.force)
    if args.format == "parquet":
        require("pyarrow", "datasets", "to write Parquet")
    printed = sys.stdout
    with stdout_to_stderr():
        trained = load_trained(args)
        if trained.predicts_records:
            batches = trained.predicted_columns(args.data, max_new_tokens=args.max_new_tokens)
            batches = track_rows(batches, None, trained.is_main)
        else:
            batches = trained.predicted_columns(args.data)
        if args.out is None:
            trained.consume_on_main(batches, lambda found: WRITERS[args.format](found, printed))
            return
        count = trained.consume_on_main(batches, lambda found: write_file(found, args.out, args.format))
        if trained.is_main:
            note(f"wrote {count} predictions of {trained.weights} to {args.out}")


def track_rows(batches: Iterator[Columns], total: int | None, is_main: bool) -> Iterator[Columns]:
    """Show the progress on stderr while texts are generated."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    shown = is_main and console.is_terminal
    return iter(track(batches, "generating", total=total, console=console, transient=True, disable=not shown))


COMMANDS = {"predict": Command(_add_arguments, _run, _parse)}
