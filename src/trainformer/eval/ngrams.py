"""Models that count: what a language model has to beat to have learned more than how often tokens occur.

Both are smoothed, so that nothing is impossible, and their perplexity is over the tokens that `CausalLM` predicts: all
but the first of each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected

_DISCOUNT = 0.75  # what each pair that was seen gives up for those that were not; the usual value


def unigram_perplexity(train: Iterable[Sequence[int]], valid: Iterable[Sequence[int]], vocabulary: int) -> float:
    """Perplexity of tokens by how often they occur in the training sequences; every token is counted once more.

    >>> round(unigram_perplexity([[0, 1, 0, 1]], [[0, 1]], vocabulary=2), 3)
    1.667
    """
    _, seen = _pairs(train, vocabulary)
    _, wanted = _pairs(valid, vocabulary)
    return _perplexity(_unigram(seen, vocabulary)[wanted])


def bigram_perplexity(train: Iterable[Sequence[int]], valid: Iterable[Sequence[int]], vocabulary: int) -> float:
    """Perplexity of tokens by the token before: absolute discounting, with the unigram for what it leaves over.

    >>> round(bigram_perplexity([[0, 1] * 50], [[0, 1, 0, 1]], vocabulary=2), 2)
    1.01
    """
    before, seen = _pairs(train, vocabulary)
    wanted_before, wanted = _pairs(valid, vocabulary)
    pairs, counts = np.unique(before * vocabulary + seen, return_counts=True)
    of_first = np.bincount(before, minlength=vocabulary)
    kinds = np.bincount(pairs // vocabulary, minlength=vocabulary)
    sought = wanted_before * vocabulary + wanted
    place = np.minimum(np.searchsorted(pairs, sought), len(pairs) - 1)
    found = np.where(pairs[place] == sought, counts[place] - _DISCOUNT, 0.0)
    total = of_first[wanted_before]
    left = np.where(total > 0, _DISCOUNT * kinds[wanted_before] / np.maximum(total, 1), 1.0)
    return _perplexity(found / np.maximum(total, 1) + left * _unigram(seen, vocabulary)[wanted])


def _pairs(sequences: Iterable[Sequence[int]], vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Each token but the first of a sequence, and the one before it."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    arrays = [array for array in arrays if len(array) > 1]
    if not arrays:
        raise DataError(expected("at least one sequence of two tokens", "none"))
    before, after = (np.concatenate([array[part] for array in arrays]) for part in (slice(-1), slice(1, None)))
    largest = max(before.max(), after.max())
    if largest >= vocabulary or min(before.min(), after.min()) < 0:
        raise BadArgument(expected(f"tokens from 0 and below {vocabulary}, the vocabulary", int(largest)))
    return before, after


def _unigram(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    return (np.bincount(tokens, minlength=vocabulary) + 1) / (len(tokens) + vocabulary)


def _perplexity(probabilities: np.ndarray) -> float:
    return math.exp(-np.log(probabilities).mean())
