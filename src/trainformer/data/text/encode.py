"""Records as tokens and labels: text, prompts with completions, conversations, and what is tokenised already.

Owns what of a record is trained on, its BOS and EOS, and what happens when it is too long. How a conversation is
rendered and where its turns are is left to `chat`; tokenising many records once and keeping the result, to `store`.
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
from typing import Any, NamedTuple

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.text.chat import ChatRenderer, locate

Naming = Callable[[int], AbstractContextManager[None]]

IGNORED = -100  # the label of a token that is not trained on
TRAIN_ON = ("auto", "completion", "assistant", "all")
TRUNCATION = ("auto", "drop", "truncate", "split")
_FATES = {"drop": "dropped", "truncate": "truncated", "split": "split"}

_FORMS = {  # the keys by which the form of a record is known, the most telling first
    "tokens": ("input_ids",),
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
# The two prompts of the Alpaca data, which models tuned on it know word by word.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


class Encoded(NamedTuple):
    """A piece of a record. A label is the token of its own place (the loss shifts), or -100: not trained on."""

    input_ids: np.ndarray
    labels: np.ndarray

    @property
    def supervised(self) -> int:
        """Tokens that enter the loss. The first of a sequence never does: nothing comes before it.

        >>> Encoded(np.array([5, 6, 7]), np.array([5, -100, 7])).supervised
        1
        """
        return int(np.count_nonzero(self.labels[1:] != IGNORED))


@dataclass
class Report:
    """What became of the records: counts, and why records were dropped or shortened.

    >>> report = Report(records=3, pieces=2, tokens=10, supervised=8, dropped=1, reasons={"empty": 1})
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

    def add(self, other: Report) -> None:
        """Count what another report counted."""
        for name, value in asdict(other).items():
            if name != "reasons":
                setattr(self, name, getattr(self, name) + value)
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))

    def blame(self, reason: str, fate: str) -> None:
        """Count a record that was `dropped`, `truncated` or `split`, and why."""
        setattr(self, fate, getattr(self, fate) + 1)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def __str__(self) -> str:
        head = f"{self.records:,} records, {self.pieces:,} pieces, {self.tokens:,} tokens, {self.supervised:,} of them "
        fates = [(name, getattr(self, name)) for name in ("dropped", "truncated", "split")]
        counted = ", ".join(f"{count:,} {name}" for name, count in fates if count)
        why = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.reasons.items()))
        return f"{head}supervised" + (f"; {counted} ({why})" if counted else "")


class Encoder:
    """Turns records into tokens and labels.

    A record is known by its keys: `input_ids` (with `labels`, if there are), `messages`, `prompt` and `completion`
    (texts, or lists of messages), `instruction`, `input` and `output`, or `text`; a plain string is a text.

    `train_on="auto"` trains on all of a text, on the completion of a prompt, and on the assistant's turns of a
    conversation. `"completion"` means the answer to the last user's message there, `"all"` means every token.

    A prompt and its completion are tokenised as one text, as TRL does and as the model will see them. A token that
    reaches over the border belongs to the completion: let a space be the completion's first character rather than the
    prompt's last.
    `prompt_template` is a format string over the fields of a record, `"Q: {prompt}\\nA:"` or `"{instruction} {input}"`.

    With `add_eos`, texts and completions end with the tokenizer's EOS, which is trained on; conversations end as their
    template says. BOS comes where the tokenizer adds it, and only once.

    A record of more than `max_length` tokens is split (`"auto"`: texts and tokens), truncated at its end (`"auto"`: all
    others) or dropped. Pieces on which nothing is trained are dropped; the report says how many, and why.
    """

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
        self._encoders: dict[str, Callable[[Mapping[str, Any]], Encoded]] = {
            "tokens": self._encode_tokens,
            "chat": self._encode_chat,
            "completion": self._encode_completion,
            "alpaca": self._encode_alpaca,
            "text": self._encode_no_text,
        }
        self._renderer = None if tokenizer is None else ChatRenderer(tokenizer)
        # Asked once: a tokenizer takes 6 us to answer.
        self._vocabulary = None if tokenizer is None else len(tokenizer)
        self._bos = None if tokenizer is None else tokenizer.bos_token_id
        self._eos = None if tokenizer is None else tokenizer.eos_token_id

    def encode(self, record: Any, report: Report | None = None) -> list[Encoded]:
        """The pieces of a record: one, or several if it was split, or none if it was dropped. `report` counts them."""
        return self.encode_all([record], report)[0]

    def encode_all(
        self,
        records: Sequence[Any],
        report: Report | None = None,
        *,
        first: int = 0,
        where: Callable[[int], str] | None = None,
    ) -> list[list[Encoded]]:
        """The pieces of each record. Errors name the record: by its number, counted from `first`, or as `where` says.

        Texts are tokenised with one call: short ones twice as fast as one by one.
        """
        report = Report() if report is None else report
        return self._pieces_of(records, report, partial(_naming, records, first, where))

    def _pieces_of(self, records: Sequence[Any], report: Report, naming: Naming) -> list[list[Encoded]]:
        """What `encode_all` returns. An error inside of `naming(i)` is told of the i-th of the records."""
        texts = [_text_of(record) for record in records]
        tokens = self._tokens_of([text for text in texts if text is not None])
        pieces = []
        for place, (record, text) in enumerate(zip(records, texts, strict=True)):
            with naming(place):
                if text is None:
                    form = _form_of(record)
                    whole = self._encoders[form](record)
                else:
                    form, whole = "text", self._encode_text(next(tokens), bool(text))
                pieces.append(self._fit(whole, form, report))
        return pieces

    def fingerprint(self) -> str:
        """A digest of everything the tokens depend on but the records: the settings and the tokenizer.

        The tokenizer's own truncation and padding do not count: they are states that other calls leave behind.
        """
        settings = [self.max_length, self.train_on, self.truncation, self.add_eos, self.prompt_template]
        digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
        for part in _tokenizer_parts(self.tokenizer):
            digest.update(part)
        return digest.hexdigest()

    # -- the forms of a record -------------------------------------------------------------------------------

    def _tokens_of(self, texts: list[str]) -> Iterator[list[int]]:
        if not texts:
            return iter(())
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        tokenizer = self._require()
        try:
            return iter(tokenizer(texts, **options)["input_ids"])
        except TypeError:  # one of them is no Unicode, and which it is shows one by one
            return (tokenizer(text, **options)["input_ids"] for text in texts)

    def _encode_text(self, tokens: list[int], has_content: bool) -> Encoded:
        if self.train_on not in ("auto", "all"):
            raise DataError(
                expected(
                    f"prompts with completions, or conversations, for train_on={self.train_on!r}",
                    "a text",
                    "Pass train_on='all', or data with 'prompt' and 'completion'.",
                )
            )
        ids = self._ended(self._begun(np.asarray(tokens, dtype=np.int32))[0]) if has_content else np.empty(0, np.int32)
        return Encoded(ids, ids.copy())

    def _encode_no_text(self, record: Mapping[str, Any]) -> Encoded:
        raise DataError(expected("'text' to be a string", type(record["text"]).__name__))

    def _encode_tokens(self, record: Mapping[str, Any]) -> Encoded:
        ids = _whole_numbers(record["input_ids"], "input_ids")
        if ids.size and (ids.min() < 0 or (self._vocabulary is not None and ids.max() >= self._vocabulary)):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            limit = "" if self._vocabulary is None else f" and below {self._vocabulary}, the size of the vocabulary"
            raise DataError(expected(f"input_ids from 0 on{limit}", wrong, "Was another tokenizer used?"))
        if record.get("labels") is not None:
            labels = _whole_numbers(record["labels"], "labels")
            if len(labels) != len(ids):
                raise DataError(expected(f"as many labels as input_ids ({len(ids)})", len(labels)))
        elif self.train_on in ("auto", "all"):
            labels = ids.copy()
        else:
            do = f"Pass labels with {IGNORED} at the prompt, or train_on='all'."
            raise DataError(expected(f"labels beside input_ids for train_on={self.train_on!r}", "none", do))
        return Encoded(ids, labels)

    def _encode_completion(self, record: Mapping[str, Any]) -> Encoded:
        prompt, completion = record["prompt"], record["completion"]
        if not isinstance(prompt, str) and not isinstance(completion, str):
            both = {**record, "messages": [*prompt, *completion]}
            return self._encode_conversation(both, 0 if self.train_on == "assistant" else len(prompt))
        if self.prompt_template is not None:
            prompt = _filled(self.prompt_template, record)
        return self._encode_pair(prompt, completion)

    def _encode_alpaca(self, record: Mapping[str, Any]) -> Encoded:
        template = self.prompt_template or (_ALPACA_WITH_INPUT if record.get("input") else _ALPACA)
        return self._encode_pair(_filled(template, {**record, "input": record.get("input") or ""}), record["output"])

    def _encode_pair(self, prompt: Any, completion: Any) -> Encoded:
        if not isinstance(prompt, str) or not isinstance(completion, str):
            received = {"prompt": type(prompt).__name__, "completion": type(completion).__name__}
            raise DataError(expected("prompt and completion to be two texts or two lists of messages", received))
        ids, (border,) = locate(self._require(), prompt + completion, [len(prompt)], special=True)
        ids, removed = self._begun(ids)
        content = len(ids)
        ids = self._ended(ids)
        labels = ids.copy()
        if self.train_on != "all":
            # An EOS that the tokenizer itself puts at the end is trained on, like ours.
            ends_so = content == len(ids) and content > 0 and ids[-1] == self._eos
            labels[: min(border - removed, content - ends_so)] = IGNORED
        return Encoded(ids, labels)

    def _encode_chat(self, record: Mapping[str, Any]) -> Encoded:
        since = 0
        if self.train_on == "completion":
            is_user = [isinstance(turn, Mapping) and turn.get("role") == "user" for turn in record["messages"]]
            since = max((place + 1 for place, asks in enumerate(is_user) if asks), default=0)
        return self._encode_conversation(record, since)

    def _encode_conversation(self, record: Mapping[str, Any], since: int) -> Encoded:
        self._require()
        assert self._renderer is not None
        tools = record.get("tools") or None
        ids, supervised = self._renderer.encode(
            record["messages"],
            since=None if self.train_on == "all" else since,
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            options=record.get("chat_template_kwargs"),
        )
        return Encoded(ids, np.where(supervised, ids, np.int32(IGNORED)))

    # -- both ends, and the length ---------------------------------------------------------------------------

    def _require(self) -> Any:
        if self.tokenizer is None:
            raise BadArgument(expected("a tokenizer for data that is not tokenised yet", None))
        return self.tokenizer

    def _begun(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Without the second BOS of a text that brings its own, and how many were removed."""
        if self._bos is None or len(ids) < 2 or ids[0] != self._bos or ids[1] != self._bos:
            return ids, 0
        return ids[1:], 1

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        if not self.add_eos:
            return ids
        if self._eos is None:
            raise BadArgument(
                expected(
                    "a tokenizer with an EOS token, by which the model learns where a text ends",
                    "one without",
                    "Set tokenizer.eos_token, or pass add_eos=False.",
                )
            )
        return ids if len(ids) and ids[-1] == self._eos else np.append(ids, np.int32(self._eos))

    def _fit(self, whole: Encoded, form: str, report: Report) -> list[Encoded]:
        """The pieces of a record that are short enough and have something to learn in them, counted."""
        report.records += 1
        size, limit = len(whole.input_ids), self.max_length
        if whole.supervised == 0:
            report.blame(_why_nothing(whole, form), "dropped")
            return []
        pieces = [whole]
        if limit is not None and size > limit:
            policy = self.truncation
            if policy == "auto":
                policy = "split" if form in ("text", "tokens") else "truncate"
            pieces = _cut(whole, limit) if policy == "split" else []
            if policy == "truncate":
                pieces = [Encoded(whole.input_ids[:limit], whole.labels[:limit])]
            kept = [piece for piece in pieces if piece.supervised]
            if pieces and not kept:
                report.blame(f"nothing to train on in the first {limit} tokens", "dropped")
            else:
                report.blame(f"longer than {limit} tokens", _FATES[policy])
            pieces = kept
        report.pieces += len(pieces)
        report.tokens += sum(len(piece.input_ids) for piece in pieces)
        report.supervised += sum(piece.supervised for piece in pieces)
        return pieces


def _form_of(record: Any) -> str:
    """The form of a record, by its keys: tokens, chat, completion, alpaca or text.

    >>> _form_of({"prompt": "2 + 2 =", "completion": " 4"})
    'completion'
    """
    if isinstance(record, str):
        return "text"
    if isinstance(record, Mapping):
        for form, keys in _FORMS.items():
            if all(record.get(key) is not None for key in keys):
                return form
    known = "; ".join(" + ".join(keys) for keys in _FORMS.values())
    received = list(record) if isinstance(record, Mapping) else type(record).__name__
    raise DataError(expected(f"a record with the keys of a known form ({known})", received, "Rename the columns."))


@contextmanager
def _naming(records: Sequence[Any], first: int, where: Callable[[int], str] | None, place: int) -> Iterator[None]:
    """Errors in this block name the record in that place: by its number, counted from `first`, or as `where` says."""
    try:
        yield
    except Exception as error:
        number = first + place
        placed = _placed(error, records[place], where(number) if where else f"Record {number}")
        if placed is error:
            raise
        raise placed from error


def _placed(error: Exception, record: Any, place: str) -> Exception:
    """An error of ours with the place of the record; any other as it is, with the place as a note."""
    if isinstance(error, (BadArgument, DataError)):
        return type(error)(f"{place}: {error}")
    try:
        json.dumps(record, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as wrong:
        do = "Half a character, such as '\\ud83d', comes from a text that was cut; clean it with errors='ignore'."
        return DataError(f"{place}: {expected('a text of whole Unicode characters', wrong.reason, do)}")
    error.add_note(f"(while tokenising {place})")
    return error


def _text_of(record: Any) -> str | None:
    """The text of a record that is nothing else."""
    if isinstance(record, str):
        return record
    text = record.get("text") if isinstance(record, Mapping) else None
    return text if isinstance(text, str) and (len(record) == 1 or _form_of(record) == "text") else None


def _why_nothing(whole: Encoded, form: str) -> str:
    if len(whole.input_ids) < 2:
        return "empty, or a single token"
    return {
        "chat": "no token of the assistant (no such turn, or {% generation %} markers around nothing)",
        "tokens": f"all labels are {IGNORED}",
    }.get(form, "empty completion")


def _cut(whole: Encoded, limit: int) -> list[Encoded]:
    """Pieces of `limit` tokens, the last with the rest. If that is one token, it gets a second: one teaches nothing.

    >>> [len(piece.input_ids) for piece in _cut(Encoded(np.arange(9), np.arange(9)), 4)]
    [4, 3, 2]
    """
    size = len(whole.input_ids)
    edges = [*range(0, size, limit), size]
    if edges[-1] - edges[-2] == 1 and limit > 2 and len(edges) > 2:
        edges[-2] -= 1
    return [Encoded(whole.input_ids[a:b], whole.labels[a:b]) for a, b in pairwise(edges)]


def _filled(template: str, record: Mapping[str, Any]) -> str:
    try:
        return template.format_map(record)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        what = f"prompt_template to name fields of the record ({', '.join(record)})"
        do = f"The template is {template!r}; write a brace that is meant as such twice."
        raise BadArgument(expected(what, error, do)) from error


def _whole_numbers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(expected(f"{name} to be a list of whole numbers", f"{array.dtype} of shape {array.shape}"))
    return array.astype(np.int32)


def _choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        choices = ", ".join(map(repr, known))
        raise BadArgument(expected(f"{name} to be one of {choices}", value, did_you_mean(str(value), known)))


def _tokenizer_parts(tokenizer: Any) -> list[bytes]:
    """What a tokenizer's results depend on, as bytes."""
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
