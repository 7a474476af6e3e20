"""Readers of records: lists in memory, JSON, JSON Lines and CSV files, Parquet and HF `datasets`, files of a folder.

All have a length and an index. Two optional members describe them: ``location(index)``, where a record is, for error
messages, and `fingerprint`, which changes with the content. JSON Lines are read lazily, a line at a time.
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
from trainformer.data.dataset import IndexedDataset, normalize_index
from trainformer.data.text.files import LineIndex, TextFile, content_suffix, digest
from trainformer.data.text.schemas import detect_schema, expected_value, require_key, require_text
from trainformer.utils.files import decode_json, decode_record

MAX_PARSED_BYTES = 1 << 30  # of a file that is parsed at once: it takes ten times that in memory, as Python objects
_TEXT_ENDINGS = (
    "txt text md markdown rst tex org adoc log html htm xml "
    "py pyi c h cc cpp hpp cu cs java kt scala js jsx ts tsx go rs rb php pl lua swift m jl "
    "r hs ml ex erl clj lisp el sh bash sql css toml yaml yml ini cfg"
)
TEXT_SUFFIXES = frozenset("." + ending for ending in _TEXT_ENDINGS.split())
LINES, JSON, CSV, PARQUET = {".jsonl", ".ndjson"}, {".json"}, {".csv", ".tsv"}, {".parquet", ".pq"}
RECORD_SUFFIXES = frozenset(LINES | JSON | CSV | PARQUET)


def location_of(records: Any, index: int) -> str:
    """Where a record is, for error messages."""
    return records.location(index) if hasattr(records, "location") else f"record {index}"


def known_fingerprint(records: Any) -> str | None:
    """A digest that changes with the content, without reading it; None if the source has none.

    >>> known_fingerprint(["some", "texts"]) is None
    True
    """
    return getattr(records, "fingerprint", None) or getattr(records, "_fingerprint", None)


class RecordList(IndexedDataset):
    """Records in memory, and the file they come from."""

    in_memory = True

    def __init__(self, records: Sequence[Any], file: TextFile | None = None) -> None:
        self.records = records
        self.fingerprint = None if file is None else file.fingerprint
        self._origin = "" if file is None else f"{file.path}, "

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[normalize_index(index, len(self))]

    def location(self, index: int) -> str:
        return f"{self._origin}record {index}"


class TextFiles(IndexedDataset):
    """Whole files, each a document ``{"text"}``, read lazily."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.files = [str(path) for path in files]
        status = [(os.path.abspath(path), os.stat(path)) for path in self.files]
        self.fingerprint = digest(*((path, known.st_size, known.st_mtime_ns) for path, known in status))
        large = next((path for path, known in status if known.st_size > MAX_PARSED_BYTES), None)
        if large is not None:
            do = "Pass split='line' or split='paragraph'."
            raise DataError(expected("files of at most 1 GB as single documents", large, do))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, str]:
        file = TextFile(self.files[normalize_index(index, len(self))])
        return {"text": file.decode(file.read(file.begin, file.size), file.begin).replace("\r\n", "\n")}

    def location(self, index: int) -> str:
        return self.files[index]


class ConcatRecords(IndexedDataset):
    """Several sources, concatenated."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._ends = list(accumulate(len(part) for part in self.parts))
        known = [known_fingerprint(part) for part in self.parts]
        self.fingerprint = None if None in known else digest(*known)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        part, place = self._find(normalize_index(index, len(self)))
        return part[place]

    def location(self, index: int) -> str:
        return location_of(*self._find(index))

    def _find(self, index: int) -> tuple[Any, int]:
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def concat_records(parts: Sequence[Any]) -> Any:
    """Several sources as one."""
    return parts[0] if len(parts) == 1 else ConcatRecords(parts)


# -- files that are parsed at once -------------------------------------------------------------------------


def parse_json(file: TextFile) -> RecordList:
    """The records of a JSON file: a list of them, or a mapping with one such list."""
    text = _read_all(file, "JSON Lines (one record per line, .jsonl), which is read lazily: jq -c '.[]' data.json")
    try:
        content = decode_record(text)
    except json.JSONDecodeError as error:
        where = f"{file.path}, line {error.lineno}" if error.doc else file.path
        raise DataError(f"{where}: Expected JSON, received: {error.msg}.") from error
    if isinstance(content, Mapping):
        content = wrapped_list(content) or content
    if not isinstance(content, list):
        raise DataError(
            f"Expected '{file.path}' to contain a list of records, received {type(content).__name__}. Write "
            '[{"text": "..."}, ...], or one record per line.'
        )
    return RecordList(content, file)


def wrapped_list(content: Mapping[str, Any]) -> list[Any] | None:
    """The only list of records in a mapping: ``{"version": 1, "data": [{...}, ...]}``."""
    lists = [value for value in content.values() if isinstance(value, list)]
    found = len(lists) == 1 and bool(lists[0]) and all(isinstance(record, Mapping) for record in lists[0])
    return lists[0] if found else None


def read_csv(path: str | Path) -> RecordList:
    """The rows of a CSV or TSV file as records of strings; the first row has the column names."""
    file = TextFile(path)
    text = _read_all(file, "Parquet or JSON Lines, which are read lazily")
    header = text[: text.find("\n") + 1]
    # The delimiter is the most frequent candidate in the header.
    delimiter = "\t" if content_suffix(path) in (".tsv", ".tab") else max(",;\t|", key=header.count)
    limit = csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is too small for documents
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        records = list(_rows(rows, file))
    except csv.Error as error:
        raise DataError(f"Expected a table that can be read as CSV, received '{file.path}': {error}.") from error
    finally:
        csv.field_size_limit(limit)
    return RecordList(records, file)


def _rows(rows: Any, file: TextFile) -> Iterator[dict[str, str]]:
    names = [name.strip() for name in next(rows, [])]
    for row in rows:
        if row and len(row) != len(names):
            raise DataError(
                f"{file.path}, line {rows.line_num}: Expected {len(names)} values ({', '.join(names)}), received "
                f"{len(row)}. Quote values that contain the delimiter or a line break."
            )
        if row:
            yield dict(zip(names, row, strict=True))


def _read_all(file: TextFile, instead: str) -> str:
    if file.size > MAX_PARSED_BYTES:
        size = f"{file.size / 1e9:.1f} GB in '{file.path}'"
        raise DataError(expected("at most 1 GB in a file that is parsed at once", size, f"Convert it to {instead}."))
    return file.decode(file.read(file.begin, file.size), file.begin)


def read_parquet(paths: Sequence[Path]) -> Any:
    """Parquet files through HF `datasets`: converted once to Arrow in its cache, and memory-mapped from there."""
    datasets = require("datasets", "datasets", "to read Parquet files")
    try:
        return datasets.Dataset.from_parquet([str(path) for path in paths])
    except Exception as error:  # from Arrow, the builder that wraps it, or the file system
        reason = error.__cause__ or error
        names = ", ".join(f"'{path}'" for path in paths[:3])
        raise DataError(f"Expected Parquet files of one kind, received {names}: {reason}.") from error


class JSONLDataset(IndexedDataset):
    """Records of a JSON Lines file: ``{"text": ..., "label": ...}``, the label only if the record has one.

    A line is parsed when its sample is read; only the line offsets are found up front (1 GB in about a second). With
    `text_key=None` a sample is the whole record. A `.json` file (a list of records) is parsed at once and kept in
    memory, up to 1 GB.

    >>> _ = Path("two.jsonl").write_text('{"text": "good", "stars": 5}\\n{"text": "bad", "stars": 1}\\n')
    >>> JSONLDataset("two.jsonl", label_key="stars")[1]
    {'text': 'bad', 'label': 1}
    """

    def __init__(self, path: str | Path, text_key: str | None = "text", label_key: str | None = None) -> None:
        self.path = path
        self.text_key = text_key
        self.label_key = label_key
        file = TextFile(path)
        self._source = _json_source(file)
        self.fingerprint = digest(file.fingerprint, text_key, label_key)
        if not len(self):
            raise DataError(f"Expected at least one record in '{path}', received an empty file.")

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = normalize_index(index, len(self))
        record = self._source[index] if isinstance(self._source, RecordList) else _parse_line(self._source, index)
        if not isinstance(record, dict):
            raise DataError(f"{self.location(index)}: {expected_value('a JSON object', record)}")
        if self.text_key is None:
            return record
        try:
            text = require_text(require_key(record, self.text_key), self.text_key)
        except DataError as error:
            raise DataError(f"{self.location(index)}: {error}") from None
        has_label = self.label_key is not None and self.label_key in record
        return {"text": text, "label": record[self.label_key]} if has_label else {"text": text}

    @property
    def in_memory(self) -> bool:
        return isinstance(self._source, RecordList)

    def location(self, index: int) -> str:
        return self._source.location(index)


def _json_source(file: TextFile) -> LineIndex | RecordList:
    """The lines of a file, or its records parsed at once. JSON Lines are often named `.json` too."""
    if content_suffix(file.path) not in JSON:
        return LineIndex(file)
    head = file.read(file.begin, min(file.size, file.begin + 4096)).lstrip()
    if not head.startswith(b"{"):
        return parse_json(file)
    lines = LineIndex(file)
    try:
        first = decode_json(lines.text(0))
    except json.JSONDecodeError:
        return parse_json(file)  # one object over several lines
    is_wrapper = len(lines) == 1 and wrapped_list(first) is not None and not _is_record(first)
    return parse_json(file) if is_wrapper else lines


def _is_record(value: Mapping[str, Any]) -> bool:
    """Whether a mapping that contains a list of records is itself a record."""
    try:
        detect_schema([value])
    except DataError:
        return False
    return True


def _parse_line(lines: LineIndex, index: int) -> Any:
    line = lines.text(index)
    try:
        return decode_record(line)
    except json.JSONDecodeError as error:
        shown = line if len(line) <= 60 else f"{line[:60]}..."
        advice = "A file that is one list must be called .json." if index == 0 and line.startswith("[") else ""
        raise DataError(
            f"{lines.location(index)}: Expected one JSON object per line, received {shown!r} ({error.msg}"
            f"{f' at column {error.colno}' if error.doc else ''}). {advice}".strip()
        ) from error
