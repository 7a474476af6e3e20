"""Pairs of a source and a target for encoder-decoder models, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.fields import require_key, require_text
from trainformer.data.text.schemas import schema_of, source_keys
from trainformer.data.text.store import StoreView
from trainformer.data.text.token_records import find_keys

_VERSION = "pairs-2"  # of the output of `PairEncoder`: raise it when that changes, to invalidate cached tokens
_SOURCES = {"pairs": "source", "completion": "prompt", "alpaca": "instruction"}
_SIDES = (("source", "target"), ("prompt", "completion"), ("instruction", "output"))


class PairEncoder(Encoder):
    """Tokenise pairs: the source with labels -100, followed by the target with its tokens as labels.

    A target ends with EOS, unless it was truncated.
    """

    def __init__(self, tokenizer: Any, max_source_length: int, max_target_length: int, *, prefix: str = "") -> None:
        super().__init__(tokenizer, max_length=None)
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.prefix = prefix

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {_VERSION} {self.max_source_length} {self.max_target_length} {self.prefix!r}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        whole: list[tuple[Any, Any]] = []
        for place, record in enumerate(records):
            with context(place):
                source, target = _pair_of(record)
                if not isinstance(source, str):
                    source, target = (self._encode_tokens({"input_ids": ids}).input_ids for ids in (source, target))
                whole.append((source, target))
        texts = [place for place, (source, _) in enumerate(whole) if isinstance(source, str)]
        if texts:
            sources = self._ids(text=[self.prefix + whole[place][0] for place in texts])
            targets = self._ids(text_target=[whole[place][1] for place in texts])
            for place, source, target in zip(texts, sources, targets, strict=True):
                # An empty text stays empty: with closing tokens alone the model would learn to generate nothing.
                source_text, target_text = whole[place]
                whole[place] = (
                    self._truncate_source(source, self.prefix + source_text) if source_text else [],
                    self._add_eos(np.asarray(target, dtype=np.int32)) if target_text else [],
                )
        return [self._piece(source, target, report) for source, target in whole]

    def sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise sources for generation."""
        whole = [self.prefix + text for text in texts]
        truncated = [self._truncate_source(ids, text) for ids, text in zip(self._ids(text=whole), whole, strict=True)]
        return [ids[: self.max_source_length] for ids in truncated]

    def _ids(self, **texts: Any) -> list[list[int]]:
        return self._require()(**texts, return_attention_mask=False, verbose=False)["input_ids"]

    def _truncate_source(self, ids: list[int], text: str) -> list[int]:
        """Truncate a long source with the tokenizer, which keeps its closing token.

        The result has one token too many, so that the report counts it as truncated.
        """
        if len(ids) <= self.max_source_length:
            return ids
        return [*self._require()(text, truncation=True, max_length=self.max_source_length)["input_ids"], ids[-1]]

    def _piece(self, source: Any, target: Any, report: EncodingReport) -> list[Encoded]:
        report.records += 1
        if len(source) == 0 or len(target) == 0:
            report.add_outcome("empty source" if len(source) == 0 else "empty target", "dropped")
            return []
        for name, ids, limit in (
            ("source", source, self.max_source_length),
            ("target", target, self.max_target_length),
        ):
            if len(ids) > limit:
                report.add_outcome(f"{name} longer than {limit} tokens", "truncated")
        source = np.asarray(source, dtype=np.int32)[: self.max_source_length]
        target = np.asarray(target, dtype=np.int32)[: self.max_target_length]
        labels = np.concatenate([np.full(len(source), IGNORE_INDEX, np.int32), target])
        report.pieces += 1
        report.tokens += len(labels)
        report.supervised += len(target)
        return [Encoded(np.concatenate([source, target]), labels)]


class SourceEncoder(PairEncoder):
    """Tokenise the sources of records to predict for, one sequence per record, also of an empty source."""

    def __init__(self, tokenizer: Any, max_source_length: int, key: str | None, prefix: str) -> None:
        super().__init__(tokenizer, max_source_length, max_source_length, prefix=prefix)
        self.key = key

    def fingerprint(self) -> str:
        return f"sources {self.key!r} {super().fingerprint()}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        pieces = []
        for place, record in enumerate(records):
            with context(place):
                source = _source_of(record, self.key)
                ids: Any
                if isinstance(source, str):
                    (ids,) = self.sources([source]) if source else self._ids(text=[""])
                else:
                    ids = self._encode_tokens({"input_ids": source}).input_ids[: self.max_source_length]
                tokens = np.asarray(ids if len(ids) else [self._require().pad_token_id], dtype=np.int32)
                report.add(EncodingReport(1, 1, len(tokens), len(tokens)))
                pieces.append([Encoded(tokens, tokens)])
        return pieces


class SourceDataset(StoreView):
    """A token store of `SourceEncoder` that returns `input_ids`, and the ids of the records."""

    def __init__(self, store: Any, ids: list[Any]) -> None:
        super().__init__(store)
        self.ids = ids

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.store[index]["input_ids"]}


class PairDataset(StoreView):
    """A token store of `PairEncoder` that returns `input_ids` of the source and `labels` of the target."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        item = self.store[index]
        size = int(np.count_nonzero(item["labels"] == IGNORE_INDEX))
        return {"input_ids": item["input_ids"][:size], "labels": item["labels"][size:]}


def _pair_of(record: Any) -> tuple[Any, Any]:
    """Return source and target of a record: two texts, or two lists of tokens.

    >>> _pair_of({"instruction": "Add.", "input": "1 1", "output": "2"})
    ('Add.\\n1 1', '2')
    """
    if not isinstance(record, Mapping):
        raise DataError(expected("a pair of texts (source and target)", type(record).__name__))
    if "input_ids" in record:
        if record.get("labels") is None:
            raise DataError(expected("labels, the tokens of the target, beside input_ids", "none"))
        labels = np.asarray(record["labels"])
        return record["input_ids"], labels[labels != IGNORE_INDEX]
    for source, target in _SIDES:
        if source in record and target in record:
            pair = record[source], record[target]
            if not all(isinstance(side, str) for side in pair):
                received = " and ".join(type(side).__name__ for side in pair)
                raise DataError(expected(f"{source} and {target} to be texts", received, "Join messages first."))
            for field in ("tools", "chat_template_kwargs"):
                if record.get(field):
                    do = "Remove the field, or write it into the source."
                    raise DataError(expected(f"no {field!r}, which only chat templates use", "a record with it", do))
            context = record.get("input") if source == "instruction" else None
            return _joined(pair[0], context, record.get("system")), pair[1]
    do = "Rename the columns to source and target."
    raise DataError(expected("a pair of texts (source and target, or prompt and completion)", list(record), do))


def source_key(record: Any) -> str | None:
    """The key of the source in records that may have no target; None for texts.

    >>> source_key({"id": 1, "question": "Who?"}), source_key({"article": "long", "highlights": "short"})
    ('question', 'article')
    """
    if not isinstance(record, Mapping):
        return None
    if "input_ids" in record:
        return "input_ids"
    if (schema := schema_of(record)) is not None and schema.name in _SOURCES:  # as in training
        return schema.keys[_SOURCES[schema.name]]
    known = find_keys(record, source_keys())
    if known is None:
        do = "Rename the column to source."
        raise DataError(expected("records with a source (or a prompt, an instruction, a text)", list(record), do))
    return known[-1]


def _source_of(record: Any, key: str | None) -> Any:
    """The source of a record: a text, or tokens.

    >>> _source_of({"instruction": "Add.", "input": "1 1"}, "instruction")
    'Add.\\n1 1'
    """
    if key is None or isinstance(record, str):
        return require_text(record, "source")
    value = require_key(record, key)
    if isinstance(value, Mapping) and value:  # a translation, by language
        value = next(iter(value.values()))
    context = record.get("input") if key.lower() == "instruction" else None
    return value if key == "input_ids" else _joined(require_text(value, key), context, record.get("system"))


def _joined(source: str, context: str | None, system: str | None) -> str:
    """An instruction with its input, after the system prompt."""
    return "\n".join(part for part in (system, source, context) if part)
