"""Records of JSON files: JSON Lines, which are read a line at a time, and lists, which are parsed at once.

Owns `JSONLDataset`, telling the two apart, and the errors for lines that are no records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError
from trainformer.data.dataset import Indexed
from trainformer.data.text.files import LineIndex, TextFile, content_suffix, digest
from trainformer.data.text.schemas import expected_value, form_of, text_value, value_of
from trainformer.data.text.tables import JSON, RecordList, parse_json, position, wrapped_list


class JSONLDataset(Indexed):
    """Records of a JSON Lines file: ``{"text": ..., "label": ...}``, the label only where it is there.

    A line is parsed when its sample is read; only where lines begin is found out at once (1 GB in about a second). With
    `text_key=None` the whole record is given, as it is. A `.json` file, a list of records, is parsed at once and kept
    in memory; more than 1 GB of it are refused.

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
        index = position(index, len(self))
        record = self._source[index] if isinstance(self._source, RecordList) else _parse_line(self._source, index)
        if not isinstance(record, dict):
            raise DataError(f"{self.where(index)}: {expected_value('a JSON object', record)}")
        if self.text_key is None:
            return record
        text = record.get(self.text_key)
        if not isinstance(text, str):
            text = self._text_of(record, index)
        has_label = self.label_key is not None and self.label_key in record
        return {"text": text, "label": record[self.label_key]} if has_label else {"text": text}

    def _text_of(self, record: dict[str, Any], index: int) -> str:
        """The text, if it is one; else the error that says where."""
        assert self.text_key is not None
        try:
            return text_value(value_of(record, self.text_key), self.text_key)
        except DataError as error:
            raise DataError(f"{self.where(index)}: {error}") from None

    @property
    def in_memory(self) -> bool:
        """Whether the file was parsed at once."""
        return isinstance(self._source, RecordList)

    def where(self, index: int) -> str:
        """File and line of a record, for messages."""
        return self._source.where(index)


def _json_source(file: TextFile) -> LineIndex | RecordList:
    """The lines of a file, or its records parsed at once. Many call JSON Lines `.json` all the same."""
    if content_suffix(file.path) not in JSON:
        return LineIndex(file)
    head = file.read(file.begin, min(file.size, file.begin + 4096)).lstrip()
    if not head.startswith(b"{"):
        return parse_json(file)
    lines = LineIndex(file)
    try:
        first = json.loads(lines.text(0))
    except json.JSONDecodeError:
        return parse_json(file)  # one object over several lines
    is_wrapper = len(lines) == 1 and wrapped_list(first) is not None and not _is_record(first)
    return parse_json(file) if is_wrapper else lines


def _is_record(value: Mapping[str, Any]) -> bool:
    """Whether a mapping that may hold a list of records is itself one."""
    try:
        form_of([value])
    except DataError:
        return False
    return True


def _parse_line(lines: LineIndex, index: int) -> Any:
    line = lines.text(index)
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        shown = line if len(line) <= 60 else f"{line[:60]}..."
        advice = "A file that is one list must be called .json." if index == 0 and line.startswith("[") else ""
        raise DataError(
            f"{lines.where(index)}: Expected one JSON object per line, received {shown!r} ({error.msg} at column "
            f"{error.colno}). {advice}".strip()
        ) from error
