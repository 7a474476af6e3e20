"""Masked language models: BERT and its relatives, pretrained on text or adapted to more of it.

Owns the task, and the masks: which tokens are hidden, and by what. They are drawn when a sample is read, where random
generators are seeded by (seed, epoch, sample): masks change from epoch to epoch, and depend neither on workers nor on
resuming. Keeping tokens is left to `data.text.store`, the loss to `losses.tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainformer.adapters.base import Adapter
from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.store import StoreView
from trainformer.losses.tokens import TokenLoss, token_cross_entropy
from trainformer.tasks.language.prediction import TokenPrediction

_VERSION = "words-1"  # of what `WordEncoder` makes of a record: raise it when that changes, cached tokens are then left
# Of the tokens to be predicted so many are hidden, so many replaced by any other; the rest is shown as it is (BERT).
_HIDDEN, _REPLACED = 0.8, 0.1
_EVALUATION = 0x3A5C  # sets the masks of evaluations apart from other streams of random numbers


@dataclass(eq=False)
class MaskedLM(TokenPrediction):
    """Train a masked language model (BERT, RoBERTa, DistilBERT, ...) of transformers, from scratch or further.

    `model_name` is a name on the hub, a folder, a configuration (random weights) or a model; the tokenizer is that of
    the same name unless `tokenizer` says otherwise. Data are texts; one of more than `max_length` tokens is split,
    and every piece has the tokenizer's special tokens around it.

    A share `mask_prob` of the tokens, or with `whole_word` of the words, is to be predicted, at least one of each
    piece: 80 % of these tokens are hidden behind the mask, 10 % replaced by others, and 10 % shown as they are.
    Special tokens are never chosen. Every epoch draws anew; evaluations have the same masks always, whatever the seed,
    so that runs compare. Evaluation gives loss, accuracy and perplexity of the tokens to be predicted.
    """

    model_name: Any = "bert-base-uncased"
    adapter: Adapter | None = None
    max_length: int = 512
    _: KW_ONLY
    mask_prob: float = 0.15
    whole_word: bool = False
    tokenizer: Any = None
    dtype: str | None = None  # of the weights: fp32 unless it says bf16 or fp16
    attention: str | None = None  # eager, sdpa, flash_attention_2, ...
    cache_dir: str | Path | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    kind = "masked_lm"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._begin()
        if not 0 < self.mask_prob < 1:
            raise BadArgument(expected("mask_prob between 0 and 1", self.mask_prob, "0.15 is usual."))

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenised once, masked whenever a sample is read."""
        if self.text.mask_token_id is None:
            raise BadArgument(expected("a tokenizer with a mask token", "one without", "Set tokenizer.mask_token."))
        encoder = WordEncoder(self.text, self.max_length, whole_word=self.whole_word)
        store = self._tokenized(dataset, encoder, "training data" if train else "validation data")
        special = np.asarray(sorted(set(self.text.all_special_ids)))
        others = np.setdiff1d(np.arange(len(self.text)), special).astype(np.int32)
        return MaskedDataset(store, self.text.mask_token_id, others, self.mask_prob, fixed=not train)

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        """Padded sequences, masked by length."""
        return pad(examples, self.text.pad_token_id, max_length=self.max_length)

    # -- steps ---------------------------------------------------------------------------------------------

    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        # All logits are made, though one in seven is used: to pick them out would mean waiting for the device.
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return token_cross_entropy(logits, batch["labels"], shift=False, **options)


class WordEncoder(Encoder):
    """Turns texts into tokens, and labels that tell which tokens may be masked together.

    A label is the number of the token's word, or of the token itself without `whole_word`; -100 for special tokens.
    """

    def __init__(self, tokenizer: Any, max_length: int, *, whole_word: bool = False) -> None:
        super().__init__(tokenizer, max_length=max_length, add_eos=False)
        around = len(tokenizer("")["input_ids"])
        if around >= max_length:
            raise BadArgument(expected(f"max_length above {around}, the special tokens of each piece", max_length))
        self.whole_word = whole_word
        self._special = np.asarray(sorted(set(tokenizer.all_special_ids)), dtype=np.int32)

    def fingerprint(self) -> str:
        """A digest of everything the tokens depend on but the records."""
        return f"{super().fingerprint()} {_VERSION} {self.whole_word}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        """The pieces of each record that have something to mask in them."""
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
                report.add_outcome("empty, or special tokens alone", "dropped")
            elif len(found) > 1:
                report.add_outcome(f"longer than {self.max_length} tokens", "split")
            pieces.append(kept)
        return pieces

    def _pieces(self, record: Any) -> list[Encoded]:
        assert self.max_length is not None
        if isinstance(record, Mapping) and "input_ids" in record:
            if self.whole_word:
                do = "Pass whole_word=False, or texts."
                raise DataError(expected("texts for whole_word=True", "tokens, whose words are not known", do))
            ids = self._encode_tokens({"input_ids": record["input_ids"]}).input_ids
            return [self._labelled(ids[i : i + self.max_length]) for i in range(0, len(ids), self.max_length)]
        text = record if isinstance(record, str) else record.get("text") if isinstance(record, Mapping) else None
        if not isinstance(text, str):
            received = list(record) if isinstance(record, Mapping) else type(record).__name__
            raise DataError(expected("a record with a 'text'", received, "Rename the column."))
        if not getattr(self.tokenizer, "is_fast", False):
            do = "Use the fast tokenizer of the model, or data that are tokenised (input_ids)."
            raise BadArgument(expected("a fast tokenizer, which splits and knows words", type(self.tokenizer), do))
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
    """Pieces of a token store, masked anew whenever one is read: by the generators that the loader seeds.

    `fixed` masks depend on the number of the piece alone. `others` are the tokens that may stand in for one.
    """

    def __init__(self, store: Any, mask_id: int, others: np.ndarray, mask_prob: float, *, fixed: bool = False) -> None:
        super().__init__(store)  # masking takes some 30 us: less than to hand a sample over from another process
        self.mask_id = mask_id
        self.others = others
        self.mask_prob = mask_prob
        self.fixed = fixed

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        item = self.store[index]
        # A generator of its own, seeded by the loader's: the samples of an epoch are then apart by 128 bits.
        seed = [_EVALUATION, index % len(self)] if self.fixed else np.random.randint(0, 2**32, 4, dtype=np.uint32)
        ids, labels = mask_tokens(
            item["input_ids"], item["labels"], np.random.default_rng(seed), self.mask_id, self.others, self.mask_prob
        )
        return {"input_ids": ids, "labels": labels}


def mask_tokens(
    ids: np.ndarray, words: np.ndarray, rng: np.random.Generator, mask_id: int, others: np.ndarray, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens with some of them masked, and labels: the token where it is to be predicted, else -100.

    `words` are numbers, equal for tokens that are chosen together, and -100 where none may be. A share of the words is
    chosen, on average exactly so many, and at least one.

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
    fate = rng.random(len(chosen))
    random = others[rng.integers(len(others), size=len(chosen))]
    shown = np.where(fate < _HIDDEN, mask_id, np.where(fate < _HIDDEN + _REPLACED, random, ids[chosen]))
    masked = np.array(ids)
    masked[chosen] = shown
    return masked, labels
