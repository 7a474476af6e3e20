"""Schemas of text records: document, instruction, conversation, preference, pair, tokens, ...

This module knows the common names of the fields, detects the schema from the first records, and converts a record to
the standard names that encoders read.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import islice, product
from typing import Any

from trainformer.core.errors import DataError, did_you_mean, expected
from trainformer.utils.files import decode_json

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_PEEKED = 8  # records that decide on the schema
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES = {role: role for role in ROLES} | {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "function_call"), "assistant"),
    "observation": "tool",
}
TEXT_KEYS = (
    *("text", "content", "document", "body", "raw_content", "page_content", "article", "story", "passage"),
    *("code", "sentence", "abstract"),
)
_MESSAGE_KEYS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")


@dataclass(frozen=True)
class _Spec:
    """A schema: the names its required fields may have (alternatives), and its optional fields."""

    fields: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    optional: Mapping[str, tuple[str, ...]] = dataclass_field(default_factory=dict)
    unless: frozenset[str] = frozenset()  # keys that rule this schema out

    def match(self, in_all: Mapping[str, str]) -> dict[str, str] | None:
        """The key of each field, from the lower-case keys that all records have."""
        for names in self.names:
            if all(name in in_all for name in names) and not self.unless & in_all.keys():
                return {field: in_all[name] for field, name in zip(self.fields, names, strict=True)}
        return None


_LABELS = {"label": ("label", "labels"), "score": ("score", "similarity_score")}
# The first schema that matches wins: a record with chosen and rejected answers may also have a prompt and messages, and
# one with an instruction a ready-made text.
_SPECS: dict[str, _Spec] = {
    "tokens": _Spec(("input_ids",), (("input_ids",),), {"labels": ("labels",)}),
    "preference": _Spec(
        ("chosen", "rejected"), (("chosen", "rejected"),), {"prompt": ("prompt", "question", "instruction")}
    ),
    "chat": _Spec(("messages",), tuple(product(_MESSAGE_KEYS)), {"tools": ("tools",), "system": ("system",)}),
    "alpaca": _Spec(
        ("instruction", "output"),
        tuple(product(["instruction"], ["output", "response", "completion", "answer"])),
        {"input": ("input", "context"), "system": ("system",)},
    ),
    "completion": _Spec(
        ("prompt", "completion"),
        (
            *product(["prompt"], ["completion", "response", "output", "answer"]),
            *product(["query", "question"], ["response", "answer", "completion"]),
        ),
        {"tools": ("tools",)},
        unless=frozenset({"context"}),  # a question about a context needs the context
    ),
    "tagged": _Spec(
        ("tokens", "tags"), tuple(product(["tokens", "words"], ["tags", "ner_tags", "pos_tags", "labels"]))
    ),
    "similarity": _Spec(
        ("anchor", "positive"),
        (
            *product(["anchor", "query", "question"], ["positive", "pos"]),
            *(("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("premise", "hypothesis")),
            *(("question1", "question2"), ("text1", "text2")),
        ),
        {"negative": ("negative", "neg"), **_LABELS},
    ),
    "pairs": _Spec(
        ("source", "target"),
        (
            *(("source", "target"), ("src", "tgt"), ("source_text", "target_text"), ("input_text", "target_text")),
            *(("inputs", "targets"), ("input", "target"), ("input", "output"), ("article", "highlights")),
            *product(["document", "dialogue", "article", "text"], ["summary"]),
            ("translation", "translation"),
        ),
    ),
    "text": _Spec(("text",), tuple(product(TEXT_KEYS)), _LABELS),
}
SCHEMAS = tuple(_SPECS)


@dataclass(frozen=True)
class Schema:
    """The schema of records: its name, and the key of each field."""

    name: str
    keys: Mapping[str, str]


def detect_schema(records: Any) -> Schema:
    """The schema of records, from the keys of the first ones.

    Its `name` is `"text"`, `"completion"` (prompt and completion), `"alpaca"` (instruction, input, output), `"chat"`,
    `"preference"` (chosen and rejected), `"pairs"` (source and target), `"tokens"` (input_ids), `"tagged"` (tokens and
    their tags) or `"similarity"` (anchor and positive).

    >>> detect_schema([{"question": "1 + 1?", "answer": "2"}]).name, detect_schema(["some text"]).name
    ('completion', 'text')
    >>> detect_schema([{"context": "", "instruction": "Sing.", "response": "La."}]).keys
    {'instruction': 'instruction', 'output': 'response', 'input': 'context'}
    """
    is_indexed = hasattr(records, "__getitem__") and hasattr(records, "__len__")
    first = list(islice(map(records.__getitem__, range(len(records))) if is_indexed else records, _PEEKED))
    if not first:
        raise DataError(expected("at least one record", "none"))
    if not isinstance(first[0], Mapping):
        return _schema_of_value(first[0])
    in_all = [key for key in first[0] if all(isinstance(other, Mapping) and key in other for other in first)]
    by_name = {str(key).lower(): key for key in reversed(in_all)}
    in_any = {str(key).lower(): key for record in reversed(first) if isinstance(record, Mapping) for key in record}
    for name, spec in _SPECS.items():
        keys = spec.match(by_name)
        if keys is None or not _plausible(name, keys, first[0]):
            continue
        for field, names in spec.optional.items():
            free = (in_any[other] for other in names if other in in_any and in_any[other] not in keys.values())
            if (found := next(free, None)) is not None:
                keys[field] = found
        return Schema(name, keys)
    known = "; ".join(f"{name} ({', '.join(map(repr, spec.names[0]))})" for name, spec in _SPECS.items())
    raise DataError(
        f"Expected records of a known schema, received records with the keys {', '.join(map(repr, first[0]))}. Known "
        f"schemas are: {known}. Rename the keys, or convert the records."
    )


def _schema_of_value(record: Any) -> Schema:
    if isinstance(record, str):
        return Schema("text", {})
    if isinstance(record, Sequence) and record and isinstance(record[0], Mapping):
        return Schema("chat", {})
    if isinstance(record, Sequence) and record and isinstance(record[0], int):
        return Schema("tokens", {})
    raise DataError(expected("records that are mappings, texts or lists of messages", type(record).__name__))


def _plausible(name: str, keys: Mapping[str, str], record: Mapping[str, Any]) -> bool:
    """Whether the values fit: names such as `dialogue` and `labels` are ambiguous."""
    if name == "chat":
        return isinstance(record[keys["messages"]], Sequence) and not isinstance(record[keys["messages"]], str)
    if name == "pairs" and keys["source"] == keys["target"]:
        return isinstance(record[keys["source"]], Mapping) and len(record[keys["source"]]) >= 2
    if name == "tagged":
        return not isinstance(record[keys["tokens"]], str)
    return name != "text" or isinstance(record[keys["text"]], str)


# -- one record --------------------------------------------------------------------------------------------
# Errors say what is wrong with the record; the caller adds its location, which is slow to find.


def standard(record: Any, schema: Schema) -> dict[str, Any]:
    """A record with the standard names for its fields, checked.

    >>> standard({"question": "1 + 1?", "answer": "2"}, detect_schema([{"question": "", "answer": ""}]))
    {'prompt': '1 + 1?', 'completion': '2'}
    """
    if schema.name == "chat":
        return conversation(record, schema)
    if not schema.keys:
        field = _SPECS[schema.name].fields[0]
        return {field: require_text(record, field) if schema.name == "text" else record}
    fields = {field: require_key(record, schema.keys[field]) for field in _SPECS[schema.name].fields}
    if schema.name == "pairs" and schema.keys["source"] == schema.keys["target"]:
        translation = fields["source"]  # {"en": ..., "de": ...}
        if not isinstance(translation, Mapping) or len(translation) < 2:
            raise DataError(expected_value("a text and its translation, by language", translation))
        fields = dict(zip(("source", "target"), translation.values(), strict=False))
    if schema.name not in ("tokens", "tagged"):
        fields = {field: _text_or_messages(value, field, schema.name) for field, value in fields.items()}
    for field in _SPECS[schema.name].optional:
        value = record.get(schema.keys[field]) if field in schema.keys else None
        if value is not None:
            fields[field] = value
    if schema.name == "preference" and "prompt" in fields:
        fields["prompt"] = _text_or_messages(fields["prompt"], "prompt", schema.name)
    if schema.name == "alpaca":
        fields["input"] = require_text(fields.get("input", ""), "input")
    return fields


def _text_or_messages(value: Any, field: str, schema: str) -> Any:
    """Prompts and answers may be lists of messages too, as in TRL."""
    if schema in ("preference", "completion") and isinstance(value, Sequence) and not isinstance(value, str):
        return _messages(value, f" of {field!r}")
    return require_text(value, field)


def require_key(record: Any, key: str) -> Any:
    """The value of a key, else an error that lists the keys of the record."""
    if not isinstance(record, Mapping):
        raise DataError(expected(f"a record with the key {key!r}", type(record).__name__))
    if key not in record:
        keys = ", ".join(map(repr, record)) or "no key"
        close = did_you_mean(key, map(str, record))
        raise DataError(f"Expected the key {key!r}, received a record with: {keys}. {close}".strip())
    return record[key]


def expected_value(what: str, value: Any, do: str = "") -> str:
    """`expected` for a value from the data, which may be very long.

    >>> expected_value("a number", "many words " * 1000)
    "Expected a number, received 'many words many words many ...ds many words many words '."
    """
    text = f"Expected {what}, received {_SHORT.repr(value)}."
    return f"{text} {do}" if do else text


def require_text(value: Any, key: str) -> str:
    """The value, which must be text."""
    if not isinstance(value, str):
        raise DataError(expected_value(f"a text in {key!r}", value))
    return value


# -- conversations -----------------------------------------------------------------------------------------


def conversation(record: Any, schema: Schema) -> dict[str, Any]:
    """A record of the schema chat, completion or alpaca as ``{"messages": [{"role", "content"}, ...]}``, checked.

    >>> schema = Schema("alpaca", {"instruction": "instruction", "output": "output"})
    >>> conversation({"instruction": "Sing.", "input": "", "output": "La."}, schema)["messages"]
    [{'role': 'user', 'content': 'Sing.'}, {'role': 'assistant', 'content': 'La.'}]
    """
    if schema.name == "chat":
        raw = require_key(record, schema.keys["messages"]) if schema.keys else record
    else:
        raw = _turns(standard(record, schema))
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise DataError(expected_value("a list of messages", raw))
    messages = _messages(raw)
    extra = {field: record.get(schema.keys[field]) for field in ("system", "tools") if field in schema.keys}
    if isinstance(extra.get("system"), str) and extra["system"] and all(m["role"] != "system" for m in messages):
        messages.insert(0, {"role": "system", "content": extra["system"]})
    if all(message["role"] != "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        raise DataError(expected("at least one assistant message", roles, "Remove the record."))
    tools = _tools(extra.get("tools"))
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _turns(record: Mapping[str, Any]) -> list[Any]:
    """The messages of an instruction, or of a prompt and its completion."""
    if "instruction" in record:
        question = "\n\n".join(part for part in (record["instruction"], record["input"]) if part)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    turns: list[Any] = []
    for field, role in (("prompt", "user"), ("completion", "assistant")):
        value = record[field]
        turns += [{"role": role, "content": value}] if isinstance(value, str) else value
    return turns


def _messages(raw: Sequence[Any], of: str = "") -> list[dict[str, Any]]:
    messages = []
    for number, message in enumerate(raw):
        try:
            messages.append(_message(message))
        except DataError as error:
            raise DataError(f"message {number}{of}: {error}") from None
    return messages


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise DataError(expected_value("a message with a role and a content", raw))
    names = ("from", "value") if raw.get("from") is not None and raw.get("role") is None else ("role", "content")
    given = require_key(raw, names[0])
    role = _ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        close = did_you_mean(str(given), _ROLES) or f"Known roles: {', '.join(_ROLES)}."
        raise DataError(expected_value("a known role", given, close))
    # HF datasets fill in None for keys that only other messages have.
    rest = {key: value for key, value in raw.items() if key not in names and value is not None}
    content = raw.get(names[1])
    if content is None and "tool_calls" in rest:
        content = ""  # a message that only calls a tool has no text
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(expected_value("parts of the type text", part, "Images need a multimodal task."))
        content = "".join(part["text"] for part in content)
    return {"role": role, "content": require_text(content, names[1]), **rest}


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():  # tables store nested values as JSON text
        try:
            tools = decode_json(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"Expected a list of tools as JSON, received text that is not JSON: {error}.") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise DataError(expected_value("a list of tools", tools))
    return list(tools)
