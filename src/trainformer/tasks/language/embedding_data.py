"""Data for text embeddings: the role of each text in a record, tokenisation, and batches."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainformer.core import DataError
from trainformer.core.errors import expected
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import Encoded, EncodingReport
from trainformer.data.text.schemas import TEXT_KEYS, expected_value, require_key
from trainformer.data.text.store import StoreView
from trainformer.data.text.token_records import (
    PartsEncoder,
    find_keys,
    from_int32,
    join_parts,
    only_columns,
    split_parts,
    to_int32,
)

_VERSION = "embedded-1"  # of the output of `EmbeddingEncoder`: raise it when that changes, to invalidate cached tokens
_PAIRS = (
    *(("anchor", "positive"), ("query", "positive"), ("question", "positive"), ("query", "pos"), ("anchor", "pos")),
    *(("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("text1", "text2"), ("text_a", "text_b")),
    *(("premise", "hypothesis"), ("question1", "question2"), ("query", "passage"), ("query", "document")),
    *(("query", "answer"), ("question", "answer"), ("question", "context"), ("title", "body")),
    *(("text", "text_pair"), ("source", "target")),
)
_NEGATIVES = (("negative",), ("negatives",), ("neg",), ("hard_negative",))
_NUMBERED, _DIGITS = re.compile(r"(hard_)?neg(ative)?s?_?\d+", re.I), re.compile(r"\D")
_SCORES = tuple((name,) for name in ("score", "similarity_score", "similarity", "label"))
_LABELS = (("label",), ("labels",), ("class",), ("category",))


class Roles(NamedTuple):
    """The columns of anchor, positive and negatives (or of a single text), the column of a score or label, the loss.

    `negatives` is the number of negatives, which may be a list in one column.
    """

    texts: tuple[str, ...]
    target: str | None
    loss: str
    negatives: int = 0

    @property
    def size(self) -> int:
        """Number of texts per record."""
        return min(len(self.texts), 2) + self.negatives

    def split_item(self, item: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Split a stored sequence into texts with their keys, and the score or label."""
        *texts, target = split_parts(item, self.size + 1)
        example: dict[str, Any] = {"input_ids": texts[0], "key": text_key(texts[0])}
        if len(texts) > 1:
            example |= {"positive": texts[1], "positive_key": text_key(texts[1])}
        if self.negatives:
            example |= {"negatives": texts[2:], "negative_key": [text_key(text) for text in texts[2:]]}
        if self.loss == "cosine" and len(target):
            example["score"] = from_int32(target, np.float32)[0]
        if self.loss == "supcon" and len(target):
            example["label"] = from_int32(target, np.int64)[0]
        return example


def infer_roles(record: Any, loss: str = "auto") -> Roles:
    """Infer the roles of a record's texts from its columns, and the loss if it is "auto".

    >>> infer_roles({"query": "a", "positive": "b", "negative": ["c", "d"]})
    Roles(texts=('query', 'positive', 'negative'), target=None, loss='multiple_negatives', negatives=2)
    >>> infer_roles({"sentence1": "a", "sentence2": "b", "score": 0.5}).loss
    'cosine'
    """
    if isinstance(record, str):
        return Roles(("text",), None, "supcon")
    if isinstance(record, list | tuple) and len(record) > 1 and all(isinstance(text, str) for text in record):
        names = ("anchor", "positive", *(f"negative_{i}" for i in range(1, len(record) - 1)))
        return Roles(names, None, "multiple_negatives", len(record) - 2)
    pair = find_keys(record, _PAIRS)
    if pair is None:
        text = find_keys(record, [("input_ids",), *((name,) for name in (*TEXT_KEYS, "anchor", "query"))])
        if text is None:
            received = list(record) if isinstance(record, Mapping) else type(record).__name__
            do = "Rename the columns to anchor and positive, for instance."
            raise DataError(expected("records of two texts, or of a text and a label", received, do))
        label = find_keys(record, _LABELS)
        return Roles(text, None if label is None else label[0], "supcon")
    numbered = sorted(
        (key for key in record if _NUMBERED.fullmatch(str(key))), key=lambda key: int(_DIGITS.sub("", key))
    )
    negatives = tuple(numbered) or find_keys(record, _NEGATIVES) or ()
    several = len(negatives) == 1 and isinstance(record[negatives[0]], list | tuple)
    size = len(record[negatives[0]]) if several else len(negatives)
    score = None if negatives else find_keys(record, _SCORES)
    # The label of a pair is a score if it is a float; an integer is a class.
    is_class = score is not None and score[0].lower() == "label" and not isinstance(record[score[0]], float)
    if loss == "multiple_negatives" or (loss == "auto" and is_class):
        score = None
    inferred = "multiple_negatives" if score is None else "cosine"
    return Roles((*pair, *negatives), None if score is None else score[0], inferred, size)


def text_key(ids: np.ndarray) -> int:
    """A 64-bit hash of a text's tokens, the same in every process.

    >>> text_key(np.array([1, 2], dtype=np.int32)) == text_key(np.array([1, 2], dtype=np.int64))
    True
    """
    digest = hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class EmbeddingEncoder(PartsEncoder):
    """Tokenise all texts of a record, with the score or label.

    `prompts` are prepended to the anchor, and to all other texts. `labelled` records must have what the loss needs.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, roles: Roles, prompts: tuple[str, str], *, labelled: bool
    ) -> None:
        super().__init__(tokenizer, max_length)
        self.roles = roles
        self.prompts = prompts
        self.labelled = labelled

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {_VERSION} {tuple(self.roles)} {self.prompts!r}"

    def needed(self, records: Any) -> Any:
        """Select the columns that are read."""
        target = [] if self.roles.target is None else [self.roles.target]
        return only_columns(records, [*self.roles.texts, *target])

    def _piece(self, record: Any, report: EncodingReport) -> Encoded:
        texts, target = self._parts_of(record)
        encoded = [self._tokenize(text, self.prompts[place > 0]) for place, text in enumerate(texts)]
        self._count(report, sum(len(ids) for ids, _ in encoded), any(cut for _, cut in encoded))
        return join_parts([*(ids for ids, _ in encoded), self._encode_target(target)])

    def _tokenize(self, text: Any, prompt: str) -> tuple[np.ndarray, bool]:
        if not isinstance(text, str) and self.roles.texts[0].lower() == "input_ids":
            return self._given_tokens(text)
        ids, _, cut = self._tokens(prompt + self._text(text, "the texts of the record"))
        return ids, cut

    def _parts_of(self, record: Any) -> tuple[list[Any], Any]:
        """All texts of a record in order, and its score or label."""
        if isinstance(record, str):
            record = {self.roles.texts[0]: record}
        elif isinstance(record, list | tuple):
            record = dict(zip(self.roles.texts, record, strict=False))
        texts = [require_key(record, key) for key in self.roles.texts]
        if len(texts) == 3 and isinstance(texts[2], list | tuple):
            texts = [*texts[:2], *texts[2]]
        if len(texts) != self.roles.size:
            what = f"{self.roles.negatives} negatives, as many as the first record has"
            raise DataError(expected(what, len(texts) - 2, "Give every record equally many."))
        return texts, None if self.roles.target is None else record.get(self.roles.target)

    def _encode_target(self, value: Any) -> np.ndarray:
        if self.roles.loss not in ("cosine", "supcon") or self.roles.target is None:
            return np.empty(0, dtype=np.int32)
        if value is None:
            raise DataError(expected(f"a {self.roles.target}", "none", "Remove the record, or give it one."))
        if self.roles.loss == "supcon":
            # Labels only group texts, so a hash of the name is enough.
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            return to_int32(np.asarray([value if whole else _digest(str(value))], dtype=np.int64))
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not -1 <= score <= 1:
            do = "Rescale the scores: divide scores from 0 to 5 by 5."
            raise DataError(expected_value("a score from -1 to 1, the range of a cosine", value, do))
        return to_int32(np.asarray([score], dtype=np.float32))


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


class EmbeddingDataset(StoreView):
    """A token store of `EmbeddingEncoder`, split into texts. Lengths are the total over all texts of a record."""

    def __init__(self, store: Any, roles: Roles) -> None:
        super().__init__(store)
        self.roles = roles

    @property
    def targets(self) -> np.ndarray | None:
        """The class index of each labelled text, for samplers."""
        if self.roles.loss != "supcon" or self.roles.target is None:
            return None
        return np.unique([int(self[i]["label"]) for i in range(len(self))], return_inverse=True)[1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.roles.split_item(self.store[index])


def collate(examples: Sequence[Mapping[str, Any]], pad_id: int, max_length: int) -> dict[str, Tensor]:
    """Collate examples: texts of each role are padded separately, negatives have shape (B, N, T)."""
    batch = _padded([example["input_ids"] for example in examples], pad_id, max_length)
    first = examples[0]
    if "positive" in first:
        batch |= _named("positive_", _padded([example["positive"] for example in examples], pad_id, max_length))
    if "negatives" in first:
        flat = _padded([ids for example in examples for ids in example["negatives"]], pad_id, max_length)
        size = len(first["negatives"])
        batch |= _named("negative_", {name: rows.unflatten(0, (-1, size)) for name, rows in flat.items()})
    for name in ("key", "positive_key", "negative_key"):
        if name in first:
            batch[name] = torch.tensor([example[name] for example in examples])
    for name, plural in (("score", "scores"), ("label", "labels")):
        if name in first:
            batch[plural] = torch.as_tensor(np.stack([example[name] for example in examples]))
    return batch


def _padded(rows: Sequence[np.ndarray], pad_id: int, max_length: int) -> dict[str, Tensor]:
    batch = pad([{"input_ids": ids} for ids in rows], pad_id, max_length=max_length)
    del batch["labels"]
    return batch


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
