"""Records of several texts and a label in a token store, which holds flat sequences.

The parts of a record are concatenated for storage and split again when read. Also: finding the columns of a record, and
tokenising texts with truncation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.data.text.encode import Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.fields import require_text


def join_parts(parts: Sequence[np.ndarray]) -> Encoded:
    """Concatenate parts into one sequence, with the index of the part as label.

    >>> join_parts([np.array([5, 6]), np.array([7])])
    Encoded(input_ids=array([5, 6, 7], dtype=int32), labels=array([0, 0, 1], dtype=int32))
    """
    numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Encoded(np.concatenate(parts).astype(np.int32), numbers.astype(np.int32))


def split_parts(item: Mapping[str, np.ndarray], count: int) -> list[np.ndarray]:
    """Split a sequence into its `count` parts; some may be empty.

    >>> one = join_parts([np.array([5, 6]), np.array([], dtype=int), np.array([7])])
    >>> [part.tolist() for part in split_parts(one._asdict(), 3)]
    [[5, 6], [], [7]]
    """
    return np.split(item["input_ids"], np.searchsorted(item["labels"], np.arange(1, count)))


def to_int32(values: np.ndarray) -> np.ndarray:
    """Reinterpret numbers of any dtype as int32, the dtype of a token store.

    >>> from_int32(to_int32(np.array([0.5, -2.0], dtype=np.float32)), np.float32)
    array([ 0.5, -2. ], dtype=float32)
    """
    raw = np.ascontiguousarray(values).tobytes()
    return np.frombuffer(raw + bytes(-len(raw) % 4), dtype=np.int32)


def from_int32(words: np.ndarray, dtype: Any) -> np.ndarray:
    """Undo `to_int32`. Dtypes of less than 32 bits may have zeros appended."""
    return np.frombuffer(words.astype(np.int32).tobytes(), dtype=dtype)


def find_keys(record: Any, choices: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """Find the first choice of keys that a record has, ignoring case.

    >>> find_keys({"Premise": "a", "hypothesis": "b"}, [("text",), ("premise", "hypothesis")])
    ('Premise', 'hypothesis')
    """
    if not isinstance(record, Mapping):
        return None
    by_name = {str(key).lower(): str(key) for key in reversed(list(record))}
    for names in choices:
        if all(name in by_name for name in names):
            return tuple(by_name[name] for name in names)
    return None


def is_indexed(data: Any) -> bool:
    """Whether records can be read by their number, unlike those of loaders and streams."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def only_columns(records: Any, keys: Sequence[str]) -> Any:
    """Select columns of an HF dataset: reading a row decodes all its columns."""
    return records.select_columns(list(keys)) if hasattr(records, "select_columns") else records


class PartsEncoder(Encoder):
    """Base class of encoders for records with several parts. Texts get the tokenizer's special tokens."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        super().__init__(tokenizer, max_length=max_length, add_eos=False)

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        pieces = []  # one per record: predictions have a row for each
        for place, record in enumerate(records):
            with context(place):
                pieces.append([self._piece(record, report)])
        return pieces

    def _piece(self, record: Any, report: EncodingReport) -> Encoded:
        """Encode a record with `join_parts`, and count it in the report."""
        raise NotImplementedError

    def _text(self, value: Any, key: str) -> str:
        return require_text(value, key)

    def _tokens(self, text: str, pair: str | None = None) -> tuple[np.ndarray, np.ndarray, bool]:
        """Tokens of a text or a pair, the text each token belongs to (0 or 1), and whether they were truncated."""
        tokenizer = self._require()
        options = {"return_attention_mask": False, "return_token_type_ids": True, "verbose": False}
        made = tokenizer(text, pair, **options)
        cut = len(made["input_ids"]) > self.max_length  # type: ignore[operator]
        if cut:
            made = tokenizer(text, pair, truncation=True, max_length=self.max_length, **options)
        ids = np.asarray(made["input_ids"], dtype=np.int32)
        types = np.asarray(made["token_type_ids"], dtype=np.int32)
        if not len(ids):  # an empty text without special tokens: the model needs at least one token
            filler = next(t for t in (self._bos, self._eos, tokenizer.pad_token_id) if t is not None)
            ids, types = np.asarray([filler], dtype=np.int32), np.zeros(1, dtype=np.int32)
        return ids, types, cut

    def _given_tokens(self, values: Any) -> tuple[np.ndarray, bool]:
        """Tokens from the record itself, and whether they were truncated."""
        ids = self._encode_tokens({"input_ids": values}).input_ids
        if not len(ids):
            raise DataError(expected("at least one token in input_ids", "none"))
        return ids[: self.max_length], len(ids) > (self.max_length or 0)

    def _count(self, report: EncodingReport, tokens: int, cut: bool) -> None:
        report.records += 1
        report.pieces += 1
        report.tokens += tokens
        report.supervised += tokens
        if cut:
            report.add_outcome(f"longer than {self.max_length} tokens", "truncated")
