"""Predictions as columns of plain values with ids and class names, and as files: JSON lines, CSV or Parquet.

Files are written batch by batch, so that only one batch is in memory, and get their name when they are complete.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TextIO, cast

from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.utils.files import sync
from trainformer.utils.processes import is_alive

#: Values of a batch by name: one item per sample. A column is a tensor or a list.
Columns = Mapping[str, Any]

FORMATS = ("jsonl", "csv", "parquet")
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}


def format_of(path: str | Path) -> str:
    """The format that the suffix of a file stands for.

    >>> format_of("predictions.parquet")
    'parquet'
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise BadArgument(expected(f"a file that ends in {', '.join(SUFFIXES)}", str(path)))
    return SUFFIXES[suffix]


def named_columns(task: Any, batches: Iterable[Columns], ids: Iterator[Any] | None = None) -> Iterator[Columns]:
    """Predictions with the index and the id of each sample, and class names or text where the task has them."""
    names, tokenizer = getattr(task, "class_names", None), cast(Any, getattr(task, "text_tokenizer", None))
    indices = count()
    from trainformer.tasks.base import provides  # which imports NumPy

    if provides(task, "merge_predictions"):
        batches = task.merge_predictions(batches)
    for batch in batches:
        columns = dict(batch)
        size = len(next(iter(columns.values()), ()))
        index = [next(indices) for _ in range(size)]
        first: dict[str, Any] = {"index": index, "id": [next(ids) for _ in index] if ids is not None else index}
        if "generated" in columns and hasattr(tokenizer, "decode"):
            # The tokens would repeat the text as numbers, with padding.
            tokens = columns.pop("generated").tolist()
            first["text"] = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        if names and "prediction" in columns and "tags" not in columns:
            first |= _named(columns["prediction"].tolist(), names)
        yield first | columns


def _named(predictions: list[Any], names: Sequence[str]) -> dict[str, Any]:
    """The names of predicted classes: of an index, of one index per token, or of one boolean per class."""
    if predictions and not isinstance(predictions[0], list):
        return {"class": [names[each] for each in predictions]}
    return {"classes": [_names_in(row, names) for row in predictions]}


def _names_in(row: list[Any], names: Sequence[str]) -> list[str]:
    if all(isinstance(each, bool) for each in row):
        return [name for name, holds in zip(names, row, strict=True) if holds]
    return [names[each] for each in row if each >= 0]  # below 0: padding


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """A batch as one dict of plain values per sample."""
    values = {name: _plain(column) for name, column in columns.items()}
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _plain(column: Any) -> list[Any]:
    if hasattr(column, "tolist"):
        return list(column.tolist())
    return [value.tolist() if hasattr(value, "tolist") else value for value in column]


# -- files -------------------------------------------------------------------------------------------------


def write_file(batches: Iterable[Columns], path: Path, format: str) -> int:
    """Write all batches as they come; returns the number of rows. On any failure there is no file."""
    with _replacing(path) as draft:
        if format == "parquet":
            return _write_parquet(batches, draft)
        with draft.open("w", encoding="utf-8", newline="") as file:
            return WRITERS[format](batches, file)


def _write_lines(batches: Iterable[Columns], file: TextIO) -> int:
    written = 0
    for batch in _checked(batches):
        rows = rows_of(batch)
        file.writelines(json.dumps(jsonable(row), ensure_ascii=False) + "\n" for row in rows)
        written += len(rows)
    return written


def _write_csv(batches: Iterable[Columns], file: TextIO) -> int:
    """CSV has no lists: they are written as JSON."""
    written, writer = 0, None
    for batch in _checked(batches):
        if writer is None:
            writer = csv.DictWriter(file, fieldnames=list(batch))
            writer.writeheader()
        for row in rows_of(batch):
            writer.writerow(
                {key: json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v for key, v in row.items()}
            )
            written += 1
    return written


WRITERS: dict[str, Callable[[Iterable[Columns], TextIO], int]] = {"jsonl": _write_lines, "csv": _write_csv}


def _write_parquet(batches: Iterable[Columns], path: Path) -> int:
    arrow = require("pyarrow", "datasets", "to write Parquet")
    parquet = require("pyarrow.parquet", "datasets", "to write Parquet")
    written, writer = 0, None
    try:
        for batch in _checked(batches):
            table = arrow.table({name: _arrow(column) for name, column in batch.items()})
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
            writer.write_table(table.cast(writer.schema))
            written += len(table)
    finally:
        if writer is not None:
            writer.close()
    return written


def _arrow(column: Any) -> Any:
    """A column for Arrow, without a Python object for each number."""
    arrow = require("pyarrow", "datasets", "to write Parquet")
    if not hasattr(column, "numpy"):
        values = _plain(column)
        if values and hasattr(column[0], "tolist"):
            return arrow.array(values)  # tensors of unequal shapes
        if values and isinstance(values[0], list):
            return arrow.array(values, arrow.list_(arrow.string()))  # names, of which there may be none
        return arrow.array(values)
    dtype = str(column.dtype)
    array = (column.float() if dtype == "torch.bfloat16" else column).contiguous().numpy()
    result = arrow.array(array.reshape(-1))
    for width in reversed(array.shape[1:]):
        offsets = arrow.array(range(0, len(result) + 1, width) if width else [0] * (len(array) + 1), arrow.int32())
        result = arrow.ListArray.from_arrays(offsets, result)
    return result


def _checked(batches: Iterable[Columns]) -> Iterator[Columns]:
    """Batches that all have the columns of the first; there must be one."""
    names: list[str] | None = None
    for batch in batches:
        if names is not None and list(batch) != names:
            raise DataError(expected(f"the same columns in all batches ({', '.join(names)})", ", ".join(batch)))
        names = list(batch)
        yield batch
    if names is None:
        raise DataError("There is nothing to write: the data have no samples.")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; the file is renamed when it is complete. Removes what killed processes left."""
    if path.is_dir():
        raise BadArgument(expected("a file to write", f"the folder {path}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        number = left.name.removesuffix(".tmp").rpartition(".")[2]
        if number.isdigit() and not is_alive(int(number)):
            left.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)
