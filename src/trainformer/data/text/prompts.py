"""Prompts to complete, tokenised once, with their columns: data of tasks that learn from completions they sample."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.data.dataset import IndexedDataset, normalize_index
from trainformer.data.order import sample_rng
from trainformer.data.text.encode import Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.generation import GenerationPrompt
from trainformer.data.text.records import _RecordsView
from trainformer.data.text.store import tokenize
from trainformer.utils.files import decode_json

logger = logging.getLogger("trainformer")

_PROMPT_KEYS = ("prompt", "question", "query", "problem", "messages")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was given, its tokens, the other columns of its record, and what its chat template needs."""

    prompt: str | Messages
    ids: tuple[int, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it is a list of messages."""
        return not isinstance(self.prompt, str)


class PromptRecords(_RecordsView):
    """Records with a prompt (a text, or messages) and any other columns.

    The prompt is in the column `prompt`, or else `question`, `query`, `problem` or `messages`. All prompts are texts,
    or all are messages. `prompt_template` is a format string over the columns instead.

    >>> found = PromptRecords([{"prompt": "1 + 1 =", "answer": 2}])[0]
    >>> found.prompt, found.columns
    ('1 + 1 =', {'answer': 2})
    """

    def __init__(self, source: Any, prompt_template: str | None = None) -> None:
        super().__init__(source, None)
        if not len(self):
            raise DataError(expected("at least one prompt", "none"))
        self.prompt_template = prompt_template
        first = self._records[0]
        self._key = None if prompt_template is not None else _prompt_key(first)
        self._is_chat: bool | None = None
        found: Any = self[0]
        self._is_chat = found.is_chat
        self.fingerprint = self._fingerprint_with("prompts", prompt_template)

    def _convert(self, record: Any) -> Prompt:  # type: ignore[override]
        if self._key is None and self.prompt_template is None:
            return self._checked(Prompt(record))
        if not isinstance(record, Mapping):
            raise DataError(expected("a record with columns, as the first one", type(record).__name__))
        if self.prompt_template is not None:
            try:
                prompt: Any = self.prompt_template.format_map(record)
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                what = f"prompt_template to name columns of the record ({', '.join(map(str, record))})"
                raise DataError(expected(what, error, "Write literal braces twice.")) from error
        elif record.get(self._key) is None:
            raise DataError(expected(f"a value of {self._key!r}", f"the keys {', '.join(map(repr, record))}"))
        else:
            prompt = record[self._key]
        columns = {str(name): value for name, value in record.items() if name != self._key}
        tools, options = columns.get("tools") or None, columns.get("chat_template_kwargs") or {}
        if isinstance(tools, str):
            tools = decode_json(tools)
        if not isinstance(options, Mapping):
            raise DataError(expected("chat_template_kwargs to be a mapping", type(options).__name__))
        return self._checked(Prompt(prompt, columns=columns, tools=tools, options=options))

    def _checked(self, found: Prompt) -> Prompt:
        is_messages = isinstance(found.prompt, Sequence) and all(isinstance(m, Mapping) for m in found.prompt)
        if isinstance(found.prompt, str):
            if not found.prompt:
                raise DataError(expected("a prompt of at least one character", "''"))
        elif not is_messages or not found.prompt or not all("role" in message for message in found.prompt):
            received = type(found.prompt).__name__ if found.prompt else "an empty one"
            raise DataError(expected("a prompt to be a text or a list of messages with role and content", received))
        elif self._key == "messages" and found.prompt[-1]["role"] == "assistant":
            do = "Remove the answer from 'messages', and rename them to 'prompt'."
            raise DataError(expected("messages that end with a question", "an answer of the assistant", do))
        if self._is_chat is not None and found.is_chat != self._is_chat:
            names = "a text", "messages"
            what = f"prompts of one kind, {names[self._is_chat]} as in the first record"
            raise DataError(expected(what, names[found.is_chat]))
        if found.is_chat:
            return Prompt([dict(m) for m in found.prompt], (), found.columns, found.tools, found.options)  # type: ignore[arg-type]
        return found


def _prompt_key(first: Any) -> str | None:
    """The column of the prompt; None if records are prompts themselves."""
    if isinstance(first, str) or (isinstance(first, Sequence) and not isinstance(first, Mapping)):
        return None
    keys = list(first) if isinstance(first, Mapping) else type(first).__name__
    found = next((name for name in _PROMPT_KEYS if isinstance(first, Mapping) and name in first), None)
    if found is None:
        do = "Rename the column, or pass prompt_template='... {column} ...'."
        raise DataError(expected(f"records with a prompt ({', '.join(_PROMPT_KEYS)})", keys, do))
    return found


class PromptEncoder(Encoder):
    """Tokens of prompts: of messages as the chat template renders them, up to where the answer begins.

    `tools` are the schemas of tools for prompts that have none of their own.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None) -> None:
        super().__init__(tokenizer, max_length=None, add_eos=False)
        self.tools = list(tools) if tools else None

    def ids_of(self, prompt: Prompt) -> list[int]:
        """The tokens of one prompt."""
        if isinstance(prompt.prompt, str):
            return GenerationPrompt(prompt.prompt).encode(self._require())
        continues = prompt.prompt[-1]["role"] == "assistant"
        tools = prompt.tools or self.tools
        made = GenerationPrompt(None, list(prompt.prompt), tools, prompt.options, continues)
        return made.encode(self._require())

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        pieces = []  # one per record: they are matched with the columns by their index
        for place, record in enumerate(records):
            with context(place):
                ids = np.asarray(self.ids_of(record), dtype=np.int32)
            report.records += 1
            report.pieces += 1
            report.tokens += len(ids)
            report.supervised += len(ids)
            pieces.append([Encoded(ids, ids.copy())])
        return pieces

    def fingerprint(self) -> str:
        return f"prompts-{json.dumps(self.tools, sort_keys=True, default=str)}-{super().fingerprint()}"


class Prompts(IndexedDataset):
    """Prompts with their tokens, and `seeds` for the random numbers of each of their `generations` completions.

    A seed is a function of (seed of the run, epoch, sample): completions depend neither on the batch nor on the
    number of processes. Prompts of more than `max_tokens` tokens are dropped, with a warning; with `keeps_all` they
    are an error.
    """

    in_memory = True

    def __init__(
        self,
        records: PromptRecords,
        encoder: PromptEncoder,
        *,
        generations: int,
        max_tokens: int | None = None,
        keeps_all: bool = False,
        cache_dir: str | Path | None = None,
        name: str = "data",
    ) -> None:
        self.records = cast(Any, records)
        self.generations = generations
        self.store = tokenize(self.records, encoder, cache_dir=cache_dir, name=name)
        assert len(self.store) == len(records)
        fits = self.store.lengths <= (max_tokens or np.inf)
        if not fits.all():
            where = records.location(int(np.flatnonzero(~fits)[0]))
            if keeps_all or not fits.any():
                longest = int(self.store.lengths.max())
                do = "Shorten it, or pass a larger max_prompt_length."
                raise DataError(f"{where}: {expected(f'prompts of at most {max_tokens} tokens', longest, do)}")
            logger.warning(
                "%d of %d prompts have more than %d tokens and are left out, the first at %s",
                int((~fits).sum()), len(fits), max_tokens, where,
            )  # fmt: skip
        self._kept = np.flatnonzero(fits)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt."""
        return self.store.lengths[self._kept]

    def __len__(self) -> int:
        return len(self._kept)

    def prompt(self, index: int) -> Prompt:
        """One prompt, with its tokens."""
        place = int(self._kept[normalize_index(index, len(self))])
        found: Prompt = self.records[place]
        ids = tuple(self.store[place]["input_ids"].tolist())
        return Prompt(found.prompt, ids, found.columns, found.tools, found.options)

    def __getitem__(self, index: int) -> dict[str, Any]:
        seeds = sample_rng().integers(0, 2**63 - 1, size=self.generations)
        return {"prompt": self.prompt(index), "seeds": seeds}
