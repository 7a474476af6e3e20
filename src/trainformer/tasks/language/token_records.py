"""Records of several texts and a label in a token store, which knows sequences only.

Owns how the parts of a record are put one behind the other and taken apart again, which keys of a record are meant, and
tokenising texts that lose their end where they are too long. What the parts are is the tasks' business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core import DataError
from trainformer.core.errors import expected
from trainformer.data.text.encode import Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.schemas import require_text


def joined(parts: Sequence[np.ndarray]) -> Encoded:
    """Parts as one piece: the labels are the numbers of the parts.

    >>> joined([np.array([5, 6]), np.array([7])])
    Encoded(input_ids=array([5, 6, 7], dtype=int32), labels=array([0, 0, 1], dtype=int32))
    """
    numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Encoded(np.concatenate(parts).astype(np.int32), numbers.astype(np.int32))


def parted(item: Mapping[str, np.ndarray], count: int) -> list[np.ndarray]:
    """The parts of a piece, of which there are `count`; some may be empty.

    >>> one = joined([np.array([5, 6]), np.array([], dtype=int), np.array([7])])
    >>> [part.tolist() for part in parted(one._asdict(), 3)]
    [[5, 6], [], [7]]
    """
    return np.split(item["input_ids"], np.searchsorted(item["labels"], np.arange(1, count)))


def as_words(values: np.ndarray) -> np.ndarray:
    """Numbers of any kind as 32-bit words, in which a store keeps everything.

    >>> from_words(as_words(np.array([0.5, -2.0], dtype=np.float32)), np.float32)
    array([ 0.5, -2. ], dtype=float32)
    """
    raw = np.ascontiguousarray(values).tobytes()
    return np.frombuffer(raw + bytes(-len(raw) % 4), dtype=np.int32)


def from_words(words: np.ndarray, kind: Any) -> np.ndarray:
    """What `as_words` was given; short kinds are filled up with zeros at the end."""
    return np.frombuffer(words.astype(np.int32).tobytes(), dtype=kind)


def found_keys(record: Any, choices: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """The keys of a record that are called as one of the choices, whatever their case; the first that fits.

    >>> found_keys({"Premise": "a", "hypothesis": "b"}, [("text",), ("premise", "hypothesis")])
    ('Premise', 'hypothesis')
    """
    if not isinstance(record, Mapping):
        return None
    by_name = {str(key).lower(): str(key) for key in reversed(list(record))}
    for names in choices:
        if all(name in by_name for name in names):
            return tuple(by_name[name] for name in names)
    return None


def only_columns(records: Any, keys: Sequence[str]) -> Any:
    """HF data without its other columns: a row decodes all it has."""
    return records.select_columns(list(keys)) if hasattr(records, "select_columns") else records


class PartsEncoder(Encoder):
    """What encoders of parts share. A text keeps the special tokens that the tokenizer puts around it."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        super().__init__(tokenizer, max_length=max_length, add_eos=False)

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        """One piece for each record: predictions have a row for each."""
        pieces = []
        for place, record in enumerate(records):
            with context(place):
                pieces.append([self._piece(record, report)])
        return pieces

    def _piece(self, record: Any, report: EncodingReport) -> Encoded:
        """The parts of a record, joined, and counted in the report."""
        raise NotImplementedError

    def _text(self, value: Any, key: str) -> str:
        return require_text(value, key)

    def _tokens(self, text: str, pair: str | None = None) -> tuple[np.ndarray, np.ndarray, bool]:
        """Tokens of a text or a pair of texts, the text each belongs to (0 or 1), and whether they were cut."""
        tokenizer = self._require()
        options = {"return_attention_mask": False, "return_token_type_ids": True, "verbose": False}
        made = tokenizer(text, pair, **options)
        cut = len(made["input_ids"]) > self.max_length  # type: ignore[operator]
        if cut:
            made = tokenizer(text, pair, truncation=True, max_length=self.max_length, **options)
        ids = np.asarray(made["input_ids"], dtype=np.int32)
        types = np.asarray(made["token_type_ids"], dtype=np.int32)
        if not len(ids):  # an empty text, and a tokenizer that puts nothing around it: a model needs something to read
            ids, types = np.asarray([self._filler()], dtype=np.int32), np.zeros(1, dtype=np.int32)
        return ids, types, cut

    def _filler(self) -> int:
        known = (self._bos, self._eos, self._require().pad_token_id)
        return next(token for token in known if token is not None)

    def _given_tokens(self, values: Any) -> tuple[np.ndarray, bool]:
        """Tokens that a record brings, and whether they were cut."""
        ids = self._encode_tokens({"input_ids": values}).input_ids
        if not len(ids):
            raise DataError(expected("at least one token in input_ids", "none"))
        return ids[: self.max_length], len(ids) > (self.max_length or 0)

    def _count(self, report: EncodingReport, tokens: int, cut: bool) -> None:
        """One record more, as one piece."""
        report.records += 1
        report.pieces += 1
        report.tokens += tokens
        report.supervised += tokens
        if cut:
            report.add_outcome(f"longer than {self.max_length} tokens", "truncated")
