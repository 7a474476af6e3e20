"""Metrics of language models: perplexity, n-gram baselines, and metrics of generated texts.

BLEU and chrF come from sacrebleu and ROUGE from rouge-score, so numbers compare with published ones. Shares lie between
0 and 1; BLEU and chrF between 0 and 100, as is customary.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, check_count, did_you_mean, expected
from trainformer.core.optional import require

Texts = Sequence[str]
References = Sequence[str] | Sequence[Sequence[str]]

_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DISCOUNT = 0.75  # absolute discount of each seen bigram; the usual value


# -- perplexity --------------------------------------------------------------------------------------------


def perplexity(loss_sum: float | Tensor, tokens: int | Tensor) -> float:
    """exp of the mean loss over tokens; infinite beyond 1e308.

    Pass sums over all batches, not means of means: then neither batch size nor padding changes the result.

    >>> round(perplexity(20 * math.log(8), 20), 4)
    8.0
    """
    mean = _number("loss_sum", loss_sum) / _positive("tokens", tokens)
    return math.inf if mean > 709 else math.exp(mean)


def bits_per_byte(loss_sum: float | Tensor, bytes: int | Tensor) -> float:
    """The summed loss (in nats) in bits per UTF-8 byte of the text: comparable between tokenizers.

    >>> round(bits_per_byte(20 * math.log(8), 30), 4)
    2.0
    """
    return _number("loss_sum", loss_sum) / (math.log(2) * _positive("bytes", bytes))


def unigram_perplexity(train: Iterable[Sequence[int]], valid: Iterable[Sequence[int]], vocabulary: int) -> float:
    """Perplexity of a unigram model with add-one smoothing: a baseline for language models.

    Like `CausalLM`, it predicts all tokens but the first of each sequence.

    >>> round(unigram_perplexity([[0, 1, 0, 1]], [[0, 1]], vocabulary=2), 3)
    1.667
    """
    _, seen = _pairs(train, vocabulary)
    _, wanted = _pairs(valid, vocabulary)
    return _perplexity(_unigram(seen, vocabulary)[wanted])


def bigram_perplexity(train: Iterable[Sequence[int]], valid: Iterable[Sequence[int]], vocabulary: int) -> float:
    """Perplexity of a bigram model with absolute discounting, interpolated with the unigram model: a baseline.

    >>> round(bigram_perplexity([[0, 1] * 50], [[0, 1, 0, 1]], vocabulary=2), 2)
    1.01
    """
    before, seen = _pairs(train, vocabulary)
    valid_before, wanted = _pairs(valid, vocabulary)
    pairs, counts = np.unique(before * vocabulary + seen, return_counts=True)
    totals = np.bincount(before, minlength=vocabulary)
    distinct = np.bincount(pairs // vocabulary, minlength=vocabulary)
    sought = valid_before * vocabulary + wanted
    index = np.minimum(np.searchsorted(pairs, sought), len(pairs) - 1)
    found = np.where(pairs[index] == sought, counts[index] - _DISCOUNT, 0.0)
    total = totals[valid_before]
    backoff = np.where(total > 0, _DISCOUNT * distinct[valid_before] / np.maximum(total, 1), 1.0)
    return _perplexity(found / np.maximum(total, 1) + backoff * _unigram(seen, vocabulary)[wanted])


# -- against references ------------------------------------------------------------------------------------


def bleu(hypotheses: Texts, references: References, **options: Any) -> float:
    """Corpus BLEU by sacrebleu, from 0 to 100. Each text has one reference, or a list of them.

    `options` go to sacrebleu (`tokenize="zh"`, `lowercase=True`, ...). Pass the whole set: corpus BLEU is not a mean
    over batches.

    >>> round(bleu(["the cat sat on the mat"], ["the cat sat on a mat"]), 2)
    53.73
    """
    sacrebleu = require("sacrebleu", "text", "for BLEU")
    texts, wanted = _paired(hypotheses, references)
    return float(sacrebleu.corpus_bleu(texts, _streams(wanted), **options).score)


def chrf(hypotheses: Texts, references: References, **options: Any) -> float:
    """Corpus chrF by sacrebleu, from 0 to 100: F-score of character n-grams. `word_order=2` makes it chrF++.

    >>> round(chrf(["the cat sat on the mat"], ["the cat sat on a mat"]), 2)
    72.08
    """
    sacrebleu = require("sacrebleu", "text", "for chrF")
    texts, wanted = _paired(hypotheses, references)
    return float(sacrebleu.corpus_chrf(texts, _streams(wanted), **options).score)


def rouge(
    hypotheses: Texts, references: References, kinds: Sequence[str] = ("rouge1", "rouge2", "rougeL"), **options: Any
) -> dict[str, float]:
    """Mean F-measures by rouge-score, from 0 to 1; of several references the best counts.

    `kinds` are "rouge1" to "rouge9", "rougeL", and "rougeLsum", which splits sentences at newlines. `options` go to
    the scorer of rouge-score (`use_stemmer=True`, `tokenizer=...` for non-Latin scripts).

    >>> {name: round(value, 3) for name, value in rouge(["the cat sat"], ["the cat sat down"]).items()}
    {'rouge1': 0.857, 'rouge2': 0.8, 'rougeL': 0.857}
    """
    wrong = [kind for kind in kinds if not re.fullmatch(r"rouge([1-9]|L|Lsum)", kind)]
    if wrong or not kinds:
        hint = did_you_mean(wrong[0], _ROUGE) if wrong else ""
        raise BadArgument(expected("kinds of ROUGE ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')", list(kinds), hint))
    texts, wanted = _paired(hypotheses, references)
    scorer_module = require("rouge_score.rouge_scorer", "text", "for ROUGE")
    scorer = scorer_module.RougeScorer(list(kinds), **options)
    scores = [scorer.score_multi(right, text) for text, right in zip(texts, wanted, strict=True)]
    return {kind: math.fsum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}


def exact_match(
    hypotheses: Texts,
    references: References,
    *,
    strip: bool = True,
    lowercase: bool = False,
    punctuation: bool = True,
    articles: bool = True,
) -> float:
    """Share of texts equal to their reference, or to one of several.

    `strip` ignores white space at both ends. ``lowercase=True, punctuation=False, articles=False`` is SQuAD's
    normalisation: ignore case, punctuation, "a", "an", "the" and repeated spaces.

    >>> exact_match(["42", " yes", "The cat."], ["42", "yes", "cat"])
    0.6666666666666666
    >>> exact_match(["The cat."], [["dog", "cat"]], lowercase=True, punctuation=False, articles=False)
    1.0
    """

    def normalized(text: str) -> str:
        text = text.lower() if lowercase else text
        text = text if punctuation else text.translate(_PUNCTUATION)
        text = text if articles else _ARTICLES.sub(" ", text)
        if not (punctuation and articles):
            text = " ".join(text.split())  # removed words leave gaps
        return text.strip() if strip else text

    return _best_mean(hypotheses, references, lambda text, right: float(normalized(text) == normalized(right)))


def token_f1(hypotheses: Texts, references: References) -> float:
    """Mean word F1 between a text and its reference (the best of several), as in SQuAD.

    Ignores case, punctuation and articles. Two texts without words are equal: 1.

    >>> round(token_f1(["a cat sat on the mat"], ["The cat sat."]), 4)
    0.6667
    """

    def score(text: str, right: str) -> float:
        words, wanted = _squad_words(text), _squad_words(right)
        if not words or not wanted:
            return float(words == wanted)
        shared = (Counter(words) & Counter(wanted)).total()
        return 2 * shared / (len(words) + len(wanted))

    return _best_mean(hypotheses, references, score)


# -- without references ------------------------------------------------------------------------------------


def distinct_n(texts: Sequence[str | Sequence[Hashable]], n: int = 2) -> float:
    """Share of distinct n-grams among all n-grams of a set of texts (Li et al., 2016): low if a model repeats itself.

    Texts are strings, split at white space, or sequences of tokens. 0 if all texts are shorter than `n`.

    >>> distinct_n(["the cat the cat", "the cat"], n=2)
    0.5
    """
    grams = [gram for text in _nonempty(texts) for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(texts: Sequence[str | Sequence[Hashable]], n: int = 4) -> float:
    """Share of n-grams that repeat an earlier one of the same text, averaged over texts: high if generation loops.

    A text shorter than `n` counts as 0. (seq-rep-n, Welleck et al., 2020.)

    >>> repetition(["one two one two one two"], n=2)
    0.6
    """
    shares = []
    for text in _nonempty(texts):
        grams = _ngrams(text, n)
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return math.fsum(shares) / len(shares)


# -- helpers -----------------------------------------------------------------------------------------------


def _best_mean(hypotheses: Texts, references: References, score: Callable[[str, str], float]) -> float:
    texts, wanted = _paired(hypotheses, references)
    best = [max(score(text, right) for right in rights) for text, rights in zip(texts, wanted, strict=True)]
    return math.fsum(best) / len(best)


def _paired(hypotheses: Texts, references: References) -> tuple[list[str], list[list[str]]]:
    for name, values in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(values, str):
            raise BadArgument(expected(f"a list of {name}", values, f"Pass [{values[:20]!r}]."))
    texts, wanted = list(hypotheses), [[r] if isinstance(r, str) else list(r) for r in references]
    if len(texts) != len(wanted):
        do = "Give each text its reference, or a list of them."
        raise BadArgument(expected("as many references as hypotheses", f"{len(wanted)} for {len(texts)}", do))
    if not texts:
        raise DataError(expected("at least 1 text", 0))
    for number, (text, rights) in enumerate(zip(texts, wanted, strict=True)):
        if not rights:
            raise DataError(expected("at least 1 reference for each text", f"none for number {number}"))
        wrong = [x for x in (text, *rights) if not isinstance(x, str)]
        if wrong:
            do = "Decode tokens first: tokenizer.batch_decode(ids, skip_special_tokens=True)."
            raise BadArgument(expected(f"texts as strings (number {number})", type(wrong[0]).__name__, do))
    return texts, wanted


def _streams(wanted: list[list[str]]) -> list[list[str | None]]:
    """References as sacrebleu expects them: the first of all texts, the second of all, ..., padded with None."""
    most = max(len(rights) for rights in wanted)
    return [[rights[i] if i < len(rights) else None for rights in wanted] for i in range(most)]


def _squad_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _ngrams(text: str | Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    check_count("n", n)
    words = text.split() if isinstance(text, str) else list(text)
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def _nonempty(texts: Sequence[str | Sequence[Hashable]]) -> Sequence[str | Sequence[Hashable]]:
    if isinstance(texts, str):
        raise BadArgument(expected("a list of texts", texts, f"Pass [{texts[:20]!r}]."))
    if len(texts) == 0:
        raise DataError(expected("at least 1 text", 0))
    return texts


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise BadArgument(expected(f"{name} to be one number", f"a tensor of shape {tuple(value.shape)}"))
    return float(value)


def _positive(name: str, value: float | Tensor) -> float:
    number = _number(name, value)
    if not 0 < number < math.inf:
        raise DataError(expected(f"{name} to be a positive number", number, "Was anything evaluated?"))
    return number


def _pairs(sequences: Iterable[Sequence[int]], vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """All tokens but the first of each sequence, and the token before each."""
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
