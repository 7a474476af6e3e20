"""What a record of text is: a document, an instruction, a conversation, a preference, a pair, or tokens.

Owns the names that people give to the parts of a record, finding out from the first records which of the forms they
have, and bringing a record into the one standard form that encoders read. Reading records is left to `records`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_LOOKED_AT = 8  # records that decide on the form
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
class _Kind:
    """A form: which names its parts may have (the parts of one alternative belong together), and what else is kept."""

    parts: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unless: frozenset[str] = frozenset()  # these keys say that the record is something else

    def match(self, in_all: Mapping[str, str]) -> dict[str, str] | None:
        """The part of the record that each key is, by lower-case keys that all records have."""
        for names in self.names:
            if all(name in in_all for name in names) and not self.unless & in_all.keys():
                return {part: in_all[name] for part, name in zip(self.parts, names, strict=True)}
        return None


def _every(*groups: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Every combination of names, the first ones first.

    >>> _every(["a"], ["b", "c"])
    (('a', 'b'), ('a', 'c'))
    """
    return ((),) if not groups else tuple((name, *rest) for name in groups[0] for rest in _every(*groups[1:]))


_LABELS = {"label": ("label", "labels"), "score": ("score", "similarity_score")}
# The first form that fits is meant: a record with chosen and rejected answers may well have a prompt and messages, and
# one with an instruction a ready-made text.
_KINDS: dict[str, _Kind] = {
    "tokens": _Kind(("input_ids",), (("input_ids",),), {"labels": ("labels",)}),
    "preference": _Kind(
        ("chosen", "rejected"), (("chosen", "rejected"),), {"prompt": ("prompt", "question", "instruction")}
    ),
    "chat": _Kind(("messages",), _every(_MESSAGE_KEYS), {"tools": ("tools",), "system": ("system",)}),
    "alpaca": _Kind(
        ("instruction", "output"),
        _every(["instruction"], ["output", "response", "completion", "answer"]),
        {"input": ("input", "context"), "system": ("system",)},
    ),
    "completion": _Kind(
        ("prompt", "completion"),
        (
            *_every(["prompt"], ["completion", "response", "output", "answer"]),
            *_every(["query", "question"], ["response", "answer", "completion"]),
        ),
        {"tools": ("tools",)},
        unless=frozenset({"context"}),  # a question about a context is not answered without it
    ),
    "tagged": _Kind(("tokens", "tags"), _every(["tokens", "words"], ["tags", "ner_tags", "pos_tags", "labels"])),
    "similarity": _Kind(
        ("anchor", "positive"),
        (
            *_every(["anchor", "query", "question"], ["positive", "pos"]),
            *(("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("premise", "hypothesis")),
            *(("question1", "question2"), ("text1", "text2")),
        ),
        {"negative": ("negative", "neg"), **_LABELS},
    ),
    "pairs": _Kind(
        ("source", "target"),
        (
            *(("source", "target"), ("src", "tgt"), ("source_text", "target_text"), ("input_text", "target_text")),
            *(("inputs", "targets"), ("input", "target"), ("input", "output"), ("article", "highlights")),
            *_every(["document", "dialogue", "article", "text"], ["summary"]),
            ("translation", "translation"),
        ),
    ),
    "text": _Kind(("text",), _every(TEXT_KEYS), _LABELS),
}
FORMS = tuple(_KINDS)


@dataclass(frozen=True)
class Form:
    """The form of records: its name, and the key that each of its parts has in them."""

    name: str
    keys: Mapping[str, str]


def detect(records: Any) -> str:
    """The form of records, from the keys of the first of them.

    One of `"text"`, `"completion"` (prompt and completion), `"alpaca"` (instruction, input, output), `"chat"`,
    `"preference"` (chosen and rejected), `"pairs"` (source and target), `"tokens"` (input_ids), `"tagged"` (tokens and
    their tags) or `"similarity"` (anchor and positive).

    >>> detect([{"question": "1 + 1?", "answer": "2"}]), detect(["some text"])
    ('completion', 'text')
    """
    return form_of(records).name


def form_of(records: Any) -> Form:
    """The form of records, and what their keys mean.

    >>> form_of([{"context": "", "instruction": "Sing.", "response": "La."}]).keys
    {'instruction': 'instruction', 'output': 'response', 'input': 'context'}
    """
    first = list(islice(_first(records), _LOOKED_AT))
    if not first:
        raise DataError(expected("at least one record", "none"))
    if not isinstance(first[0], Mapping):
        return _form_of_bare(first[0])
    in_all = [key for key in first[0] if all(isinstance(other, Mapping) and key in other for other in first)]
    by_name = {str(key).lower(): key for key in reversed(in_all)}
    in_any = {str(key).lower(): key for record in reversed(first) if isinstance(record, Mapping) for key in record}
    for name, kind in _KINDS.items():
        keys = kind.match(by_name)
        if keys is None or not _plausible(name, keys, first[0]):
            continue
        for part, names in kind.optional.items():
            found = next(
                (in_any[other] for other in names if other in in_any and in_any[other] not in keys.values()), None
            )
            keys |= {} if found is None else {part: found}
        return Form(name, keys)
    raise DataError(
        f"Expected records of a known form, received records with the keys {', '.join(map(repr, first[0]))}. Known "
        f"forms are: {_known()}. Rename the keys, or write the records anew."
    )


def _first(records: Any) -> Iterator[Any]:
    if hasattr(records, "__getitem__") and hasattr(records, "__len__"):
        return (records[index] for index in range(len(records)))
    return iter(records)


def _form_of_bare(record: Any) -> Form:
    if isinstance(record, str):
        return Form("text", {})
    if isinstance(record, Sequence) and record and isinstance(record[0], Mapping):
        return Form("chat", {})
    if isinstance(record, Sequence) and record and isinstance(record[0], int):
        return Form("tokens", {})
    raise DataError(expected("records that are mappings, texts or lists of messages", type(record).__name__))


def _plausible(name: str, keys: Mapping[str, str], record: Mapping[str, Any]) -> bool:
    """Whether values are what the names promise: `dialogue` and `labels` mean several things."""
    if name == "chat":
        return isinstance(record[keys["messages"]], Sequence) and not isinstance(record[keys["messages"]], str)
    if name == "pairs" and keys["source"] == keys["target"]:
        return isinstance(record[keys["source"]], Mapping) and len(record[keys["source"]]) >= 2
    if name == "tagged":
        return not isinstance(record[keys["tokens"]], str)
    return name != "text" or isinstance(record[keys["text"]], str)


def _known() -> str:
    return "; ".join(f"{name} ({', '.join(map(repr, kind.names[0]))})" for name, kind in _KINDS.items())


def known_form(name: str) -> str:
    """The name of a form, else an error."""
    if name not in _KINDS:
        raise BadArgument(expected(f"one of the forms {', '.join(FORMS)}", name, did_you_mean(name, FORMS)))
    return name


# -- one record --------------------------------------------------------------------------------------------
# Errors say what is wrong with the record; where it stands costs time to find out, so the caller adds it.


def standard(record: Any, form: Form) -> dict[str, Any]:
    """A record with the standard names for its parts, checked.

    >>> standard({"question": "1 + 1?", "answer": "2"}, form_of([{"question": "", "answer": ""}]))
    {'prompt': '1 + 1?', 'completion': '2'}
    """
    if form.name == "chat":
        return conversation(record, form)
    if not form.keys:
        part = _KINDS[form.name].parts[0]
        return {part: text_value(record, part) if form.name == "text" else record}
    parts = {part: value_of(record, form.keys[part]) for part in _KINDS[form.name].parts}
    if form.name == "pairs" and form.keys["source"] == form.keys["target"]:
        parts = _languages(parts["source"])
    if form.name not in ("tokens", "tagged"):
        parts = {part: _text_or_messages(value, part, form.name) for part, value in parts.items()}
    for part in _KINDS[form.name].optional:
        value = record.get(form.keys[part]) if part in form.keys else None
        if value is not None:
            parts[part] = value
    if form.name == "preference" and "prompt" in parts:
        parts["prompt"] = _text_or_messages(parts["prompt"], "prompt", form.name)
    if form.name == "alpaca":
        parts["input"] = text_value(parts.get("input", ""), "input")
    return parts


def _languages(translation: Any) -> dict[str, Any]:
    """Source and target of ``{"en": ..., "de": ...}``, in this order."""
    if not isinstance(translation, Mapping) or len(translation) < 2:
        raise DataError(expected_value("a text and its translation, by language", translation))
    source, target, *_ = translation.values()
    return {"source": source, "target": target}


def _text_or_messages(value: Any, part: str, form: str) -> Any:
    """Prompts and answers may be conversations too, in the form of TRL."""
    if form in ("preference", "completion") and isinstance(value, Sequence) and not isinstance(value, str):
        return _messages(value, f" of {part!r}")
    return text_value(value, part)


def value_of(record: Any, key: str) -> Any:
    """The value of a key, else an error that lists the keys there are."""
    if not isinstance(record, Mapping):
        raise DataError(expected(f"a record with the key {key!r}", type(record).__name__))
    if key not in record:
        keys = ", ".join(map(repr, record)) or "no key"
        close = did_you_mean(key, map(str, record))
        raise DataError(f"Expected the key {key!r}, received a record with: {keys}. {close}".strip())
    return record[key]


def expected_value(what: str, value: Any, do: str = "") -> str:
    """`expected` for a value from the data, which may be a whole book.

    >>> expected_value("a number", "many words " * 1000)
    "Expected a number, received 'many words many words many ...ds many words many words '."
    """
    text = f"Expected {what}, received {_SHORT.repr(value)}."
    return f"{text} {do}" if do else text


def text_value(value: Any, key: str) -> str:
    """A value that must be text."""
    if not isinstance(value, str):
        raise DataError(expected_value(f"a text in {key!r}", value))
    return value


# -- conversations -----------------------------------------------------------------------------------------


def conversation(record: Any, form: Form) -> dict[str, Any]:
    """A record of the form chat, completion or alpaca as ``{"messages": [{"role", "content"}, ...]}``, checked.

    >>> form = Form("alpaca", {"instruction": "instruction", "output": "output"})
    >>> conversation({"instruction": "Sing.", "input": "", "output": "La."}, form)["messages"]
    [{'role': 'user', 'content': 'Sing.'}, {'role': 'assistant', 'content': 'La.'}]
    """
    if form.name == "chat":
        raw = value_of(record, form.keys["messages"]) if form.keys else record
    else:
        raw = _turns(standard(record, form))
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise DataError(expected_value("a list of messages", raw))
    messages = _messages(raw)
    extra = {part: record.get(form.keys[part]) for part in ("system", "tools") if part in form.keys}
    if isinstance(extra.get("system"), str) and extra["system"] and all(m["role"] != "system" for m in messages):
        messages.insert(0, {"role": "system", "content": extra["system"]})
    if all(message["role"] != "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        raise DataError(expected("at least one message of the assistant", roles, "Remove the record."))
    tools = _tools(extra.get("tools"))
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _turns(record: Mapping[str, Any]) -> list[Any]:
    """The messages of an instruction or of a prompt and its completion."""
    if "instruction" in record:
        asked = "\n\n".join(part for part in (record["instruction"], record["input"]) if part)
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]
    turns: list[Any] = []
    for part, role in (("prompt", "user"), ("completion", "assistant")):
        value = record[part]
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
    said = value_of(raw, names[0])
    role = _ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        close = did_you_mean(str(said), _ROLES) or f"Known roles: {', '.join(_ROLES)}."
        raise DataError(expected_value("a known role", said, close))
    # HF datasets fill what a message has not, but another has, with None.
    rest = {key: value for key, value in raw.items() if key not in names and value is not None}
    content = raw.get(names[1])
    if content is None and "tool_calls" in rest:
        content = ""  # an assistant that only calls a tool says nothing
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        content = _joined_parts(content)
    return {"role": role, "content": text_value(content, names[1]), **rest}


def _joined_parts(parts: Sequence[Any]) -> str:
    """The text of a content that is a list of parts; other parts are for models that see."""
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(expected_value("parts of the type text", part, "Images need a multimodal task."))
    return "".join(part["text"] for part in parts)


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():  # tables have no other way to store what differs from row to row
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"Expected a list of tools as JSON, received a text that is none: {error}.") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise DataError(expected_value("a list of tools", tools))
    return list(tools)
