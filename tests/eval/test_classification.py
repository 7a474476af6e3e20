"""Classification metrics against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics as sk
import torch

from trainformer.core import BadArgument
from trainformer.eval import accuracy, confusion_matrix, precision_recall_f1, topk_accuracy


def random_case(seed: int, classes: int = 7, n: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, predictions and labels; class 3 is never a label and class 5 never predicted."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    labels[labels == 3] = 1
    scores = torch.randn(n, classes, generator=generator) + 2 * torch.nn.functional.one_hot(labels, classes)
    scores[:, 5] = -100.0
    return scores, scores.argmax(1), labels


@pytest.mark.parametrize("seed", range(5))
def test_confusion_matrix_and_accuracy_match_sklearn(seed: int) -> None:
    scores, predictions, labels = random_case(seed)
    assert confusion_matrix(predictions, labels, 7).tolist() == sk.confusion_matrix(labels, predictions).tolist()
    assert accuracy(predictions, labels).item() == pytest.approx(sk.accuracy_score(labels, predictions))
    assert accuracy(scores, labels) == accuracy(predictions, labels)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("average", ["macro", "micro", "weighted", None])
def test_precision_recall_f1_match_sklearn(seed: int, average: str | None) -> None:
    _, predictions, labels = random_case(seed)
    got = precision_recall_f1(predictions, labels, average)
    want = sk.precision_recall_fscore_support(labels, predictions, average=average, zero_division=0)
    for mine, theirs in zip(got, want[:3], strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_topk_matches_sklearn(k: int) -> None:
    scores, _, labels = random_case(0)
    want = sk.top_k_accuracy_score(labels.numpy(), scores.numpy(), k=k, labels=range(7))
    assert topk_accuracy(scores, labels, k).item() == pytest.approx(want)


def test_k_larger_than_the_number_of_classes_gives_accuracy_1() -> None:
    scores, _, labels = random_case(0)
    assert topk_accuracy(scores, labels, k=50).item() == 1.0


def test_classes_that_never_occur_do_not_change_the_macro_mean() -> None:
    """Ten classes declared, two seen: scikit-learn, which sees only what occurs, is the judge."""
    labels, predictions = torch.tensor([0, 0, 4, 4]), torch.tensor([0, 4, 4, 4])
    got = precision_recall_f1(predictions, labels, "macro", num_classes=10)
    assert got.f1.item() == pytest.approx(sk.f1_score(labels, predictions, average="macro"))
    per_class = precision_recall_f1(predictions, labels, None, num_classes=10)
    assert per_class.f1.shape == (10,)
    assert torch.isfinite(per_class.f1).all()


def test_empty_input_is_zero_not_nan() -> None:
    none = torch.empty(0, dtype=torch.long)
    assert confusion_matrix(none, none, 3).tolist() == [[0] * 3] * 3
    assert precision_recall_f1(none, none, "macro", 3).f1.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_narrow_integers_do_not_overflow(dtype: torch.dtype) -> None:
    labels = torch.arange(200)
    got = confusion_matrix(labels.to(dtype), labels.to(dtype), 200)
    assert torch.equal(got, torch.eye(200, dtype=torch.int64))


def test_bad_input_is_rejected() -> None:
    labels = torch.tensor([0, 1])
    with pytest.raises(BadArgument, match="0 to 1, received 2"):
        confusion_matrix(torch.tensor([0, 2]), labels, 2)
    with pytest.raises(BadArgument, match="received -1"):
        confusion_matrix(torch.tensor([0, -1]), labels)
    with pytest.raises(BadArgument, match="one prediction per label"):
        accuracy(torch.tensor([0, 1, 1]), labels)
    with pytest.raises(BadArgument, match="Did you mean 'macro'"):
        precision_recall_f1(labels, labels, "makro")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="positive integer, received 0"):
        topk_accuracy(torch.zeros(2, 3), labels, 0)
