"""`trainformer predict RUN DATA`: write the predictions of a run's model as JSON lines, CSV or Parquet.

A row has the index of the sample, what the task predicts as numbers and lists, and class names or text where the task
has them. For a language model it has the prompt and the generated text. A file appears complete or not at all.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from trainformer.cli.app import Command
from trainformer.cli.output import check_free, note, positive, stdout_to_stderr
from trainformer.cli.trained import add_batch_size_argument, add_run_arguments, load_trained
from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require

if TYPE_CHECKING:
    from trainformer import Trainer

Rows = Iterable[dict[str, Any]]

FORMATS = ("jsonl", "csv", "parquet")
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_ROW_GROUP = 4096  # rows per row group of Parquet


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
    with stdout_to_stderr():
        trained = load_trained(args)
        trainer = trained.trainer
        if hasattr(trainer.task, "predict_step") or not callable(getattr(trainer.task, "generate", None)):
            predictions = trainer.predict(args.data)
        else:
            size = trainer.eval_batch_size or trainer.batch_size
            predictions = list(_generated(trainer, args.data, size, args.max_new_tokens))
    if not trainer.is_main:
        return
    rows = rows_of(trainer.task, predictions)
    if args.out is None:
        _WRITERS[args.format](rows, sys.stdout)
    else:
        write_file(rows, args.out, args.format)
        note(f"wrote {len(predictions)} predictions of {trained.checkpoint.path} to {args.out}")


def rows_of(task: Any, predictions: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Predictions as plain values, one row per sample."""
    names, tokenizer = getattr(task, "class_names", None), cast(Any, getattr(task, "text_tokenizer", None))
    for index, prediction in enumerate(predictions):
        row = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in prediction.items()}
        if "generated" in row and hasattr(tokenizer, "decode"):
            # The tokens would repeat the text as numbers, with padding.
            row = {"text": tokenizer.decode(row.pop("generated"), skip_special_tokens=True), **row}
        yield {"index": index, **_named(row.get("prediction"), names), **row}


def _named(prediction: Any, names: list[str] | None) -> dict[str, Any]:
    """The names of predicted classes: of an index, of one index per token, or of one boolean per class."""
    if prediction is None or not names:
        return {}
    if not isinstance(prediction, list):
        return {"class": names[prediction]}
    if all(isinstance(each, bool) for each in prediction):
        return {"classes": [name for name, holds in zip(names, prediction, strict=True) if holds]}
    return {"classes": [names[each] for each in prediction if each >= 0]}  # below 0: padding


# -- language models -------------------------------------------------------------------------------------------------


def _generated(trainer: Trainer, data: str, batch_size: int, max_new_tokens: int) -> Iterator[dict[str, str]]:
    """The prompts of a file and the text generated for each, in order; each line of a text file is a prompt."""
    from rich.console import Console
    from rich.progress import track

    from trainformer.data.text import load_text

    task = trainer.task
    is_text = Path(data).suffix == ".txt"
    records = load_text(data, split="line" if is_text else None)
    prompts = [_prompt(record, task, index) for index, record in enumerate(records)]
    batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    shown = track(batches, "generating", console=Console(stderr=True), transient=True, disable=not trainer.is_main)
    with trainer.eval_mode():
        for batch in shown:
            for prompt, text in zip(batch, task.generate(batch, max_new_tokens=max_new_tokens), strict=True):
                yield {"prompt": prompt, "text": text}


def _prompt(record: Any, task: Any, index: int) -> str:
    """The prompt of a record: its prompt or text, or its conversation up to the assistant's turn."""
    if isinstance(record, Mapping):
        for name in ("prompt", "text"):
            if isinstance(record.get(name), str) and record[name]:
                return record[name]
        if isinstance(record.get("messages"), list) and getattr(task.text_tokenizer, "chat_template", None):
            return task.text_tokenizer.apply_chat_template(
                record["messages"], tokenize=False, add_generation_prompt=True
            )
    do = 'Write prompts as lines of a .txt file, or as {"prompt": ...} in a .jsonl file.'
    found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
    raise DataError(expected(f"record {index} to have a prompt, a text or messages", found, do))


# -- files -----------------------------------------------------------------------------------------------------------


def write_file(rows: Rows, path: Path, format: str) -> None:
    """Write all rows; only a few of them are in memory at a time."""
    with _replacing(path) as draft:
        if format == "parquet":
            _write_parquet(rows, draft)
        else:
            with draft.open("w", encoding="utf-8", newline="") as file:
                _WRITERS[format](rows, file)


def _write_lines(rows: Rows, file: TextIO) -> None:
    from trainformer.context.jsonable import jsonable

    for row in rows:
        file.write(json.dumps(jsonable(row), ensure_ascii=False) + "\n")


def _write_csv(rows: Rows, file: TextIO) -> None:
    """CSV has no lists: they are written as JSON."""
    first, rows = _peeked(rows)
    writer = csv.DictWriter(file, fieldnames=list(first))
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v for key, v in row.items()}
        )


_WRITERS: dict[str, Callable[[Rows, TextIO], None]] = {"jsonl": _write_lines, "csv": _write_csv}


def _write_parquet(rows: Rows, path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    _, rows = _peeked(rows)
    rows = iter(rows)
    first = list(islice(rows, _ROW_GROUP))
    group = arrow.Table.from_pylist(first)
    # While all lists of a column are empty (no class was predicted), the type of their items is unknown.
    while any(map(_is_unknown, group.schema.types)) and (more := list(islice(rows, _ROW_GROUP))):
        first += more
        group = arrow.Table.from_pylist(first)
    with parquet.ParquetWriter(path, group.schema) as writer:
        while len(group):
            writer.write_table(group)
            group = arrow.Table.from_pylist(list(islice(rows, _ROW_GROUP)), schema=group.schema)


def _is_unknown(kind: Any) -> bool:
    from pyarrow import types

    return types.is_null(kind) or (types.is_list(kind) and _is_unknown(kind.value_type))


def _peeked(rows: Rows) -> tuple[dict[str, Any], Rows]:
    """The first row, which names the columns, and all rows."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise DataError("There is nothing to write: the data have no samples.")
    return first, chain([first], rows)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; the file is renamed when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


COMMANDS = {"predict": Command(_add_arguments, _run, _parse)}
