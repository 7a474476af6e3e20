"""The linear probe against scikit-learn's logistic regression."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from trainformer.core import BadArgument, DataError
from trainformer.eval import label_subset, linear_probe


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Raw pixels: 100 labels to train on, 10 per class, and 597 images to test on. Many border pixels are constant."""
    data = load_digits()
    pixels, labels = torch.from_numpy(data.data).float(), torch.from_numpy(data.target)
    few = label_subset(labels[:1200], 10, seed=0)
    return pixels[few], labels[few], pixels[1200:], labels[1200:]


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("l2", [0.5, 20.0])
def test_the_optimum_matches_sklearn(l2: float, standardize: bool) -> None:
    train, labels, test, wanted = digits()
    got = linear_probe(train, labels, test, wanted, l2=l2, standardize=standardize, max_iter=1000)
    scaler = StandardScaler(with_mean=standardize, with_std=standardize).fit(train.double())
    rows = scaler.transform(train.double())
    judge = LogisticRegression(C=1 / l2, tol=1e-10, solver="newton-cholesky").fit(rows, labels)
    want = log_loss(labels, judge.predict_proba(rows)) + l2 / 200 * np.square(judge.coef_).sum()
    assert got.converged
    assert got.loss == pytest.approx(want, rel=1e-6)
    assert got.accuracy == pytest.approx(judge.score(scaler.transform(test.double()), wanted), abs=1 / 597 + 1e-9)
    assert got.train_accuracy == pytest.approx(judge.score(rows, labels), abs=0.0101)
    probabilities = got.scores(test).softmax(1).numpy()
    np.testing.assert_allclose(probabilities, judge.predict_proba(scaler.transform(test.double())), atol=2e-4)
    assert got.accuracy > 0.8


def test_it_is_deterministic_and_works_in_inference_mode() -> None:
    train, labels, test, wanted = digits()
    first = linear_probe(train, labels, test, wanted)
    with torch.inference_mode():
        inside = linear_probe(train.clone(), labels.clone(), test.clone(), wanted.clone())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        quiet = linear_probe(train, labels, test, wanted)
    for other in (inside, quiet):
        assert torch.equal(first.weight, other.weight)
        assert first.accuracy == other.accuracy


def test_standardising_makes_scale_and_offset_irrelevant() -> None:
    train, labels, test, wanted = digits()
    factor = torch.logspace(-3, 3, train.shape[1])
    first = linear_probe(train, labels, test, wanted)
    second = linear_probe(train * factor + 5, labels, test * factor + 5, wanted)
    assert second.loss == pytest.approx(first.loss, rel=1e-4)
    assert second.accuracy == pytest.approx(first.accuracy, abs=0.004)


def test_in_float32_it_finds_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels, test, wanted = digits()
    want = linear_probe(train, labels, test, wanted)
    monkeypatch.setattr("trainformer.eval.probe._DOUBLE_CELLS", 0)
    got = linear_probe(train, labels, test, wanted)
    assert got.weight.dtype == torch.float32
    assert got.converged
    assert got.loss == pytest.approx(want.loss, rel=1e-4)
    assert got.accuracy == pytest.approx(want.accuracy, abs=0.004)


def test_labels_need_not_begin_at_zero_and_unknown_ones_are_wrong() -> None:
    train, labels, test, wanted = digits()
    plain = linear_probe(train, labels, test, wanted)
    moved = linear_probe(train, labels * 100 - 7, test, wanted * 100 - 7)
    assert moved.accuracy == plain.accuracy
    assert torch.equal(moved.predict(test), plain.predict(test) * 100 - 7)
    seen = labels < 9
    fewer = linear_probe(train[seen], labels[seen], test, wanted)
    assert fewer.accuracy <= (wanted < 9).float().mean().item()


def test_a_fit_that_does_not_converge_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    train, labels, test, wanted = digits()
    with caplog.at_level(logging.WARNING):
        got = linear_probe(train, labels, test, wanted, max_iter=3)
    assert not got.converged
    assert got.iterations == 3
    assert "Raise max_iter (now 3)" in caplog.text


def test_the_subset_is_balanced_seeded_and_nested() -> None:
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, 7, 500)) * 3
    few, more = label_subset(labels, 5, seed=1), label_subset(labels, 9, seed=1)
    assert labels[few].unique(return_counts=True)[1].tolist() == [5] * 7
    assert torch.equal(few, few.unique())
    assert torch.equal(few, label_subset(labels, 5, seed=1))
    assert not torch.equal(few, label_subset(labels, 5, seed=2))
    assert torch.isin(few, more).all()


def test_bad_input_is_rejected() -> None:
    train, labels, test, wanted = digits()
    with pytest.raises(DataError, match="at least 2 classes"):
        linear_probe(train, labels * 0, test, wanted)
    with pytest.raises(DataError, match=r"train_labels, one per row of the embeddings \(100\), received 99"):
        linear_probe(train, labels[:99], test, wanted)
    with pytest.raises(DataError, match=r"test_embeddings to be finite.* in 1 of 597 rows"):
        linear_probe(train, labels, test.masked_fill(torch.arange(597).unsqueeze(1) == 8, float("inf")), wanted)
    with pytest.raises(BadArgument, match="of one width, received '64 and 63'"):
        linear_probe(train, labels, test[:, :63], wanted)
    with pytest.raises(BadArgument, match="l2"):
        linear_probe(train, labels, test, wanted, l2=-1.0)
    with pytest.raises(BadArgument, match="max_iter"):
        linear_probe(train, labels, test, wanted, max_iter=0)
    with pytest.raises(DataError, match=r"received '2 of class 5'\. Pass per_class=2"):
        label_subset(torch.tensor([1, 1, 1, 5, 5]), 3)
    with pytest.raises(BadArgument, match="per_class"):
        label_subset(labels, 0)
