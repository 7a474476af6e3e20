"""Preference data beyond the pairs of DPO, without torch: pairs with a margin, and single answers with a label.

A number (the margin, the label) is stored behind the tokens it belongs to, and taken off again when they are read.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import normalize_index
from trainformer.data.labels import is_stream
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.prepare import PairEncoder, Pairs, answers
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.schemas import Schema, detect_schema, expected_value, standard
from trainformer.data.text.sources import load_text
from trainformer.data.text.store import StoreView, tokenize
from trainformer.data.text.streams import PairStream

logger = logging.getLogger("trainformer")

Item = dict[str, Any]

_BALANCE = (1.0, 4 / 3)  # of the weighted numbers of desirable and undesirable answers: equation 8 of the KTO paper
_SHIFTS = 8  # ways to pair prompts with other answers that are tried
_TRUE, _FALSE = ("true", "1"), ("false", "0")  # labels as text, as in CSV files
SCORED_SCHEMAS = ("text", "chat", "completion", "alpaca", "tokens")  # of single texts, which a reward model scores
_UNPAIRED = ("completion", "chat", "alpaca")  # schemas with one answer


def with_number(piece: Encoded, number: float) -> Encoded:
    """A sequence with a number behind its tokens.

    >>> take_number(with_number(Encoded(np.array([5, 6]), np.array([-100, 6])), 0.5)._asdict())[1]
    0.5
    """
    word = np.float32(number).view(np.int32)
    return Encoded(
        np.append(piece.input_ids, word).astype(np.int32), np.append(piece.labels, IGNORE_INDEX).astype(np.int32)
    )


def take_number(item: Mapping[str, np.ndarray]) -> tuple[Item, float]:
    """The tokens of `with_number`, and the number."""
    number = float(np.int32(item["input_ids"][-1]).view(np.float32))
    return {"input_ids": item["input_ids"][:-1], "labels": item["labels"][:-1]}, number


# -- pairs with a margin -----------------------------------------------------------------------------------


class RewardRecords(StandardRecords):
    """Preference records with their `margin`, if they have one."""

    def __init__(self, source: Any) -> None:
        super().__init__(source, "preference")
        self.fingerprint = self._fingerprint_with("margin")

    def _convert(self, record: Any) -> Item:
        return _with_margin(super()._convert(record), record)


class RewardEncoder(PairEncoder):
    """Encodes two whole sequences per record, the chosen with the margin behind it. A prompt is optional."""

    def _answers(self, record: Mapping[str, Any]) -> list[Item]:
        if record.get("prompt") is None and isinstance(record["chosen"], str) and isinstance(record["rejected"], str):
            return [{"text": record["chosen"]}, {"text": record["rejected"]}]
        return super()._answers(record)

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        pairs = super()._pieces_of(records, report, context)
        return [
            [with_number(pair[0], record.get("margin", 0.0)), pair[1]] if pair else []
            for pair, record in zip(pairs, records, strict=True)
        ]

    def fingerprint(self) -> str:
        return f"reward-{super().fingerprint()}"


class RewardPairs(Pairs):
    """Preference pairs with the field `margin`."""

    def __getitem__(self, index: int) -> Item:
        return _reward_item(super().__getitem__(index))


class RewardStream(PairStream):
    """A stream of preference pairs with the field `margin`."""

    def _standard(self, record: Any, schema: Schema) -> Item:
        return _with_margin(super()._standard(record, schema), record)

    def _items(self, records: list[Any], first: int) -> list[Any]:
        return [_reward_item(pair) for pair in super()._items(records, first)]


def reward_tokens(
    data: Any, encoder: RewardEncoder, *, cache_dir: str | Path | None = None, name: str = "data"
) -> RewardPairs | RewardStream:
    """Tokenise preference pairs for a reward model once; streams on the fly."""
    if isinstance(data, str | Path):
        data = load_text(data)
    if is_stream(data):
        return RewardStream(data, encoder)
    records: Any = RewardRecords(data)
    return RewardPairs(tokenize(records, encoder, cache_dir=cache_dir, name=name))


def scored_examples(inputs: Any, encoder: Encoder) -> list[Item]:
    """The tokens of inputs of a reward model: texts, conversations (lists of messages), records, or one of them."""
    examples = []
    for number, record in enumerate(_as_list(inputs)):
        schema = detect_schema([record])
        if schema.name not in SCORED_SCHEMAS:
            what = f"input {number} to be a text, a conversation, or a prompt with its completion"
            raise DataError(expected(what, f"a record of the schema '{schema.name}'"))
        pieces = encoder.encode(standard(record, schema))
        if len(pieces) != 1:
            raise DataError(not_scored(f"input {number}"))
        examples.append(pieces[0]._asdict())
    return examples


def not_scored(which: str) -> str:
    """The message for texts that are empty or too long."""
    do = "Raise max_length, or pass truncation='truncate', which scores the beginning; empty texts have no score."
    return expected("texts that are not empty and have at most max_length tokens to score", which, do)


def _as_list(inputs: Any) -> list[Any]:
    """Single texts, conversations and records as a list of one."""
    if isinstance(inputs, str | Mapping):
        return [inputs]
    several = list(inputs)
    if several and all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in several):
        return [several]
    if not all(isinstance(item, str | Mapping | Sequence) for item in several):
        raise BadArgument(expected("texts, conversations or records to score", [type(i).__name__ for i in several[:3]]))
    return several


def _with_margin(fields: Item, record: Any) -> Item:
    margin = record.get("margin") if isinstance(record, Mapping) else None
    if margin is None:
        return fields
    try:
        number = math.nan if isinstance(margin, bool) else float(margin)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(expected_value("'margin' to be a number", margin))
    return {**fields, "margin": number}


def _reward_item(pair: Item) -> Item:
    chosen, margin = take_number(pair["chosen"])
    return {"chosen": chosen, "rejected": pair["rejected"], "margin": margin}


# -- single answers with a label ---------------------------------------------------------------------------


class UnpairedRecords(StandardRecords):
    """Single answers, each with a `label` that says whether it is desirable.

    Records have a prompt, a completion and a label, or `messages` and a label. Preference pairs become two records: all
    chosen answers come first, and then all rejected ones, as in TRL.

    >>> records = UnpairedRecords([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}])
    >>> [(record["completion"], record["label"]) for record in (records[0], records[1])]
    [(' 2', True), (' 3', False)]
    """

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        first = self._records[0]
        _check_unpaired(self.schema, first)
        self.fingerprint = self._fingerprint_with("unpaired")

    @property
    def is_paired(self) -> bool:
        return self.schema.name == "preference"

    def __len__(self) -> int:
        return super().__len__() * (2 if self.is_paired else 1)

    def __getitem__(self, index: int) -> Item:
        index = normalize_index(index, len(self))
        size = len(self._records)
        found = super().__getitem__(index % size)
        return _both(found)[index // size] if self.is_paired else found

    def location(self, index: int) -> str:
        return super().location(index % len(self._records))

    def _convert(self, record: Any) -> Item:
        fields = super()._convert(record)
        return fields if self.is_paired else _with_label(fields, record)


class UnpairedEncoder(Encoder):
    """Encodes a prompt with its completion, and the label behind it."""

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        found = super()._pieces_of(records, report, context)
        return [
            [with_number(piece, record["label"]) for piece in pieces]
            for pieces, record in zip(found, records, strict=True)
        ]

    def fingerprint(self) -> str:
        return f"unpaired-{super().fingerprint()}"


class Unpaired(StoreView):
    """Single answers: `input_ids`, `labels` and `label`.

    With `kl_length`, also `kl_input_ids` and `kl_labels`: the prompt with the answer of another record, of at most that
    many tokens. Every answer is used once. Which one belongs to which prompt depends on the data alone.
    """

    def __init__(self, store: Any, kl_length: int | None, name: str = "data") -> None:
        super().__init__(store)
        self.kl_length = kl_length
        self.shift = 0
        if kl_length is not None:
            if len(self) < 2:
                what = f"at least two records in {name}, to pair prompts with the answers of others"
                raise DataError(expected(what, len(self)))
            self.shift = _best_shift([_prompt_code(self._item(i)) for i in range(len(self))])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each answer with its prompt."""
        return self.store.lengths - 1

    def label_counts(self) -> tuple[int, int]:
        """Number of desirable and of undesirable answers."""
        desirable = sum(bool(take_number(self.store[i])[1]) for i in range(len(self)))
        return desirable, len(self) - desirable

    def __getitem__(self, index: int) -> Item:
        index = normalize_index(index, len(self))
        item = self._item(index)
        if self.kl_length is None:
            return item
        return item | mismatched(item, self._item((index - self.shift) % len(self)), self.kl_length)

    def _item(self, index: int) -> Item:
        return _labelled(self.store[index])


class UnpairedStream(PairStream):
    """A stream of single answers with a label, or of pairs: items as those of `Unpaired`.

    Prompts are paired with the answers of records nearby.
    """

    schemas: ClassVar[tuple[str, ...]] = (*_UNPAIRED, "preference")

    def __init__(self, source: Any, encoder: Encoder, kl_length: int | None) -> None:
        super().__init__(source, encoder)
        self.kl_length = kl_length

    def _detect(self, chunk: list[Any]) -> Schema:
        schema = super()._detect(chunk)
        _check_unpaired(schema, chunk[0])
        return schema

    def _standard(self, record: Any, schema: Schema) -> Item:
        fields = standard(record, schema)
        return fields if schema.name == "preference" else _with_label(fields, record)

    def _items(self, records: list[Any], first: int) -> list[Any]:
        size = len(records)
        if self._schema is not None and self._schema.name == "preference":
            both = []
            for number, record in enumerate(records, first):
                try:
                    both.append(_both(record))
                except DataError as error:
                    raise DataError(f"Record {number} of the stream: {error}") from error
            records = [answer[place] for place in (0, 1) for answer in both]
        where = lambda number: f"Record {first + (number - first) % size} of the stream"  # noqa: E731
        encoded = self.encoder.encode_all(records, self.report, first=first, where=where)
        items = [_labelled(piece._asdict()) for pieces in encoded for piece in pieces]
        if self.kl_length is None:
            return items
        if len(items) == 1:  # the last record of the stream
            self.report.pieces -= 1
            self.report.add_outcome("no other record to pair it with", "dropped")
            return []
        shift = _best_shift([_prompt_code(item) for item in items]) if items else 0
        return [item | mismatched(item, items[place - shift], self.kl_length) for place, item in enumerate(items)]


def unpaired_tokens(
    data: Any,
    encoder: UnpairedEncoder,
    *,
    kl: bool = True,
    cache_dir: str | Path | None = None,
    name: str = "data",
) -> Unpaired | UnpairedStream:
    """Tokenise answers with labels, or preference pairs, once; streams on the fly.

    With `kl`, items also have the prompt with the answer of another record, to estimate the KL divergence.
    """
    kl_length = encoder.max_length if kl else None
    if isinstance(data, str | Path):
        data = load_text(data)
    if is_stream(data):
        return UnpairedStream(data, encoder, kl_length)
    records: Any = UnpairedRecords(data)
    return Unpaired(tokenize(records, encoder, cache_dir=cache_dir, name=name), kl_length, name)


def check_balance(counts: tuple[int, int], weights: tuple[float, float]) -> None:
    """Warn if the numbers of desirable and undesirable answers, times their weights, are out of balance."""
    desirable, undesirable = counts
    weighted = desirable * weights[0], undesirable * weights[1]
    if not all(weighted):
        logger.warning("all answers of the training data are %s", "desirable" if weighted[0] else "undesirable")
    elif desirable != undesirable and not _BALANCE[0] - 1e-2 <= weighted[0] / weighted[1] <= _BALANCE[1] + 1e-2:
        lowest, highest = (round(weighted[1] * bound / desirable, 2) for bound in _BALANCE)
        logger.warning(
            "%d desirable and %d undesirable answers: a desirable_weight from %s to %s would balance them",
            desirable, undesirable, lowest, highest,
        )  # fmt: skip


def mismatched(item: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], length: int) -> Item:
    """The prompt of one item with the answer of another, of at most `length` tokens.

    >>> one = {"input_ids": np.array([5, 6]), "labels": np.array([-100, 6])}
    >>> two = {"input_ids": np.array([7, 8, 9]), "labels": np.array([-100, -100, 9])}
    >>> mismatched(one, two, 8)["kl_input_ids"].tolist(), mismatched(two, one, 8)["kl_labels"].tolist()
    ([5, 9], [-100, -100, 6])
    """
    prompt, begin = _prompt(item), len(_prompt(other))
    ids = np.concatenate([prompt, other["input_ids"][begin:]])[:length]
    labels = np.concatenate([np.full_like(prompt, IGNORE_INDEX), other["labels"][begin:]])[:length]
    return {"kl_input_ids": ids, "kl_labels": labels}


def _prompt(item: Mapping[str, np.ndarray]) -> np.ndarray:
    """The tokens before the first trained one."""
    trained = item["labels"] != IGNORE_INDEX
    return item["input_ids"][: int(trained.argmax())]


def _prompt_code(item: Mapping[str, np.ndarray]) -> int:
    """A number that is the same for equal prompts."""
    return zlib.crc32(_prompt(item).tobytes())


def _best_shift(prompts: Sequence[int]) -> int:
    """By how many places to rotate answers so that the fewest meet an equal prompt: 1, if none does then.

    >>> _best_shift([5, 6, 7]), _best_shift([5, 5, 6, 6])
    (1, 2)
    """
    codes = np.asarray(prompts)
    shifts = range(1, min(_SHIFTS + 1, len(prompts)))
    return min(shifts, key=lambda shift: int((codes == np.roll(codes, shift)).sum()), default=0)


def _labelled(stored: Mapping[str, np.ndarray]) -> Item:
    item, label = take_number(stored)
    return {**item, "label": bool(label)}


def _both(record: Mapping[str, Any]) -> list[Item]:
    """The two answers of a preference record, with labels."""
    chosen, rejected = answers(record)
    return [{**_only_answer(chosen), "label": True}, {**_only_answer(rejected), "label": False}]


def _only_answer(record: Mapping[str, Any]) -> Item:
    return {name: value for name, value in record.items() if name not in ("chosen", "rejected")}


def _check_unpaired(schema: Schema, first: Any) -> None:
    if schema.name in _UNPAIRED or schema.name == "preference":
        return
    keys = ", ".join(map(repr, first)) if isinstance(first, Mapping) else type(first).__name__
    what = "records with 'prompt', 'completion' and 'label', 'messages' and 'label', or 'chosen' and 'rejected'"
    raise DataError(expected(what, keys, "Rename the keys."))


def _with_label(fields: Item, record: Any) -> Item:
    """The fields with the label of the record as a bool."""
    if not isinstance(record, Mapping) or record.get("label") is None:
        keys = ", ".join(map(repr, record)) if isinstance(record, Mapping) else type(record).__name__
        do = "Say of each answer whether it is desirable (true) or not (false)."
        raise DataError(f"Expected the key 'label', received a record with: {keys}. {do}")
    label = record["label"]
    text = str(label).strip().lower()
    if isinstance(label, float) and label in (0.0, 1.0):
        text = str(int(label))
    if text not in (*_TRUE, *_FALSE):
        raise DataError(expected_value("'label' to be true (desirable) or false", label))
    return {**fields, "label": text in _TRUE}
