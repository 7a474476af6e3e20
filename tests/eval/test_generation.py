"""Metrics of language models, against sacrebleu, rouge-score, torchmetrics, and by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainformer.core.errors import BadArgument, DataError, MissingDependency
from trainformer.eval.generation import (
    bits_per_byte,
    bleu,
    chrf,
    distinct_n,
    exact_match,
    perplexity,
    repetition,
    rouge,
    token_f1,
)

TEXTS = [
    "The cat sat on the mat and looked at the dog.",
    "a quick brown fox, jumping over it",
    "nothing in common",
    "It is what it is; the   end",
]
ONE = [
    "The cat sat on a mat, and it looked at the dog.",
    "The quick brown fox jumps over the lazy dog",
    "wholly other words here today",
    "It is what it is: an end!",
]
SEVERAL = [
    [ONE[0], "On the mat sat the cat and looked at the dog."],
    [ONE[1]],
    [ONE[2], "nothing", "something in common"],
    [ONE[3], "it was"],
]


# -- losses ------------------------------------------------------------------------------------------------


def test_perplexity_against_torchmetrics() -> None:
    text = pytest.importorskip("torchmetrics.text")
    theirs = text.Perplexity(ignore_index=-100)
    total, tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long)
    for length in (3, 11, 29):  # batches of unequal size: a mean of means would be something else
        logits, labels = torch.randn(2, length, 40) * 3, torch.randint(0, 40, (2, length))
        labels[0, : length // 2] = -100
        theirs.update(logits, labels)
        total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens += (labels != -100).sum()
    assert perplexity(total, tokens) == pytest.approx(theirs.compute().item(), rel=1e-5)


def test_perplexity_by_hand() -> None:
    assert perplexity(0.0, 3) == 1
    assert perplexity(6 * math.log(50), 6) == pytest.approx(50)
    assert perplexity(1e6, 1) == math.inf
    assert perplexity(709, 1) < math.inf
    assert math.isnan(perplexity(math.nan, 1))


def test_bits_per_byte() -> None:
    """Bytes drawn at random cost eight bits each, whatever the tokens are."""
    assert bits_per_byte(1000 * math.log(256), 1000) == pytest.approx(8)
    assert bits_per_byte(torch.tensor(500 * math.log(65536.0)), torch.tensor(1000)) == pytest.approx(8)


@pytest.mark.parametrize("metric", [perplexity, bits_per_byte])
def test_no_tokens(metric: Callable[..., float]) -> None:
    with pytest.raises(DataError, match=r"positive number, received 0\.0. Was anything evaluated"):
        metric(0.0, 0)
    with pytest.raises(BadArgument, match=r"one number.*\(2,\)"):
        metric(torch.zeros(2), 3)


# -- against references ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lowercase": True}, {"tokenize": "char"}, {"smooth_method": "floor"}])
def test_bleu_matches_sacrebleu(options: dict[str, Any]) -> None:
    metrics = pytest.importorskip("sacrebleu.metrics")
    assert bleu(TEXTS, ONE, **options) == metrics.BLEU(**options).corpus_score(TEXTS, [ONE]).score
    assert bleu(ONE, ONE, **options) == pytest.approx(100)


def test_bleu_with_unequally_many_references() -> None:
    metrics = pytest.importorskip("sacrebleu.metrics")
    streams = [ONE, [SEVERAL[0][1], None, SEVERAL[2][1], SEVERAL[3][1]], [None, None, SEVERAL[2][2], None]]
    want = metrics.BLEU().corpus_score(TEXTS, streams).score
    assert bleu(TEXTS, SEVERAL) == want
    assert want > bleu(TEXTS, ONE), "more references are easier to meet"
    # Each text's own references: the same in another order of texts.
    assert bleu(TEXTS[::-1], SEVERAL[::-1]) == pytest.approx(want)


@pytest.mark.parametrize("options", [{}, {"word_order": 2}])
def test_chrf_matches_sacrebleu(options: dict[str, Any]) -> None:
    metrics = pytest.importorskip("sacrebleu.metrics")
    assert chrf(TEXTS, ONE, **options) == metrics.CHRF(**options).corpus_score(TEXTS, [ONE]).score


@pytest.mark.parametrize("stem", [False, True])
def test_rouge_matches_rouge_score(stem: bool) -> None:
    scorer_module = pytest.importorskip("rouge_score.rouge_scorer")
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = scorer_module.RougeScorer(kinds, use_stemmer=stem)
    singles = [scorer.score(right, text) for text, right in zip(TEXTS, ONE, strict=True)]
    want = {kind: sum(s[kind].fmeasure for s in singles) / 4 for kind in kinds}
    assert rouge(TEXTS, ONE, kinds, use_stemmer=stem) == pytest.approx(want)

    best = {
        kind: sum(max(scorer.score(r, t)[kind].fmeasure for r in rs) for t, rs in zip(TEXTS, SEVERAL, strict=True)) / 4
        for kind in kinds
    }
    assert rouge(TEXTS, SEVERAL, kinds, use_stemmer=stem) == pytest.approx(best)
    assert best["rouge1"] > want["rouge1"]


def test_squad_metrics_against_torchmetrics() -> None:
    text = pytest.importorskip("torchmetrics.text")
    hypotheses = ["The cat.", "an  apple a day", "Paris, France", "no", "THE", "one two two"]
    references = [["cat", "dog"], ["apple day"], ["Paris"], ["yes"], ["word"], ["two two two", "one"]]
    theirs = text.SQuAD()(
        [{"prediction_text": t, "id": str(i)} for i, t in enumerate(hypotheses)],
        [{"answers": {"answer_start": [0] * len(r), "text": r}, "id": str(i)} for i, r in enumerate(references)],
    )
    squad = {"lowercase": True, "punctuation": False, "articles": False}
    assert 100 * exact_match(hypotheses, references, **squad) == pytest.approx(theirs["exact_match"].item())
    assert 100 * token_f1(hypotheses, references) == pytest.approx(theirs["f1"].item())


def test_exact_match_options() -> None:
    assert exact_match(["yes "], ["yes"]) == 1
    assert exact_match(["yes "], ["yes"], strip=False) == 0
    assert exact_match(["Yes"], ["yes"]) == 0
    assert exact_match(["Yes"], ["yes"], lowercase=True) == 1
    assert exact_match(["a , b!"], ["a b"], punctuation=False) == 1
    assert exact_match(["the end"], ["end"], articles=False) == 1
    assert exact_match(["there"], ["re"], articles=False) == 0, "an article is a word of its own"


def test_token_f1_by_hand() -> None:
    assert token_f1(["x y"], ["y z w"]) == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert token_f1(["x x"], ["x"]) == pytest.approx(2 / 3), "a word said twice counts once"
    assert token_f1(["the", "the", ""], ["a", "x", "x"]) == pytest.approx(1 / 3)


# -- of the texts alone ------------------------------------------------------------------------------------


def test_distinct_and_repetition_by_hand() -> None:
    assert distinct_n(["a b c", "a b d"], n=1) == 4 / 6
    assert distinct_n(["a b c", "a b d"], n=2) == 3 / 4
    assert distinct_n([[1, 2, 1, 2]], n=2) == 2 / 3, "token ids will do"
    assert distinct_n(["a"], n=2) == 0
    assert repetition(["a b c d e", "a a a a a"], n=4) == pytest.approx((0 + 1 / 2) / 2)
    assert repetition(["a b"], n=4) == 0
    assert repetition(["a b a b", "a b a b"], n=2) == pytest.approx(1 / 3), "texts do not repeat one another"


def test_repetition_detects_a_loop() -> None:
    loop = "and then he said " * 50
    assert repetition([loop]) > 0.9 > 0.1 > repetition([" ".join(str(i) for i in range(200))])
    assert distinct_n([loop]) < 0.05


# -- errors ------------------------------------------------------------------------------------------------

PAIRED: list[Callable[..., Any]] = [bleu, chrf, rouge, exact_match, token_f1]


@pytest.mark.parametrize("metric", PAIRED)
def test_texts_that_do_not_pair(metric: Callable[..., Any]) -> None:
    with pytest.raises(BadArgument, match="as many references as hypotheses, received '1 for 2'"):
        metric(["a", "b"], ["a"])
    with pytest.raises(DataError, match="at least 1 text"):
        metric([], [])
    with pytest.raises(DataError, match="none for number 1"):
        metric(["a", "b"], [["a"], []])
    with pytest.raises(BadArgument, match="a list of hypotheses"):
        metric("abc", ["a", "b", "c"])
    with pytest.raises(BadArgument, match="a list of references"):
        metric(["a", "b", "c"], "abc")
    with pytest.raises(BadArgument, match=r"number 1.*'int'.*batch_decode"):
        metric(["a", 5], ["a", "b"])


def test_other_bad_arguments() -> None:
    with pytest.raises(BadArgument, match="Did you mean 'rougeLsum'"):
        rouge(["a"], ["a"], kinds=["rougelsum"])
    with pytest.raises(BadArgument, match="kinds of ROUGE"):
        rouge(["a"], ["a"], kinds=[])
    for metric in (distinct_n, repetition):
        with pytest.raises(BadArgument, match="n to be a positive integer"):
            metric(["a b"], n=0)
        with pytest.raises(DataError, match="at least 1 text"):
            metric([])
        with pytest.raises(BadArgument, match="a list of texts"):
            metric("a b c")


@pytest.mark.parametrize(
    ("metric", "module"), [(bleu, "sacrebleu"), (chrf, "sacrebleu"), (rouge, "rouge_score.rouge_scorer")]
)
def test_a_missing_package_is_named(metric: Callable[..., Any], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(MissingDependency, match=r"pip install 'trainformer\[text\]'"):
        metric(["a"], ["a"])
