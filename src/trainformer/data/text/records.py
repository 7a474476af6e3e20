"""Data sets of text: documents, texts and conversations, read when they are asked for.

Owns the data sets a user makes of any source: `TextFileDataset`, `TextDataset`, `ChatDataset`, `StandardRecords`. The
source behind a path or name is left to `sources`, JSON to `jsonl`, and what records mean to `forms`. All of them
have a length, are read by index, pickle small for worker processes, and name file and line of a record that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError
from trainformer.data.dataset import Indexed
from trainformer.data.text.files import LineIndex, Spans, TextFile, character_spans, digest
from trainformer.data.text.jsonl import JSONLDataset
from trainformer.data.text.schemas import (
    FORMS,
    TEXT_KEYS,
    Form,
    conversation,
    detect,
    form_of,
    known_form,
    standard,
    text_value,
    value_of,
)
from trainformer.data.text.sources import load_text, records_of
from trainformer.data.text.tables import fingerprint, position, where

__all__ = [
    "FORMS",
    "ChatDataset",
    "Form",
    "JSONLDataset",
    "StandardRecords",
    "TextDataset",
    "TextFileDataset",
    "detect",
    "form_of",
    "load_text",
]


class TextFileDataset(Indexed):
    r"""A text file as texts: its lines that are not blank, or pieces of `chunk_size` characters.

    Both are read lazily. Lines come without their ends. Pieces are exact: joined, they are the file, a byte order mark
    left aside and ends of lines as they are; the last may be shorter.

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
        return self._spans.text(position(index, len(self)))

    def where(self, index: int) -> str:
        """File and line of a text, for messages."""
        return self._spans.where(index)


class _OverRecords(Indexed):
    """What data sets over other records have in common."""

    def __init__(self, source: Any, split: str | None) -> None:
        self._records = records_of(source, split)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def in_memory(self) -> bool:
        """Whether the records are in memory."""
        return isinstance(self._records, list | tuple) or bool(getattr(self._records, "in_memory", False))

    def where(self, index: int) -> str:
        """The place of a record, for messages: file and line where it is known."""
        return where(self._records, index)

    def _converted(self, index: int, convert: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        record = self._records[index]
        try:
            return convert(record)
        except DataError as error:
            raise DataError(f"{self.where(index)}: {error}") from error.__cause__

    def _fingerprint_with(self, *settings: object) -> str | None:
        known = fingerprint(self._records)
        return None if known is None else digest(known, *settings)


class TextDataset(_OverRecords):
    """Documents for language modelling: ``{"text": ...}``, from nearly anything that holds text.

    - The path of a text file, or of a folder of them: every file is a document, or with `split` every `"line"` or
      `"paragraph"` (text between blank lines) that is not blank.
    - The path of JSON Lines, JSON, CSV or Parquet, a folder that HF `datasets` saved, `"hf:name"`, or the name of
      a built-in corpus: whatever `load_text` knows. `split` then names the split.
    - A data set or list of records, or of texts. Other iterables are read once, into memory.

    The text of a record is under `text_key`; where there is no `"text"`, the usual other names are looked for.

    >>> TextDataset([{"title": "A", "content": "a text"}])[0]
    {'text': 'a text'}
    """

    def __init__(self, source: Any, text_key: str = "text", split: str | None = None) -> None:
        super().__init__(source, split)
        self.text_key = _text_key(self._records, text_key)
        self.fingerprint = self._fingerprint_with(self.text_key)
        if self.text_key is not None and hasattr(self._records, "select_columns"):
            self._records = self._records.select_columns([self.text_key])  # a row decodes all of its columns

    def __getitem__(self, index: int) -> dict[str, str]:
        index = position(index, len(self))
        return self._converted(index, self._text_of)

    def _text_of(self, record: Any) -> dict[str, str]:
        if self.text_key is None or isinstance(record, str):
            return {"text": text_value(record, "text")}
        return {"text": text_value(value_of(record, self.text_key), self.text_key)}


def _text_key(records: Any, wanted: str) -> str | None:
    """The key of the text; None where the records are texts."""
    first = records[0]
    if isinstance(first, str):
        return None
    if isinstance(first, Mapping) and wanted not in first and wanted == "text":
        by_name = {str(key).lower(): key for key, value in reversed(list(first.items())) if isinstance(value, str)}
        found = next((by_name[name] for name in TEXT_KEYS if name in by_name), None)
        if found is not None:
            return found
    _insist_on_key(records, wanted)
    return wanted


def _insist_on_key(records: Any, key: str) -> None:
    try:
        value_of(records[0], key)
    except DataError as error:
        raise DataError(f"{where(records, 0)}: {error}") from None


class ChatDataset(_OverRecords):
    """Conversations: ``{"messages": [{"role": ..., "content": ...}, ...]}``, with `"tools"` where a record has them.

    The source is anything that `TextDataset` takes. Its records may hold messages as OpenAI writes them, ShareGPT's
    `conversations` (`from` and `value`), a prompt and its completion, an Alpaca instruction, or be bare lists of
    messages. `messages_key` names the messages where they have an unusual name. Every conversation is checked when it
    is read: known roles, texts as contents, at least one message of the assistant.

    >>> chat = ChatDataset([{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}])
    >>> chat[0]
    {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]}
    """

    def __init__(self, source: Any, messages_key: str | None = None, split: str | None = None) -> None:
        super().__init__(source, split)
        self.form = _chat_form(self._records, messages_key)
        self.fingerprint = self._fingerprint_with("chat", messages_key)
        self[0]  # what is wrong with all of them is said at once

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = position(index, len(self))
        return self._converted(index, lambda record: conversation(record, self.form))


def _chat_form(records: Any, messages_key: str | None) -> Form:
    if messages_key is not None:
        _insist_on_key(records, messages_key)
        extra = {part: part for part in ("tools", "system") if part in records[0]}
        return Form("chat", {"messages": messages_key, **extra})
    form = form_of(records)
    if form.name not in ("chat", "completion", "alpaca"):
        raise DataError(
            "Expected conversations (messages, conversations, prompt and completion, or instruction and output), "
            f"received records of the form '{form.name}' with the keys {', '.join(map(repr, records[0]))}. Pass "
            "messages_key=... if one of them holds messages."
        )
    return form


class StandardRecords(_OverRecords):
    """Any records with the standard names for their parts, whatever they are called in the source; see `detect`.

    >>> records = StandardRecords([{"article": "long", "highlights": "short"}])
    >>> records.form.name, records[0]
    ('pairs', {'source': 'long', 'target': 'short'})
    """

    def __init__(self, source: Any, form: str | None = None, split: str | None = None) -> None:
        super().__init__(source, split)
        self.form = form_of(self._records)
        if form is not None and self.form.name != known_form(form):
            keys = ", ".join(map(repr, self._records[0])) if isinstance(self._records[0], Mapping) else "no keys"
            raise DataError(
                f"Expected records of the form '{form}', received '{self.form.name}', with {keys}. Rename the keys."
            )
        self.fingerprint = self._fingerprint_with("standard")

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = position(index, len(self))
        return self._converted(index, lambda record: standard(record, self.form))
