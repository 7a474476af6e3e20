"""From user data to token datasets in one call, without torch: causal language modelling, and preference pairs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import normalize_index
from trainformer.data.labels import is_stream
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.messages import with_system
from trainformer.data.text.packing import PackedDataset
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.rendering import common_prefix
from trainformer.data.text.sources import load_text
from trainformer.data.text.store import StoreView, TokenStore, tokenize
from trainformer.data.text.streams import PairStream, TokenStream

logger = logging.getLogger("trainformer")


def causal_tokens(
    data: Any,
    encoder: Encoder,
    *,
    packing: bool = False,
    cache_dir: str | Path | None = None,
    name: str = "data",
) -> TokenStore | PackedDataset | TokenStream:
    """Tokenise texts, prompts with completions, Alpaca records or conversations once; streams on the fly.

    `data` is a path or name that `load_text` accepts, records of any schema, or tokenised data (`input_ids`). `packing`
    packs whole documents into sequences of the encoder's `max_length`. Collate the samples with `token_batch`.
    """
    if packing and encoder.max_length is None:
        raise BadArgument(expected("an encoder with a max_length, to pack to", None))
    if isinstance(data, str | Path):
        data = load_text(data)
    capacity = encoder.max_length if packing else None
    if is_stream(data):
        return TokenStream(data, encoder, capacity=capacity)
    records: Any = data if has_tokens(data) else StandardRecords(data)
    store = tokenize(records, encoder, cache_dir=cache_dir, name=name)
    if capacity is None:
        return store
    packed = PackedDataset(store, capacity)
    counts = f"{len(store):,}", f"{len(packed):,}"
    logger.info("packed %s documents into %s sequences, %.1f %% full", *counts, 100 * packed.efficiency)
    return packed


def preference_tokens(
    data: Any, encoder: PairEncoder, *, cache_dir: str | Path | None = None, name: str = "data"
) -> Pairs | PairStream:
    """Tokenise preference pairs (`prompt`, `chosen`, `rejected`) once; streams on the fly.

    Collate the samples with `pair_batch`.
    """
    if isinstance(data, str | Path):
        data = load_text(data)
    if is_stream(data):
        return PairStream(data, encoder)
    records: Any = StandardRecords(data, "preference")
    return Pairs(tokenize(records, encoder, cache_dir=cache_dir, name=name))


def has_tokens(data: Any) -> bool:
    """Whether records are tokenised.

    >>> has_tokens([{"input_ids": [1, 2]}]), has_tokens(["a text"])
    (True, False)
    """
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, Mapping) or not len(data):
        return False
    first = data[0]
    return isinstance(first, Mapping) and "input_ids" in first


class Pairs(StoreView):
    """Preference pairs, over a store that has the chosen and the rejected answer next to each other."""

    @property
    def lengths(self) -> np.ndarray:
        """Length of the longer answer of each pair."""
        return self.store.lengths.reshape(-1, 2).max(axis=1)

    def __len__(self) -> int:
        return len(self.store) // 2

    def __getitem__(self, index: int) -> dict[str, dict[str, np.ndarray]]:
        place = 2 * normalize_index(index, len(self))
        return {"chosen": self.store[place], "rejected": self.store[place + 1]}


class PairEncoder(Encoder):
    """Encodes two sequences per record: the prompt with the chosen, and with the rejected answer.

    `limits` are the maximum numbers of tokens of a prompt, which loses its beginning, and of an answer, which loses its
    end.
    """

    def __init__(self, tokenizer: Any, *, limits: tuple[int | None, int | None] = (None, None), **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.limits = limits

    def _fit(self, whole: Encoded, schema: str, report: EncodingReport) -> list[Encoded]:
        trained = whole.labels != IGNORE_INDEX
        begin, (prompt, completion) = int(trained.argmax()) if trained.any() else 0, self.limits
        first = 0 if prompt is None else max(0, begin - prompt)
        last = len(trained) if completion is None else min(len(trained), begin + completion)
        fitted = super()._fit(Encoded(whole.input_ids[first:last], whole.labels[first:last]), schema, report)
        if fitted and not report.truncated and last - first < len(trained):
            report.add_outcome("a prompt or an answer longer than its limit", "truncated")
        return fitted

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        """A pair is dropped if either answer is dropped, or if both are equal."""
        found = []
        for place, record in enumerate(records):
            reports = [EncodingReport(), EncodingReport()]
            with context(place):
                pieces = [
                    piece
                    for answer, counted in zip(self._answers(record), reports, strict=True)
                    for piece in super(PairEncoder, self)._pieces_of([answer], counted, lambda _: nullcontext())[0]
                ]
            found.append(self._keep_pair(pieces, reports, report))
        return found

    def _answers(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Both answers of a record, as records with one sequence each."""
        return answers(record)

    def _keep_pair(self, pieces: list[Encoded], reports: list[EncodingReport], report: EncodingReport) -> list[Encoded]:
        report.records += 1
        if len(pieces) < 2:
            lost = next(counted for counted in reports if counted.dropped)
            report.add_outcome(next(iter(lost.reasons)), "dropped")
            return []
        if np.array_equal(pieces[0].input_ids, pieces[1].input_ids):
            report.add_outcome("both answers are the same", "dropped")
            return []
        cut = next((counted for counted in reports if counted.truncated), None)
        if cut is not None:
            report.add_outcome(next(iter(cut.reasons)), "truncated")
        report.pieces += 2
        report.tokens += sum(len(piece.input_ids) for piece in pieces)
        report.supervised += sum(piece.supervised for piece in pieces)
        return pieces

    def fingerprint(self) -> str:
        limits = "" if self.limits == (None, None) else f"{self.limits[0]}-{self.limits[1]}-"
        return f"pairs-{limits}{super().fingerprint()}"


def answers(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two answers of a record, each as prompt and completion, with what the record passes to the chat template.

    >>> [answer["completion"] for answer in answers({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"})]
    [' 2', ' 3']
    >>> ask = {"role": "user", "content": "1 + 1?"}
    >>> chats = [[ask, {"role": "assistant", "content": text}] for text in ("2", "3")]
    >>> [len(answer["prompt"]) for answer in answers({"chosen": chats[0], "rejected": chats[1]})]
    [1, 1]
    """
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        return [{**record, "completion": answer} for answer in (chosen, rejected)]
    if prompt is None and (isinstance(chosen, str) or isinstance(rejected, str)):
        raise DataError(expected("a prompt, or two whole conversations as messages", list(record), "Add 'prompt'."))
    question = _as_messages(prompt, "user") if prompt is not None else []
    both = [_as_messages(answer, "assistant") for answer in (chosen, rejected)]
    # Their common messages, without the last one of either, which is the answer.
    size = min(common_prefix(*both), *(len(answer) - 1 for answer in both))
    shared = both[0][: max(0, size)]
    if prompt is None or (shared and shared[: len(question)] == question) or shared[-len(question) :] == question:
        # Whole conversations that start with the prompt (perhaps after a system message).
        question, both = shared, [answer[len(shared) :] for answer in both]
    if record.get("system"):
        question = with_system(question, record["system"])
    passed = {name: record[name] for name in ("tools", "chat_template_kwargs") if record.get(name)}
    return [{"prompt": question, "completion": answer, **passed} for answer in both]


def _as_messages(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)
