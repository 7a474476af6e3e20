"""Encoding records as tokens and labels: text, prompts with completions, conversations, tokenised data.

`Encoder` decides which tokens are trained on, adds BOS and EOS, and truncates, splits or drops long records.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.text.chat import ChatRenderer, locate
from trainformer.data.text.messages import check_template_options, check_tools, with_system

ErrorContext = Callable[[int], AbstractContextManager[None]]

IGNORE_INDEX = -100  # the label of tokens without a loss
TRAIN_ON = ("auto", "completion", "assistant", "all")
TRUNCATION = ("auto", "drop", "truncate", "split")
_OUTCOMES = {"drop": "dropped", "truncate": "truncated", "split": "split"}

_SCHEMA_KEYS = {  # the keys that identify a schema, the most specific first
    "tokens": ("input_ids",),
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
# The two prompts of the Alpaca data, verbatim.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


class Encoded(NamedTuple):
    """A sequence of tokens. A label is the token of the same position (the loss shifts), or -100: no loss."""

    input_ids: np.ndarray
    labels: np.ndarray

    @property
    def supervised(self) -> int:
        """Number of tokens that enter the loss. The first token never does: nothing predicts it.

        >>> Encoded(np.array([5, 6, 7]), np.array([5, -100, 7])).supervised
        1
        """
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass
class EncodingReport:
    """Counts of records and tokens, and why records were dropped, truncated or split.

    >>> report = EncodingReport(records=3, pieces=2, tokens=10, supervised=8, dropped=1, reasons={"empty": 1})
    >>> print(report)
    3 records, 2 pieces, 10 tokens, 8 of them supervised; 1 dropped (empty: 1)
    """

    records: int = 0
    pieces: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, other: EncodingReport) -> None:
        """Add the counts of another report."""
        for name, value in asdict(other).items():
            if name != "reasons":
                setattr(self, name, getattr(self, name) + value)
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))

    def add_outcome(self, reason: str, outcome: str) -> None:
        """Count a record that was `dropped`, `truncated` or `split`, and why."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def __str__(self) -> str:
        head = f"{self.records:,} records, {self.pieces:,} pieces, {self.tokens:,} tokens, {self.supervised:,} of them "
        outcomes = [(name, getattr(self, name)) for name in ("dropped", "truncated", "split")]
        counted = ", ".join(f"{count:,} {name}" for name, count in outcomes if count)
        why = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.reasons.items()))
        return f"{head}supervised" + (f"; {counted} ({why})" if counted else "")


class Encoder:
    """Turns records into tokens and labels.

    A record is identified by its keys: `input_ids` (optionally `labels`), `messages`, `prompt` and `completion` (texts
    or lists of messages), `instruction`, `input` and `output`, or `text`; a plain string is a text.

    `train_on="auto"` trains on all of a text, on the completion of a prompt, and on the assistant's turns of a
    conversation. `"completion"` trains only on the answer to the last user message there, `"all"` on every token.

    `tools` and `chat_template_kwargs` of a record are passed to the chat template. A `system` prompt is the first
    message, or stands before the prompt of a text.

    Prompt and completion are tokenised as one text, as in TRL. A token that spans both belongs to the completion:
    start the completion with a space rather than ending the prompt with one. `prompt_template` is a format string over
    the fields of a record, `"Q: {prompt}\\nA:"` or `"{instruction} {input}"`.

    With `add_eos`, texts and completions end with the tokenizer's EOS, which is trained on; conversations end as their
    template says. BOS is added if the tokenizer adds it, and only once.

    A record of more than `max_length` tokens is split (`"auto"`: texts and tokens), truncated (`"auto"`: all others) or
    dropped. Sequences without a trained token are dropped; the report counts them with a reason.
    """

    expects_stop: ClassVar[bool] = True  # of chat templates: an end-of-turn token, or there is a warning

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None,
        train_on: str = "auto",
        truncation: str = "auto",
        add_eos: bool = True,
        prompt_template: str | None = None,
    ) -> None:
        _choice("train_on", train_on, TRAIN_ON)
        _choice("truncation", truncation, TRUNCATION)
        if max_length is not None and (isinstance(max_length, bool) or max_length < 2):
            raise BadArgument(expected("max_length to be None or at least 2", max_length))
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.train_on = train_on
        self.truncation = truncation
        self.add_eos = add_eos
        self.prompt_template = prompt_template
        self._renderer = None if tokenizer is None else ChatRenderer(tokenizer, self.expects_stop)
        # Cached: each takes 6 us.
        self._vocabulary = None if tokenizer is None else len(tokenizer)
        self._bos = None if tokenizer is None else tokenizer.bos_token_id
        self._eos = None if tokenizer is None else tokenizer.eos_token_id

    def encode(self, record: Any, report: EncodingReport | None = None) -> list[Encoded]:
        """The sequences of a record: one, several if it was split, or none if it was dropped."""
        return self.encode_all([record], report)[0]

    def encode_all(
        self,
        records: Sequence[Any],
        report: EncodingReport | None = None,
        *,
        first: int = 0,
        where: Callable[[int], str] | None = None,
    ) -> list[list[Encoded]]:
        """The sequences of each record. Errors name the record: by `where`, or by its number, counted from `first`.

        Texts are tokenised with one call, which is twice as fast for short ones.
        """
        report = EncodingReport() if report is None else report
        return self._pieces_of(records, report, partial(_located_errors, records, first, where))

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        """What `encode_all` returns. `context(i)` adds the location of record i to errors."""
        texts = [_text_of(record) for record in records]
        tokens = self._tokens_of([text for text in texts if text is not None])
        pieces = []
        for place, (record, text) in enumerate(zip(records, texts, strict=True)):
            with context(place):
                schema = "text" if text is not None else _schema_of(record)
                if text is not None:
                    whole = self._encode_text(next(tokens), bool(text))
                elif schema == "text":
                    raise DataError(expected("'text' to be a string", type(record["text"]).__name__))
                else:  # _encode_tokens, _encode_chat, _encode_completion or _encode_alpaca
                    whole = getattr(self, f"_encode_{schema}")(record)
                pieces.append(self._fit(whole, schema, report))
        return pieces

    def fingerprint(self) -> str:
        """A digest of the settings and the tokenizer, without its truncation and padding, which other calls change."""
        settings = [self.max_length, self.train_on, self.truncation, self.add_eos, self.prompt_template]
        digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
        for part in _tokenizer_parts(self.tokenizer):
            digest.update(part)
        return digest.hexdigest()

    # -- schemas ---------------------------------------------------------------------------------------------

    def _tokens_of(self, texts: list[str]) -> Iterator[list[int]]:
        if not texts:
            return iter(())
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        tokenizer = self._require()
        try:
            return iter(tokenizer(texts, **options)["input_ids"])
        except TypeError:  # one of them is not valid Unicode: find out which
            return (tokenizer(text, **options)["input_ids"] for text in texts)

    def _encode_text(self, tokens: list[int], has_content: bool) -> Encoded:
        if self.train_on not in ("auto", "all"):
            what = f"prompts with completions, or conversations, for train_on={self.train_on!r}"
            raise DataError(expected(what, "a text", "Pass train_on='all', or data with 'prompt' and 'completion'."))
        ids = np.asarray(tokens if has_content else [], dtype=np.int32)
        ids = self._add_eos(self._remove_second_bos(ids)[0]) if has_content else ids
        return Encoded(ids, ids.copy())

    def _encode_tokens(self, record: Mapping[str, Any]) -> Encoded:
        ids = _integers(record["input_ids"], "input_ids")
        if ids.size and (ids.min() < 0 or (self._vocabulary is not None and ids.max() >= self._vocabulary)):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            limit = "" if self._vocabulary is None else f" and below {self._vocabulary}, the size of the vocabulary"
            raise DataError(expected(f"input_ids from 0 on{limit}", wrong, "Check that the same tokenizer was used."))
        if record.get("labels") is not None:
            labels = _integers(record["labels"], "labels")
            if len(labels) != len(ids):
                raise DataError(expected(f"as many labels as input_ids ({len(ids)})", len(labels)))
        elif self.train_on in ("auto", "all"):
            labels = ids.copy()
        else:
            do = f"Pass labels with {IGNORE_INDEX} at the prompt, or train_on='all'."
            raise DataError(expected(f"labels with input_ids for train_on={self.train_on!r}", "none", do))
        return Encoded(ids, labels)

    def _encode_completion(self, record: Mapping[str, Any]) -> Encoded:
        prompt, completion = record["prompt"], record["completion"]
        if not isinstance(prompt, str) and not isinstance(completion, str):
            prompt = with_system(list(prompt), record["system"]) if record.get("system") else prompt
            both = {**record, "messages": [*prompt, *completion]}
            return self._encode_conversation(both, 0 if self.train_on == "assistant" else len(prompt))
        if not isinstance(prompt, str) or not isinstance(completion, str):
            received = {"prompt": type(prompt).__name__, "completion": type(completion).__name__}
            raise DataError(expected("prompt and completion to be two texts or two lists of messages", received))
        return self._encode_pair(self._text_prompt(record, "{prompt}"), completion)

    def _encode_alpaca(self, record: Mapping[str, Any]) -> Encoded:
        filled = {**record, "input": record.get("input") or ""}
        prompt = self._text_prompt(filled, ALPACA_WITH_INPUT if filled["input"] else ALPACA)
        if not isinstance(record["output"], str):
            raise DataError(expected("'output' to be a text", type(record["output"]).__name__))
        return self._encode_pair(prompt, record["output"])

    def _text_prompt(self, record: Mapping[str, Any], default: str) -> str:
        """The prompt as text: by the template, after the system prompt unless the template has a place for it."""
        template = self.prompt_template or default
        for name in ("tools", "chat_template_kwargs"):
            if record.get(name) and f"{{{name}" not in template:
                do = "Write prompt and completion as messages, which the chat template renders, or remove the field."
                raise DataError(expected(f"a conversation as messages with {name!r}", "texts", do))
        prompt, system = fill_template(template, record), record.get("system")
        return f"{system}\n\n{prompt}" if system and "{system" not in template else prompt

    def _encode_pair(self, prompt: str, completion: str) -> Encoded:
        ids, (boundary,) = locate(self._require(), prompt + completion, [len(prompt)], special=True)
        ids, removed = self._remove_second_bos(ids)
        content = len(ids)
        ids = self._add_eos(ids)
        labels = ids.copy()
        if self.train_on != "all":
            # An EOS added by the tokenizer is trained on, like ours.
            has_eos = content == len(ids) and content > 0 and ids[-1] == self._eos
            labels[: min(boundary - removed, content - has_eos)] = IGNORE_INDEX
        return Encoded(ids, labels)

    def _encode_chat(self, record: Mapping[str, Any]) -> Encoded:
        since = 0
        if self.train_on == "completion":
            is_user = [isinstance(turn, Mapping) and turn.get("role") == "user" for turn in record["messages"]]
            since = max((i + 1 for i, is_question in enumerate(is_user) if is_question), default=0)
        return self._encode_conversation(record, since)

    def _encode_conversation(self, record: Mapping[str, Any], since: int) -> Encoded:
        self._require()
        assert self._renderer is not None
        ids, supervised = self._renderer.encode(
            record["messages"],
            since=None if self.train_on == "all" else since,
            tools=check_tools(record.get("tools")),
            options=check_template_options(record.get("chat_template_kwargs")),
        )
        return Encoded(ids, np.where(supervised, ids, np.int32(IGNORE_INDEX)))

    # -- BOS, EOS and length ----------------------------------------------------------------------------------

    def _require(self) -> Any:
        if self.tokenizer is None:
            raise BadArgument(expected("a tokenizer for data that is not tokenised", None))
        return self.tokenizer

    def _remove_second_bos(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Remove the second BOS of a text that contains its own; how many were removed."""
        if self._bos is None or len(ids) < 2 or ids[0] != self._bos or ids[1] != self._bos:
            return ids, 0
        return ids[1:], 1

    def _add_eos(self, ids: np.ndarray) -> np.ndarray:
        if not self.add_eos:
            return ids
        if self._eos is None:
            what = "a tokenizer with an EOS token, to learn where a text ends"
            raise BadArgument(expected(what, "one without", "Set tokenizer.eos_token, or pass add_eos=False."))
        return ids if len(ids) and ids[-1] == self._eos else np.append(ids, np.int32(self._eos))

    def _fit(self, whole: Encoded, schema: str, report: EncodingReport) -> list[Encoded]:
        """The sequences of a record that fit into max_length and have something to train on."""
        report.records += 1
        size, limit = len(whole.input_ids), self.max_length
        if whole.supervised == 0:
            report.add_outcome(_why_untrainable(whole, schema), "dropped")
            return []
        pieces = [whole]
        if limit is not None and size > limit:
            policy = self.truncation
            if policy == "auto":
                policy = "split" if schema in ("text", "tokens") else "truncate"
            pieces = _cut(whole, limit) if policy == "split" else []
            if policy == "truncate":
                pieces = [Encoded(whole.input_ids[:limit], whole.labels[:limit])]
            kept = [piece for piece in pieces if piece.supervised]
            if pieces and not kept:
                report.add_outcome(f"nothing to train on in the first {limit} tokens", "dropped")
            else:
                report.add_outcome(f"longer than {limit} tokens", _OUTCOMES[policy])
            pieces = kept
        report.pieces += len(pieces)
        report.tokens += sum(len(piece.input_ids) for piece in pieces)
        report.supervised += sum(piece.supervised for piece in pieces)
        return pieces


def _schema_of(record: Any) -> str:
    """The schema of a record, by its keys: tokens, chat, completion, alpaca or text.

    >>> _schema_of({"prompt": "2 + 2 =", "completion": " 4"})
    'completion'
    """
    if isinstance(record, str):
        return "text"
    if isinstance(record, Mapping):
        for schema, keys in _SCHEMA_KEYS.items():
            if all(record.get(key) is not None for key in keys):
                return schema
    known = "; ".join(" + ".join(keys) for keys in _SCHEMA_KEYS.values())
    received = list(record) if isinstance(record, Mapping) else type(record).__name__
    raise DataError(expected(f"a record with the keys of a known schema ({known})", received, "Rename the columns."))


@contextmanager
def _located_errors(
    records: Sequence[Any], first: int, where: Callable[[int], str] | None, place: int
) -> Iterator[None]:
    """Add the location of a record to errors: from `where`, else its number, counted from `first`."""
    try:
        yield
    except Exception as error:
        location = where(first + place) if where else f"Record {first + place}"
        if isinstance(error, (BadArgument, DataError)):
            raise type(error)(f"{location}: {error}") from error
        try:
            json.dumps(records[place], ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as wrong:
            do = "A lone surrogate, such as '\\ud83d', comes from truncated text; clean it with errors='ignore'."
            raise DataError(f"{location}: {expected('valid Unicode text', wrong.reason, do)}") from error
        error.add_note(f"(while tokenising {location})")
        raise


def _text_of(record: Any) -> str | None:
    """The text of a plain text record, else None."""
    if isinstance(record, str):
        return record
    text = record.get("text") if isinstance(record, Mapping) else None
    return text if isinstance(text, str) and (len(record) == 1 or _schema_of(record) == "text") else None


def _why_untrainable(whole: Encoded, schema: str) -> str:
    if len(whole.input_ids) < 2:
        return "empty, or a single token"
    return {
        "chat": "no assistant token (no such turn, or empty {% generation %} markers)",
        "tokens": f"all labels are {IGNORE_INDEX}",
    }.get(schema, "empty completion")


def _cut(whole: Encoded, limit: int) -> list[Encoded]:
    """Sequences of `limit` tokens, the last with the rest; it gets at least two tokens, since one has no loss.

    >>> [len(piece.input_ids) for piece in _cut(Encoded(np.arange(9), np.arange(9)), 4)]
    [4, 3, 2]
    """
    size = len(whole.input_ids)
    edges = [*range(0, size, limit), size]
    if edges[-1] - edges[-2] == 1 and limit > 2 and len(edges) > 2:
        edges[-2] -= 1
    return [Encoded(whole.input_ids[a:b], whole.labels[a:b]) for a, b in pairwise(edges)]


def fill_template(template: str, record: Mapping[str, Any]) -> str:
    try:
        return template.format_map(record)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        what = f"prompt_template to name fields of the record ({', '.join(record)})"
        do = f"The template is {template!r}; write literal braces twice."
        raise BadArgument(expected(what, error, do)) from error


def _integers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(expected(f"{name} to be a list of integers", f"{array.dtype} of shape {array.shape}"))
    return array.astype(np.int32)


def _choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        choices = ", ".join(map(repr, known))
        raise BadArgument(expected(f"{name} to be one of {choices}", value, did_you_mean(str(value), known)))


def _tokenizer_parts(tokenizer: Any) -> list[bytes]:
    """Everything a tokenizer's output depends on, as bytes."""
    if tokenizer is None:
        return [b"none"]
    about = [
        type(tokenizer).__name__,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        tokenizer.chat_template,
    ]
    parts = [json.dumps(about, sort_keys=True, default=str).encode()]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        text = backend.to_str()
        return [*parts, text[max(0, text.find(',"added_tokens":[')) :].encode()]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                parts += [path.name.encode(), path.read_bytes()]
    return parts
