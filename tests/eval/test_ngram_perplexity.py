"""Models that count, against counts by hand and against what they must sum to."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from trainformer.core.errors import BadArgument, DataError
from trainformer.eval import bigram_perplexity, unigram_perplexity

TRAIN = [[0, 1, 2, 1, 2], [3], [2, 1, 1, 0, 4, 4, 1], [1, 2]]
VALID = [[1, 2, 0], [4, 3, 3, 1]]
SIZE = 6  # one token more than ever occurs


def chances(sequences):
    """The two models written out: chances of every token after every other."""
    after = [(a, b) for sequence in sequences for a, b in itertools.pairwise(sequence)]
    pairs, tokens = Counter(after), Counter(b for _, b in after)
    unigram = np.array([(tokens[b] + 1) / (len(after) + SIZE) for b in range(SIZE)])
    bigram = np.zeros((SIZE, SIZE))
    for a in range(SIZE):
        total = sum(count for (first, _), count in pairs.items() if first == a)
        kinds = sum(1 for first, _ in pairs if first == a)
        for b in range(SIZE):
            seen = max(pairs[a, b] - 0.75, 0) / total if total else 0
            bigram[a, b] = seen + (0.75 * kinds / total if total else 1) * unigram[b]
    return unigram, bigram


def test_perplexities_match_a_calculation_by_hand():
    unigram, bigram = chances(TRAIN)
    np.testing.assert_allclose(bigram.sum(axis=1), 1)
    wanted = [(a, b) for sequence in VALID for a, b in itertools.pairwise(sequence)]
    by_hand = math.exp(-np.mean([math.log(unigram[b]) for _, b in wanted]))
    assert unigram_perplexity(TRAIN, VALID, SIZE) == pytest.approx(by_hand, rel=1e-12)
    by_hand = math.exp(-np.mean([math.log(bigram[a, b]) for a, b in wanted]))
    assert bigram_perplexity(TRAIN, VALID, SIZE) == pytest.approx(by_hand, rel=1e-12)


def test_the_perplexity_of_a_markov_chain_is_its_entropy():
    rng = np.random.default_rng(0)
    moves = rng.dirichlet(np.full(8, 0.3), size=8)
    chain = [0]
    for _ in range(60_000):
        chain.append(int(rng.choice(8, p=moves[chain[-1]])))
    occupied = np.bincount(chain, minlength=8) / len(chain)
    entropy = -(occupied[:, None] * moves * np.log(np.maximum(moves, 1e-300))).sum()
    assert bigram_perplexity([chain[:50_000]], [chain[50_000:]], 8) == pytest.approx(math.exp(entropy), rel=0.02)
    assert unigram_perplexity([chain[:50_000]], [chain[50_000:]], 8) > 1.3 * math.exp(entropy)


def test_bad_tokens_are_rejected():
    with pytest.raises(DataError, match="two tokens, received 'none'"):
        bigram_perplexity([[1]], VALID, SIZE)
    with pytest.raises(BadArgument, match="below 3, the vocabulary, received 4"):
        unigram_perplexity(TRAIN, VALID, 3)
