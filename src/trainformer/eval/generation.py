"""Metrics of language models: of their losses, and of the texts they generate.

Owns the arithmetic on sums of losses, and on lists of texts and references. BLEU and chrF are sacrebleu's and ROUGE
is rouge-score's, so that figures compare with published ones. How texts are generated, and which are compared, is the
task's business. Shares lie between 0 and 1; BLEU and chrF between 0 and 100, as everybody reports them.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.optional import require

Texts = Sequence[str]
References = Sequence[str] | Sequence[Sequence[str]]

_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


# -- losses ------------------------------------------------------------------------------------------------


def perplexity(loss_sum: float | Tensor, tokens: int | Tensor) -> float:
    """exp of the mean loss: among how many equally likely tokens the model hesitates. Infinite beyond 1e308.

    Sums over all batches, not means of means: then neither batch size nor padding changes it.

    >>> round(perplexity(20 * math.log(8), 20), 4)
    8.0
    """
    mean = _number("loss_sum", loss_sum) / _positive("tokens", tokens)
    return math.inf if mean > 709 else math.exp(mean)


def bits_per_byte(loss_sum: float | Tensor, bytes: int | Tensor) -> float:
    """The loss (in nats, summed) in bits per byte of the text in UTF-8: comparable between tokenizers.

    >>> round(bits_per_byte(20 * math.log(8), 30), 4)
    2.0
    """
    return _number("loss_sum", loss_sum) / (math.log(2) * _positive("bytes", bytes))


# -- against references ------------------------------------------------------------------------------------


def bleu(hypotheses: Texts, references: References, **options: Any) -> float:
    """Corpus BLEU by sacrebleu, from 0 to 100. Each text has one reference, or a list of them.

    `options` are sacrebleu's (`tokenize="zh"`, `lowercase=True`, ...). It belongs to a whole set: means over batches
    are something else.

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
    """Mean F-measures by rouge-score, from 0 to 1; of several references the best one counts.

    `kinds` are "rouge1" to "rouge9", "rougeL", and "rougeLsum", which takes lines as sentences. `options` are those
    of rouge-score's scorer (`use_stemmer=True`, `tokenizer=...` for other scripts than the Latin one).

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
    """Share of texts equal to their reference, or to one of them.

    White space at both ends does not count with `strip`. ``lowercase=True, punctuation=False, articles=False`` is
    SQuAD's comparison: without case, punctuation, "a", "an" and "the", and with single spaces.

    >>> exact_match(["42", " yes", "The cat."], ["42", "yes", "cat"])
    0.6666666666666666
    >>> exact_match(["The cat."], [["dog", "cat"]], lowercase=True, punctuation=False, articles=False)
    1.0
    """

    def compared(text: str) -> str:
        text = text.lower() if lowercase else text
        text = text if punctuation else text.translate(_PUNCTUATION)
        text = text if articles else _ARTICLES.sub(" ", text)
        if not (punctuation and articles):
            text = " ".join(text.split())  # what was taken out leaves gaps
        return text.strip() if strip else text

    return _best_mean(hypotheses, references, lambda text, right: float(compared(text) == compared(right)))


def token_f1(hypotheses: Texts, references: References) -> float:
    """Mean F1 of the words that a text shares with its reference (the best of several), as SQuAD counts it.

    Compared without case, punctuation and articles. Two texts without any word are equal: 1.

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


# -- of the texts alone ------------------------------------------------------------------------------------


def distinct_n(texts: Sequence[str | Sequence[Hashable]], n: int = 2) -> float:
    """Share of different n-grams among all of a set of texts (Li et al., 2016): low where a model says the same again.

    Texts are strings, split at white space, or sequences of tokens. 0 where no text is `n` long.

    >>> distinct_n(["the cat the cat", "the cat"], n=2)
    0.5
    """
    grams = [gram for text in _nonempty(texts) for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(texts: Sequence[str | Sequence[Hashable]], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text, averaged over texts: high where generation loops.

    A text shorter than `n` repeats nothing. (Welleck et al., 2020: seq-rep-n.)

    >>> repetition(["one two one two one two"], n=2)
    0.6
    """
    shares = []
    for text in _nonempty(texts):
        grams = _ngrams(text, n)
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return math.fsum(shares) / len(shares)


# -- parts -------------------------------------------------------------------------------------------------


def _best_mean(hypotheses: Texts, references: References, score: Callable[[str, str], float]) -> float:
    texts, wanted = _paired(hypotheses, references)
    best = [max(score(text, right) for right in rights) for text, rights in zip(texts, wanted, strict=True)]
    return math.fsum(best) / len(best)


def _paired(hypotheses: Texts, references: References) -> tuple[list[str], list[list[str]]]:
    """Texts, and a list of references for each."""
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
    """References as sacrebleu takes them: the first of all texts, the second of all, ...; None where there is none."""
    most = max(len(rights) for rights in wanted)
    return [[rights[i] if i < len(rights) else None for rights in wanted] for i in range(most)]


def _squad_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _ngrams(text: str | Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadArgument(expected("n to be a positive integer", n))
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
