"""Rows of plain values in files: JSON lines, CSV and Parquet. A file appears whole or not at all."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require

Rows = Iterable[dict[str, Any]]

FORMATS = ("jsonl", "csv", "parquet")
ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_GROUP = 4096  # rows that Parquet keeps together


def format_of(path: Path) -> str | None:
    """What the ending of a file says."""
    return ENDINGS.get(path.suffix.lower())


def check_free(path: Path, force: bool) -> None:
    """Refuse to write over a file, unless that is wanted."""
    if path.is_dir():
        raise BadArgument(expected("the name of a file to write", str(path), "This is a folder."))
    if path.exists() and not force:
        raise BadArgument(expected("a file that is not there yet", str(path), "Pass --force to replace it."))


def require_parquet() -> None:
    """Say early that something is missing."""
    require("pyarrow", "datasets", "to write Parquet")


def write_file(rows: Rows, path: Path, format: str) -> None:
    """Write all rows; memory for them is needed in small portions only."""
    with _replacing(path) as draft:
        if format == "parquet":
            _write_parquet(rows, draft)
        else:
            with draft.open("w", encoding="utf-8", newline="") as file:
                write_text(rows, file, format)


def write_text(rows: Rows, file: TextIO, format: str) -> None:
    """Write all rows as text."""
    _WRITERS[format](rows, file)


def _write_lines(rows: Rows, file: TextIO) -> None:
    from trainformer.context.jsonable import jsonable

    for row in rows:
        file.write(json.dumps(jsonable(row), ensure_ascii=False) + "\n")


def _write_csv(rows: Rows, file: TextIO) -> None:
    """Lists become JSON: a table has no place for them."""
    first, rows = _opened(rows)
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

    _, rows = _opened(rows)
    rows = iter(rows)
    first = list(islice(rows, _GROUP))
    group = arrow.Table.from_pylist(first)
    # Where all lists are empty so far (no class was predicted), nobody knows yet what will be in them.
    while any(map(_is_unknown, group.schema.types)) and (more := list(islice(rows, _GROUP))):
        first += more
        group = arrow.Table.from_pylist(first)
    with parquet.ParquetWriter(path, group.schema) as writer:
        while len(group):
            writer.write_table(group)
            group = arrow.Table.from_pylist(list(islice(rows, _GROUP)), schema=group.schema)


def _is_unknown(kind: Any) -> bool:
    from pyarrow import types

    return types.is_null(kind) or (types.is_list(kind) and _is_unknown(kind.value_type))


def _opened(rows: Rows) -> tuple[dict[str, Any], Rows]:
    """The first row, and all of them. Without any, nobody knows the columns."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise DataError("There is nothing to write: the data have no samples.")
    return first, chain([first], rows)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name to write to; the file gets its own when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
