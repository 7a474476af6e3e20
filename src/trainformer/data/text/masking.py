"""Dynamic masking for masked language models, on NumPy arrays.

Masks are drawn when a sample is read, from generators seeded by (seed, epoch, sample). So they change in each epoch,
and depend neither on the number of workers nor on resuming.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.store import StoreView

_VERSION = "words-1"  # of the output of `WordEncoder`: raise it when that changes, to invalidate cached tokens
# Share of the tokens to predict that are masked, and that are replaced at random; the rest stays unchanged (BERT).
_MASKED, _REPLACED = 0.8, 0.1
_EVALUATION = 0x3A5C  # separates evaluation masks from other random streams


class WordEncoder(Encoder):
    """Tokenise texts, with labels that group tokens to be masked together.

    A label is the index of the token's word (without `whole_word`, of the token itself), or -100 for special tokens.
    """

    def __init__(self, tokenizer: Any, max_length: int, *, whole_word: bool = False) -> None:
        super().__init__(tokenizer, max_length=max_length, add_eos=False)
        if tokenizer.mask_token_id is None:
            raise BadArgument(expected("a tokenizer with a mask token", "one without", "Set tokenizer.mask_token."))
        special = len(tokenizer("")["input_ids"])
        if special >= max_length:
            raise BadArgument(expected(f"max_length above {special}, the special tokens of each piece", max_length))
        self.whole_word = whole_word
        self._special = np.asarray(sorted(set(tokenizer.all_special_ids)), dtype=np.int32)

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {_VERSION} {self.whole_word}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        pieces = []
        for place, record in enumerate(records):
            with context(place):
                found = self._pieces(record)
            kept = [piece for piece in found if (piece.labels != IGNORE_INDEX).any()]
            report.records += 1
            report.pieces += len(kept)
            report.tokens += sum(len(piece.input_ids) for piece in kept)
            report.supervised += sum(int(np.count_nonzero(piece.labels != IGNORE_INDEX)) for piece in kept)
            if not kept:
                report.add_outcome("empty, or only special tokens", "dropped")
            elif len(found) > 1:
                report.add_outcome(f"longer than {self.max_length} tokens", "split")
            pieces.append(kept)
        return pieces

    def _pieces(self, record: Any) -> list[Encoded]:
        assert self.max_length is not None
        if isinstance(record, Mapping) and "input_ids" in record:
            if self.whole_word:
                do = "Pass whole_word=False, or texts."
                raise DataError(expected("texts for whole_word=True", "tokens, whose words are unknown", do))
            ids = self._encode_tokens({"input_ids": record["input_ids"]}).input_ids
            return [self._labelled(ids[i : i + self.max_length]) for i in range(0, len(ids), self.max_length)]
        text = record if isinstance(record, str) else record.get("text") if isinstance(record, Mapping) else None
        if not isinstance(text, str):
            received = list(record) if isinstance(record, Mapping) else type(record).__name__
            raise DataError(expected("a record with a 'text'", received, "Rename the column."))
        if not getattr(self.tokenizer, "is_fast", False):
            do = "Use the fast tokenizer of the model, or tokenised data (input_ids)."
            raise BadArgument(expected("a fast tokenizer, which splits words", type(self.tokenizer), do))
        made = self._require()(text, truncation=True, max_length=self.max_length, return_overflowing_tokens=True)
        return [
            self._labelled(np.asarray(ids, dtype=np.int32), made.word_ids(part))
            for part, ids in enumerate(made["input_ids"])
        ]

    def _labelled(self, ids: np.ndarray, words: Sequence[int | None] | None = None) -> Encoded:
        labels = np.arange(len(ids), dtype=np.int32)
        if self.whole_word and words is not None:
            labels = np.asarray([IGNORE_INDEX if word is None else word for word in words], dtype=np.int32)
        labels[np.isin(ids, self._special)] = IGNORE_INDEX
        return Encoded(ids, labels)


class MaskedDataset(StoreView):
    """A token store with dynamic masking from the generators that the loader seeds.

    `fixed` masks depend only on the index of the sample. `others` are the possible replacement tokens.
    """

    def __init__(self, store: Any, mask_id: int, others: np.ndarray, mask_prob: float, *, fixed: bool = False) -> None:
        super().__init__(store)  # masking takes about 30 us: less than passing a sample between processes
        self.mask_id = mask_id
        self.others = others
        self.mask_prob = mask_prob
        self.fixed = fixed

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        item = self.store[index]
        # A separate generator with a 128-bit seed drawn from the loader's.
        seed = [_EVALUATION, index % len(self)] if self.fixed else np.random.randint(0, 2**32, 4, dtype=np.uint32)
        ids, labels = mask_tokens(
            item["input_ids"], item["labels"], np.random.default_rng(seed), self.mask_id, self.others, self.mask_prob
        )
        return {"input_ids": ids, "labels": labels}


def masked_dataset(store: Any, tokenizer: Any, mask_prob: float, *, fixed: bool = False) -> MaskedDataset:
    """The sequences of a store, masked with the mask token and the vocabulary of a tokenizer."""
    special = np.asarray(sorted(set(tokenizer.all_special_ids)))
    others = np.setdiff1d(np.arange(len(tokenizer)), special).astype(np.int32)
    return MaskedDataset(store, tokenizer.mask_token_id, others, mask_prob, fixed=fixed)


def mask_tokens(
    ids: np.ndarray, words: np.ndarray, rng: np.random.Generator, mask_id: int, others: np.ndarray, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mask some tokens. Returns the tokens and labels: the original token where it is predicted, else -100.

    `words` has equal numbers for tokens that are selected together, and -100 for tokens that never are. On average,
    a fraction `share` of the words is selected, and at least one.

    >>> rng = np.random.default_rng(0)
    >>> ids, labels = mask_tokens(np.arange(5, 9), np.array([-100, 0, 0, -100]), rng, 1, np.arange(5, 9), 0.15)
    >>> labels.tolist()
    [-100, 6, 7, -100]
    """
    candidates = np.unique(words[words != IGNORE_INDEX])
    count = max(1, math.floor(share * len(candidates) + rng.random()))
    chosen = np.flatnonzero(np.isin(words, rng.permutation(candidates)[:count]))
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    labels[chosen] = ids[chosen]
    draw = rng.random(len(chosen))
    random = others[rng.integers(len(others), size=len(chosen))]
    masked = np.array(ids)
    masked[chosen] = np.where(draw < _MASKED, mask_id, np.where(draw < _MASKED + _REPLACED, random, ids[chosen]))
    return masked, labels
