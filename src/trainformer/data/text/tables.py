"""Sources of records: lists, JSON and CSV files that are parsed at once, Parquet and HF `datasets`, files of a folder.

Owns how each kind of source becomes something with a length whose records are read by index. What a record means is
left to `forms`, and choosing a source by path or name to `records`. Everything here may say two things about itself:
``where(index)``, the place of a record for messages, and `fingerprint`, which changes when the content does.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require
from trainformer.data.dataset import Indexed
from trainformer.data.hub import load_from_hub
from trainformer.data.text.files import Spans, TextFile, content_suffix, digest

MOST_PARSED = 1 << 30  # bytes of a file that is parsed at once: ten times that in memory, as Python objects
_TEXT_ENDINGS = (
    "txt text md markdown rst tex org adoc log html htm xml "
    "py pyi c h cc cpp hpp cu cs java kt scala js jsx ts tsx go rs rb php pl lua swift m jl "
    "r hs ml ex erl clj lisp el sh bash sql css toml yaml yml ini cfg"
)
TEXT_SUFFIXES = frozenset("." + ending for ending in _TEXT_ENDINGS.split())
LINES, JSON, CSV, PARQUET = {".jsonl", ".ndjson"}, {".json"}, {".csv", ".tsv"}, {".parquet", ".pq"}
RECORD_SUFFIXES = frozenset(LINES | JSON | CSV | PARQUET)


def position(index: int, size: int) -> int:
    """The place of an index that may count from the end, else an `IndexError`, which also ends a loop.

    >>> position(-1, 3)
    2
    """
    place = index + size if index < 0 else index
    if not 0 <= place < size:
        raise IndexError(f"index {index} is out of range for {size} samples")
    return int(place)


def where(records: Any, index: int) -> str:
    """The place of a record for messages, as its source says it."""
    return records.where(index) if hasattr(records, "where") else f"record {index}"


def fingerprint(records: Any) -> str | None:
    """A name that changes when the content does, known without reading it; None where nobody knows.

    >>> fingerprint(["some", "texts"]) is None
    True
    """
    return getattr(records, "fingerprint", None) or getattr(records, "_fingerprint", None)


class RecordList(Indexed):
    """Records in memory, with the file they come from."""

    in_memory = True

    def __init__(self, records: Sequence[Any], file: TextFile | None = None) -> None:
        self.records = records
        self.fingerprint = None if file is None else file.fingerprint
        self._origin = "" if file is None else f"{file.path}, "

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[position(index, len(self))]

    def where(self, index: int) -> str:
        """The place of a record; they count from 0."""
        return f"{self._origin}record {index}"


class TextFiles(Indexed):
    """Whole files, each a document ``{"text"}``, read when asked for."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.files = [str(path) for path in files]
        status = [(os.path.abspath(path), os.stat(path)) for path in self.files]
        self.fingerprint = digest(*((path, known.st_size, known.st_mtime_ns) for path, known in status))
        large = next((path for path, known in status if known.st_size > MOST_PARSED), None)
        if large is not None:
            raise DataError(
                expected("files of at most 1 GB as single documents", large, "Pass split='line' or split='paragraph'.")
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, str]:
        file = TextFile(self.files[position(index, len(self))])
        return {"text": _plain_ends(file.decode(file.read(file.begin, file.size), file.begin))}

    def where(self, index: int) -> str:
        """The name of a file."""
        return self.files[index]


class TextPieces(Indexed):
    """Pieces of one file, lines or paragraphs, each a document ``{"text"}``."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.fingerprint = digest(spans.file.fingerprint, type(spans).__name__)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, str]:
        text = self._spans.text(position(index, len(self)))
        return {"text": _plain_ends(text).rstrip()}

    def where(self, index: int) -> str:
        """File and line."""
        return self._spans.where(index)


def _plain_ends(text: str) -> str:
    r"""Ends of lines as ``\n``, as Python reads text."""
    return text.replace("\r\n", "\n")


class Joined(Indexed):
    """Several sources one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._ends = list(accumulate(len(part) for part in self.parts))
        known = [fingerprint(part) for part in self.parts]
        self.fingerprint = None if None in known else digest(*known)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        part, place = self._find(position(index, len(self)))
        return part[place]

    def where(self, index: int) -> str:
        """As the part says it."""
        return where(*self._find(index))

    def _find(self, index: int) -> tuple[Any, int]:
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def joined(parts: Sequence[Any]) -> Any:
    """One source of several."""
    return parts[0] if len(parts) == 1 else Joined(parts)


# -- files that are parsed at once -------------------------------------------------------------------------


def parse_json(file: TextFile) -> RecordList:
    """The records of a JSON file: a list of them, or a mapping that holds nothing but such a list."""
    text = _whole(file, "JSON Lines (one record per line, .jsonl), which is read lazily: jq -c '.[]' data.json")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file.path}, line {error.lineno}: Expected JSON, received: {error.msg}.") from error
    return RecordList(_list_of_records(content, file), file)


def wrapped_list(content: Mapping[str, Any]) -> list[Any] | None:
    """The only list of records in a mapping: ``{"version": 1, "data": [{...}, ...]}``."""
    lists = [value for value in content.values() if isinstance(value, list)]
    found = len(lists) == 1 and bool(lists[0]) and all(isinstance(record, Mapping) for record in lists[0])
    return lists[0] if found else None


def _list_of_records(content: Any, file: TextFile) -> list[Any]:
    if isinstance(content, Mapping):
        content = wrapped_list(content) or content
    if not isinstance(content, list):
        raise DataError(
            f"Expected '{file.path}' to hold a list of records, received {type(content).__name__}. Write "
            '[{"text": "..."}, ...], or one record per line.'
        )
    return content


def read_csv(path: str | Path) -> RecordList:
    """The rows of a CSV or TSV file as records of texts; the first row names the columns."""
    file = TextFile(path)
    text = _whole(file, "Parquet or JSON Lines, which are read lazily")
    header = text[: text.find("\n") + 1]
    # The sign that separates columns is the one that the header has most of.
    delimiter = "\t" if content_suffix(path) == ".tsv" else max(",;\t|", key=header.count)
    before = csv.field_size_limit(sys.maxsize)  # 128 KiB by default, which documents exceed
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        records = list(_rows(rows, file))
    except csv.Error as error:
        raise DataError(f"Expected a table that can be read as CSV, received '{file.path}': {error}.") from error
    finally:
        csv.field_size_limit(before)
    return RecordList(records, file)


def _rows(rows: Any, file: TextFile) -> Iterator[dict[str, str]]:
    names = [name.strip() for name in next(rows, [])]
    for row in rows:
        if row and len(row) != len(names):
            raise DataError(
                f"{file.path}, line {rows.line_num}: Expected {len(names)} values ({', '.join(names)}), received "
                f"{len(row)}. Values that hold the separator or an end of line must be quoted."
            )
        if row:
            yield dict(zip(names, row, strict=True))


def _whole(file: TextFile, instead: str) -> str:
    if file.size > MOST_PARSED:
        size = f"{file.size / 1e9:.1f} GB in '{file.path}'"
        raise DataError(expected("at most 1 GB in a file that is parsed at once", size, f"Convert it to {instead}."))
    return file.decode(file.read(file.begin, file.size), file.begin)


# -- HF datasets -------------------------------------------------------------------------------------------


def read_parquet(paths: Sequence[Path]) -> Any:
    """Parquet files by way of HF `datasets`: written once to its cache as Arrow, and mapped from there."""
    datasets = require("datasets", "datasets", "to read Parquet files")
    try:
        return datasets.Dataset.from_parquet([str(path) for path in paths])
    except Exception as error:  # Arrow's, the builder's that wraps it, the file system's
        reason = error.__cause__ or error
        names = ", ".join(f"'{path}'" for path in paths[:3])
        raise DataError(f"Expected Parquet files of one kind, received {names}: {reason}.") from error


def from_hub(spec: str, split: str | None) -> Any:
    """A data set of the Hugging Face hub: `name`, `name:split`, `name@configuration` or `name@configuration:split`."""
    name, _, named_split = spec.partition(":")
    name, _, configuration = name.partition("@")
    return load_from_hub(name, split or named_split or None, configuration or None)
