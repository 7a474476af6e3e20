"""Texts and pairs of texts with a label: finding the columns, tokenising, and the labels of a whole dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.data.text.encode import Encoded, EncodingReport
from trainformer.data.text.fields import require_key
from trainformer.data.text.labels import Labels
from trainformer.data.text.schemas import TEXT_KEYS
from trainformer.data.text.store import StoreView
from trainformer.data.text.token_records import PartsEncoder, find_keys, join_parts, only_columns, split_parts

_VERSION = "texts-1"  # of the output of `TextEncoder`: raise it when that changes, to invalidate cached tokens
_PAIRS = (
    *(("text", "text_pair"), ("text", "text2"), ("text1", "text2"), ("text_a", "text_b")),
    *(("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("premise", "hypothesis")),
    *(("question1", "question2"), ("question", "sentence"), ("question", "context"), ("question", "passage")),
    *(("question", "answer"), ("query", "passage"), ("query", "document")),
)
_TEXTS = (("input_ids",), *_PAIRS, *((name,) for name in TEXT_KEYS))
LABEL_KEYS = tuple((name,) for name in ("label", "labels", "target", "class", "category", "score", "similarity_score"))


def label_values(records: Any) -> tuple[Iterable[Any], list[str] | None]:
    """The labels of all records (none if they have no label), and the class names if the data have them."""
    first = records[0]
    if not isinstance(first, Mapping):
        pairs = (records[i] for i in range(len(records)))
        return (record[1] for record in pairs if isinstance(record, list | tuple) and len(record) == 2), None
    keys = find_keys(first, LABEL_KEYS)
    return ((), None) if keys is None else column_values(records, keys[0])


def column_values(records: Any, key: str) -> tuple[Iterable[Any], list[str] | None]:
    """Return a column of all records, and its class names if an HF dataset has them."""
    feature = (getattr(records, "features", None) or {}).get(key)
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
    column = only_columns(records, [key])
    values = (column[i] for i in range(len(column)))
    return (record.get(key) for record in values if isinstance(record, Mapping)), names


class TextEncoder(PartsEncoder):
    """Tokenise records: the first text, the second text, and the label.

    The first record decides which columns are used. `labelled` records must have a label.
    """

    def __init__(self, tokenizer: Any, max_length: int, labels: Labels, first: Any, *, labelled: bool) -> None:
        super().__init__(tokenizer, max_length)
        self.labels = labels
        self.labelled = labelled
        self._bare = not isinstance(first, Mapping)
        texts, label = find_keys(first, _TEXTS), find_keys(first, LABEL_KEYS)
        if texts is None and not self._bare:
            do = "Rename the columns."
            raise DataError(expected("records with a text, or with text and text_pair", list(first), do))
        self._texts = texts or ()
        self._label = None if label is None else label[0]

    @property
    def keys(self) -> list[str]:
        """The columns that are read."""
        return [*self._texts, *([] if self._label is None else [self._label])]

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {_VERSION} {self.keys} {self.labels} {self.labelled}"

    def _piece(self, record: Any, report: EncodingReport) -> Encoded:
        values, label = self._parts_of(record)
        if label is None and self.labelled:
            raise DataError(expected("a label", "none", "Remove the record, or give it one."))
        if self._texts and self._texts[0].lower() == "input_ids":
            ids, cut = self._given_tokens(values[0])
            types = np.zeros_like(ids)
        else:
            names = self._texts or ("text",)
            texts = [self._text(value, key) for value, key in zip(values, names, strict=True)]
            ids, types, cut = self._tokens(*texts)
        self._count(report, len(ids), cut)
        border = int(np.count_nonzero(types == 0))  # the second text follows the first, with BERT's token types
        return join_parts([ids[:border], ids[border:], self.labels.encode(label)])

    def _parts_of(self, record: Any) -> tuple[list[Any], Any]:
        if not self._bare:
            label = None if self._label is None else require_key(record, self._label)
            return [require_key(record, key) for key in self._texts], label
        if isinstance(record, str):
            return [record], None
        if not isinstance(record, list | tuple) or len(record) != 2:
            do = 'Write {"text": ..., "label": ...}.'
            raise DataError(expected("a text with its label", type(record).__name__, do))
        return [record[0]], record[1]


def split_item(item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tokens, their token types (as `labels`, to be padded alike), and the encoded label."""
    first, second, label = split_parts(item, 3)
    types = np.repeat(np.arange(2), [len(first), len(second)])
    return {"input_ids": np.concatenate([first, second]), "labels": types, "label": label}


class LabelledTexts(StoreView):
    """A token store of `TextEncoder`, split into tokens, token types and labels."""

    def __init__(self, store: Any, labels: Labels) -> None:
        super().__init__(store)
        self.label_spec = labels

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text."""
        return self.store.lengths - self.label_spec.width

    @property
    def targets(self) -> list[int] | None:
        """The class of each text, for samplers."""
        if self.label_spec.problem != "single":
            return None
        return [int(self.store[i]["input_ids"][-1]) for i in range(len(self))]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return split_item(self.store[index])
