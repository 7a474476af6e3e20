"""Text datasets over any source of records: `TextFileDataset`, `TextDataset`, `ChatDataset`, `StandardRecords`.

All have a length, read lazily by index, pickle small for worker processes, and name file and line of a bad record.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.dataset import IndexedDataset
from trainformer.data.text.files import LineIndex, Spans, TextFile, character_spans, digest
from trainformer.data.text.schemas import (
    SCHEMAS,
    TEXT_KEYS,
    Schema,
    conversation,
    detect_schema,
    missing_keys,
    require_key,
    require_text,
    standard,
)
from trainformer.data.text.sources import records_of
from trainformer.data.text.tables import known_fingerprint, location_of, normalize_index


class TextFileDataset(IndexedDataset):
    r"""The non-blank lines of a text file, or its chunks of `chunk_size` characters, read lazily.

    Lines come without line breaks. Chunks are exact: concatenated they are the file (without a byte order mark).

    >>> _ = Path("few.txt").write_text("Grüße\n\nund Küsse", encoding="utf-8")
    >>> list(TextFileDataset("few.txt")), list(TextFileDataset("few.txt", chunk_size=6))
    (['Grüße', 'und Küsse'], ['Grüße\n', '\nund K', 'üsse'])
    """

    def __init__(self, path: str | Path, chunk_size: int | None = None) -> None:
        self.path = path
        self.chunk_size = chunk_size
        file = TextFile(path)
        self._spans: Spans = LineIndex(file) if chunk_size is None else character_spans(file, chunk_size)
        self.fingerprint = digest(file.fingerprint, chunk_size)
        if not len(self):
            raise DataError(f"Expected some text in '{path}', received an empty file.")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> str:
        return self._spans.text(normalize_index(index, len(self)))

    def location(self, index: int) -> str:
        """File and line of a text, for error messages."""
        return self._spans.location(index)


class _RecordsView(IndexedDataset):
    """Base of the datasets that convert the records of another source."""

    def __init__(self, source: Any, split: str | None) -> None:
        self._records = records_of(source, split)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def in_memory(self) -> bool:
        return isinstance(self._records, list | tuple) or bool(getattr(self._records, "in_memory", False))

    def location(self, index: int) -> str:
        """Where a record is, for error messages: file and line if known."""
        return location_of(self._records, index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = normalize_index(index, len(self))
        record = self._records[index]
        try:
            return self._convert(record)
        except DataError as error:
            raise DataError(f"{self.location(index)}: {error}") from error.__cause__

    @abstractmethod
    def _convert(self, record: Any) -> dict[str, Any]: ...

    def _fingerprint_with(self, *settings: object) -> str | None:
        known = known_fingerprint(self._records)
        return None if known is None else digest(known, *settings)


class TextDataset(_RecordsView):
    """Documents for language modelling: ``{"text": ...}``, from almost any source of text.

    - The path of a text file or a folder of them: every file is a document, or with `split` every non-blank `"line"`
      or `"paragraph"` (text between blank lines).
    - The path of JSON Lines, JSON, CSV or Parquet, `"hf:name"`, a built-in corpus, or anything else `load_text`
      accepts. `split` then names the split.
    - A dataset or list of records or texts. Other iterables are read into memory.

    The text of a record is in `text_key`; if there is no `"text"`, other common names are tried.

    >>> TextDataset([{"title": "A", "content": "a text"}])[0]
    {'text': 'a text'}
    """

    def __init__(self, source: Any, text_key: str = "text", split: str | None = None) -> None:
        super().__init__(source, split)
        self.text_key = _text_key(self._records, text_key)
        self.fingerprint = self._fingerprint_with(self.text_key)
        if self.text_key is not None and hasattr(self._records, "select_columns"):
            self._records = self._records.select_columns([self.text_key])  # reading a row decodes all of its columns

    def _convert(self, record: Any) -> dict[str, str]:
        if self.text_key is None or isinstance(record, str):
            return {"text": require_text(record, "text")}
        return {"text": require_text(require_key(record, self.text_key), self.text_key)}


def _text_key(records: Any, wanted: str) -> str | None:
    """The key of the text; None if the records are texts."""
    first = records[0]
    if isinstance(first, str):
        return None
    if isinstance(first, Mapping) and wanted not in first and wanted == "text":
        by_name = {str(key).lower(): key for key, value in reversed(list(first.items())) if isinstance(value, str)}
        found = next((by_name[name] for name in TEXT_KEYS if name in by_name), None)
        if found is not None:
            return found
    _check_key(records, wanted)
    return wanted


def _check_key(records: Any, key: str) -> None:
    try:
        require_key(records[0], key)
    except DataError as error:
        raise DataError(f"{location_of(records, 0)}: {error}") from None


class ChatDataset(_RecordsView):
    """Conversations: ``{"messages": [{"role": ..., "content": ...}, ...]}``, with `"tools"` and
    `"chat_template_kwargs"` if a record has them.

    The source is anything `TextDataset` accepts. Its records may have OpenAI `messages`, ShareGPT `conversations`
    (`from` and `value`), a prompt and its completion, an Alpaca instruction, or be bare lists of messages.
    `messages_key` names an unusual field. Every conversation is checked when it is read: known roles, text contents, at
    least one assistant message.

    >>> chat = ChatDataset([{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}])
    >>> chat[0]
    {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]}
    """

    def __init__(self, source: Any, messages_key: str | None = None, split: str | None = None) -> None:
        super().__init__(source, split)
        if messages_key is not None:
            _check_key(self._records, messages_key)
            self.schema = Schema("chat", {"messages": messages_key})
        else:
            self.schema = detect_schema(self._records)
        if self.schema.name not in ("chat", "completion", "alpaca"):
            raise DataError(
                "Expected conversations (messages, conversations, prompt and completion, or instruction and output), "
                f"received records of the schema '{self.schema.name}' with the keys "
                f"{', '.join(map(repr, self._records[0]))}. Pass messages_key=... if one of them contains messages."
            )
        self.fingerprint = self._fingerprint_with("chat", messages_key)
        self[0]  # fail now if all records are wrong

    def _convert(self, record: Any) -> dict[str, Any]:
        return conversation(record, self.schema)


class StandardRecords(_RecordsView):
    """Records of any known schema with the standard names for their fields; see `detect_schema`.

    >>> records = StandardRecords([{"article": "long", "highlights": "short"}])
    >>> records.schema.name, records[0]
    ('pairs', {'source': 'long', 'target': 'short'})
    """

    def __init__(self, source: Any, schema: str | None = None, split: str | None = None) -> None:
        super().__init__(source, split)
        if schema is not None and schema not in SCHEMAS:
            what = f"one of the schemas {', '.join(SCHEMAS)}"
            raise BadArgument(expected(what, schema, did_you_mean(schema, SCHEMAS)))
        try:
            self.schema = detect_schema(self._records)
        except DataError:
            if schema is None:
                raise
            raise DataError(_other_schema(self._records[0], schema, "records of no known schema")) from None
        if schema is not None and self.schema.name != schema:
            raise DataError(_other_schema(self._records[0], schema, f"'{self.schema.name}'"))
        self.fingerprint = self._fingerprint_with("standard")

    def _convert(self, record: Any) -> dict[str, Any]:
        return standard(record, self.schema)


def _other_schema(record: Any, schema: str, received: str) -> str:
    """What is wrong with records of another schema than the wanted one."""
    keys = list(map(str, record)) if isinstance(record, Mapping) else []
    missing = missing_keys(record, schema)
    names = " and ".join(map(repr, missing))
    gap = f"The keys {names} are missing." if len(missing) > 1 else f"The key {names} is missing." if missing else ""
    close = " ".join(filter(None, (did_you_mean(key, keys) for key in missing)))
    shown = ", ".join(map(repr, keys)) or "no keys"
    parts = f"Expected records of the schema '{schema}', received {received}, with {shown}.", gap
    return " ".join([*filter(None, parts), close or "Rename the keys."])
