"""Schemas of text records: document, instruction, conversation, preference, pair, tokens, ...

This module knows the common names of the fields, detects the schema from the first records, and converts a record to
the standard names that encoders read. Optional fields are looked up in every record.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import islice, product
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.data.text.fields import expected_value, require_key, require_text
from trainformer.data.text.messages import check_messages, decoded, template_fields, with_system

logger = logging.getLogger("trainformer")

_PEEKED = 8  # records that decide on the schema
_MAX_LAYOUTS = 1000  # sets of keys that a schema remembers
TEXT_KEYS = (
    *("text", "content", "document", "body", "raw_content", "page_content", "article", "story", "passage"),
    *("code", "sentence", "abstract"),
)
MESSAGE_KEYS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")


@dataclass(frozen=True)
class _Spec:
    """A schema: the names its required fields may have (alternatives), and its optional fields."""

    fields: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    optional: Mapping[str, tuple[str, ...]] = dataclass_field(default_factory=dict)
    unless: frozenset[str] = frozenset()  # keys that rule this schema out

    def match(self, by_name: Mapping[str, str]) -> dict[str, str] | None:
        """The key of each required field, from keys by their lower-case name."""
        for names in self.names:
            if all(name in by_name for name in names) and not self.unless & by_name.keys():
                return {field: by_name[name] for field, name in zip(self.fields, names, strict=True)}
        return None

    def match_optional(self, by_name: Mapping[str, str], taken: Iterable[str]) -> dict[str, str]:
        """The key of each optional field that is there."""
        free = {name: key for name, key in by_name.items() if key not in taken}
        found = {field: next((free[n] for n in names if n in free), None) for field, names in self.optional.items()}
        return {field: key for field, key in found.items() if key is not None}

    def missing(self, by_name: Mapping[str, str]) -> list[str]:
        """The names of the required fields that are not there, if at least one is."""
        gaps = [[name for name in names if name not in by_name] for names in self.names]
        return min(
            (gap for gap, names in zip(gaps, self.names, strict=True) if len(gap) < len(names)), key=len, default=[]
        )


_CHAT = {
    "tools": ("tools",),
    "system": ("system", "system_prompt", "system_message"),
    "chat_template_kwargs": ("chat_template_kwargs",),
}
_LABELS = {"label": ("label", "labels"), "score": ("score", "similarity_score")}
# The first schema that matches wins: a record with chosen and rejected answers may also have a prompt and messages, and
# one with an instruction a ready-made text.
_SPECS: dict[str, _Spec] = {
    "tokens": _Spec(("input_ids",), (("input_ids",),), {"labels": ("labels",)}),
    "preference": _Spec(
        ("chosen", "rejected"), (("chosen", "rejected"),), {"prompt": ("prompt", "question", "instruction"), **_CHAT}
    ),
    "chat": _Spec(("messages",), tuple(product(MESSAGE_KEYS)), _CHAT),
    "alpaca": _Spec(
        ("instruction", "output"),
        tuple(product(["instruction"], ["output", "response", "completion", "answer"])),
        {"input": ("input", "context"), **_CHAT},
    ),
    "completion": _Spec(
        ("prompt", "completion"),
        (
            *product(["prompt"], ["completion", "response", "output", "answer"]),
            *product(["query", "question"], ["response", "answer", "completion"]),
        ),
        _CHAT,
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
    """The schema of records: its name, and the key of each field.

    `keys` has the required fields, and the optional ones that the first records have. Later records may have others.
    """

    name: str
    keys: Mapping[str, str]
    detected: bool = False  # a detected schema must fit all records, a chosen one only needs its fields
    _layouts: dict[tuple[Any, ...], dict[str, str]] = dataclass_field(default_factory=dict, compare=False, repr=False)

    def optional_keys(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The keys of the optional fields of a record. Checks that its keys do not belong to another schema.

        The result is remembered for each set of keys: most records have the same.
        """
        present = tuple([key for key, value in record.items() if value is not None])
        known = self._layouts.get(present)
        if known is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[present] = self._find_optional(record, present)
        return known

    def _find_optional(self, record: Mapping[str, Any], present: Sequence[Any]) -> dict[str, str]:
        spec = _SPECS[self.name]
        required = [self.keys[field] for field in spec.fields]
        by_name = _by_name(present)
        other = _schema_of_keys(by_name, record) if self.detected else None
        if other not in (None, self.name):
            raise DataError(
                f"Expected a record of the schema '{self.name}' ({', '.join(map(repr, required))}), like the first "
                f"ones, received one of the schema '{other}', with: {', '.join(map(repr, present))}. "
                "Train on records of one schema, or convert them."
            )
        if self.detected and (ruled_out := sorted(spec.unless & by_name.keys())):
            raise DataError(
                f"Expected a record with {', '.join(map(repr, required))} only, like the first ones, received also "
                f"{', '.join(map(repr, ruled_out))}, which would be lost. Join them to the prompt, or remove them."
            )
        found = spec.match_optional(by_name, required)
        if spec.optional.keys() >= _CHAT.keys():
            _warn_of_lookalikes(spec, by_name.keys() - {str(k).lower() for k in (*required, *found.values())}, found)
        return found


def _by_name(keys: Iterable[Any]) -> dict[str, Any]:
    """Keys by their lower-case name; of several, the first."""
    return {str(key).lower(): key for key in reversed(list(keys))}


def _schema_of_keys(by_name: Mapping[str, str], record: Mapping[str, Any]) -> str | None:
    """The name of the first schema that fits a record."""
    for name, spec in _SPECS.items():
        keys = spec.match(by_name)
        if keys is not None and _plausible(name, keys, record):
            return name
    return None


_warned: set[str] = set()


def _warn_of_lookalikes(spec: _Spec, unknown: Iterable[str], found: Mapping[str, str]) -> None:
    """Warn once of keys that look like a misspelled optional field."""
    for name in sorted(unknown):
        close = difflib.get_close_matches(
            name, [n for f, ns in spec.optional.items() if f not in found for n in ns], 1, 0.8
        )
        if close and name not in _warned:
            _warned.add(name)
            logger.warning("records have the field %r, which is not used. Did you mean %r?", name, close[0])


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
    in_any = _by_name(key for record in first if isinstance(record, Mapping) for key in record)
    # If the first records differ, the first one decides, and the error names the one that does not fit.
    for keys in (in_all, list(first[0])):
        by_name = _by_name(keys)
        name = _schema_of_keys(by_name, first[0])
        if name is not None:
            required = _SPECS[name].match(by_name)
            assert required is not None
            optional = _SPECS[name].match_optional(in_any, required.values())
            return Schema(name, {**required, **optional}, detected=True)
    raise DataError(_unknown_schema(first[0]))


def _unknown_schema(record: Mapping[str, Any]) -> str:
    by_name = _by_name(record)
    gaps = {name: spec.missing(by_name) for name, spec in _SPECS.items()}
    close = [f"'{name}' with {' and '.join(map(repr, gap))}" for name, gap in gaps.items() if gap]
    known = "; ".join(f"{name} ({', '.join(map(repr, spec.names[0]))})" for name, spec in _SPECS.items())
    return (
        f"Expected records of a known schema, received records with the keys {', '.join(map(repr, record))}. "
        + (f"They would be of the schema {', or '.join(close)}. " if close else "")
        + f"Known schemas are: {known}. Rename the keys, or convert the records."
    )


def missing_keys(record: Any, schema: str) -> list[str]:
    """The names of the required fields of a schema that a record does not have.

    >>> missing_keys({"prompt": "1 + 1?", "chosen": "2"}, "preference")
    ['rejected']
    """
    spec, by_name = _SPECS[schema], _by_name(record if isinstance(record, Mapping) else ())
    if spec.match(by_name) is not None:
        return []
    return spec.missing(by_name) or list(spec.names[0])


def schema_of(record: Mapping[str, Any]) -> Schema | None:
    """The schema of one record; None if it is unknown."""
    name = _schema_of_keys(by_name := _by_name(record), record)
    return None if name is None else Schema(name, _SPECS[name].match(by_name) or {})


def source_keys() -> list[tuple[str, ...]]:
    """The names a source may have in a record, whether or not it has a target: the most specific first.

    >>> source_keys()[:2], source_keys()[-1]
    ([('instruction',), ('prompt',)], ('abstract',))
    """
    names = [names[0] for name in ("alpaca", "completion", "pairs") for names in _SPECS[name].names]
    return [(name,) for name in dict.fromkeys([*names, *TEXT_KEYS])]


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
        messages = record[keys["messages"]]
        return _is_json_list(messages) if isinstance(messages, str) else isinstance(messages, Sequence)
    if name == "pairs" and keys["source"] == keys["target"]:
        return isinstance(record[keys["source"]], Mapping) and len(record[keys["source"]]) >= 2
    if name == "tagged":
        return not isinstance(record[keys["tokens"]], str)
    return name != "text" or isinstance(record[keys["text"]], str)


def _is_json_list(text: str) -> bool:
    """Whether a text looks like messages as JSON, as in a column of a table."""
    return bool(re.match(r"\s*\[\s*\{", text))


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
    fields |= {field: record[key] for field, key in schema.optional_keys(record).items()}
    if schema.name == "preference" and "prompt" in fields:
        fields["prompt"] = _text_or_messages(fields["prompt"], "prompt", schema.name)
    if schema.name == "alpaca":
        fields["input"] = require_text(fields.get("input", ""), "input")
    return _with_chat_fields(fields) if _CHAT.keys() & fields.keys() else fields


def _with_chat_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with tools and options checked, and the system prompt as the first message if there are messages."""
    system, tools, options = (fields.pop(name, None) for name in ("system", "tools", "chat_template_kwargs"))
    if system and isinstance(first := fields.get("prompt"), list):
        fields["prompt"] = with_system(first, system)
    elif system and first is None and isinstance(fields.get("chosen"), list) and isinstance(fields["rejected"], list):
        fields |= {name: with_system(fields[name], system) for name in ("chosen", "rejected")}
    elif system:
        fields["system"] = require_text(system, "system")
    return fields | template_fields(tools, options)


def _text_or_messages(value: Any, field: str, schema: str) -> Any:
    """Prompts and answers may be lists of messages too, as in TRL."""
    if schema in ("preference", "completion") and isinstance(value, Sequence) and not isinstance(value, str):
        return check_messages(value, f" of {field!r}")
    return require_text(value, field)


# -- conversations -----------------------------------------------------------------------------------------


def conversation(record: Any, schema: Schema) -> dict[str, Any]:
    """A record of the schema chat, completion or alpaca as ``{"messages": [{"role", "content"}, ...]}``, checked.

    >>> schema = Schema("alpaca", {"instruction": "instruction", "output": "output"})
    >>> conversation({"instruction": "Sing.", "input": "", "output": "La."}, schema)["messages"]
    [{'role': 'user', 'content': 'Sing.'}, {'role': 'assistant', 'content': 'La.'}]
    """
    if schema.name == "chat":
        raw = require_key(record, schema.keys["messages"]) if schema.keys else record
        raw = decoded(raw, "messages") if isinstance(raw, str) and _is_json_list(raw) else raw
        found = schema.optional_keys(record) if schema.keys else {}
        fields = {field: record[key] for field, key in found.items()}
    else:
        fields = standard(record, schema)
        raw = _turns(fields)
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise DataError(expected_value("a list of messages", raw))
    messages = check_messages(raw)
    if fields.get("system"):
        messages = with_system(messages, fields["system"])
    if all(message["role"] != "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        raise DataError(expected("at least one assistant message", roles, "Remove the record."))
    return {"messages": messages, **template_fields(fields.get("tools"), fields.get("chat_template_kwargs"))}


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
