"""`trainformer predict RUN DATA`: what a run's model says to each sample, as JSON lines, CSV or Parquet.

A row has the sample's place as `index`, what the task predicts as numbers and lists, and the names or the text that go
with it where the task knows them. Of a language model it has the text that follows each prompt (`cli.continuations`).
Files are written by `cli.row_files`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainformer.cli import row_files
from trainformer.cli.output import note
from trainformer.cli.trained import (
    add_batch_size_argument,
    add_run_arguments,
    load_trained,
    only_the_result_on_stdout,
    positive,
)

if TYPE_CHECKING:
    from trainformer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_run_arguments(parser)
    parser.add_argument("data", metavar="DATA", help="a path or a name, as the run's task reads it")
    out = "the file to write: .jsonl, .csv or .parquet; without it, JSON lines are printed"
    parser.add_argument("--out", metavar="FILE", type=Path, help=out)
    parser.add_argument("--format", choices=row_files.FORMATS, help="if the file's ending does not say it")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    add_batch_size_argument(parser)
    longest = "how far a language model writes on (default: 64)"
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help=longest)


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Also find out which format is meant."""
    args = parser.parse_args(words)
    args.format = args.format or (row_files.format_of(args.out) if args.out else "jsonl")
    if args.format is None:
        endings = ", ".join(row_files.ENDINGS)
        parser.error(f"--out: expected a file that ends in {endings}, or --format; received {str(args.out)!r}")
    if args.out is None and args.format == "parquet":
        parser.error("--format parquet: expected --out FILE as well, it is nothing to print")
    return args


def run(args: argparse.Namespace) -> int:
    """Predict, and write what is predicted."""
    if args.out is not None:
        row_files.check_free(args.out, args.force)
    if args.format == "parquet":
        row_files.require_parquet()
    with only_the_result_on_stdout():
        trained = load_trained(args)
        predictions = _predictions(trained.trainer, args)
    if not trained.trainer.is_main:
        return 0
    rows = rows_of(trained.trainer.task, predictions)
    if args.out is None:
        row_files.write_text(rows, sys.stdout, args.format)
    else:
        row_files.write_file(rows, args.out, args.format)
        note(f"{len(predictions)} predictions of {trained.checkpoint.path} are in {args.out}")
    return 0


def _predictions(trainer: Trainer, args: argparse.Namespace) -> list[dict[str, Any]]:
    from trainformer.cli.continuations import continuations, writes_on

    if not writes_on(trainer.task):
        return trainer.predict(args.data)
    size = trainer.eval_batch_size or trainer.batch_size
    return list(continuations(trainer, args.data, size, args.max_new_tokens))


def rows_of(task: Any, predictions: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Predictions as plain values, one after the other."""
    names, tokenizer = getattr(task, "class_names", None), cast(Any, getattr(task, "text_tokenizer", None))
    for index, prediction in enumerate(predictions):
        row = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in prediction.items()}
        if "generated" in row and hasattr(tokenizer, "decode"):
            # The tokens are the text once more, in numbers, and filled up with padding.
            row = {"text": tokenizer.decode(row.pop("generated"), skip_special_tokens=True), **row}
        yield {"index": index, **_named(row.get("prediction"), names), **row}


def _named(prediction: Any, names: list[str] | None) -> dict[str, Any]:
    """The class or the classes that a prediction stands for: an index, one for each token, or yes and no for each."""
    if prediction is None or not names:
        return {}
    if not isinstance(prediction, list):
        return {"class": names[prediction]}
    if all(isinstance(each, bool) for each in prediction):
        return {"classes": [name for name, holds in zip(names, prediction, strict=True) if holds]}
    return {"classes": [names[each] for each in prediction if each >= 0]}  # below 0: padding
