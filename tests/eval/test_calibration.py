"""Calibration against torchmetrics, scikit-learn, scipy and plain loops."""

from __future__ import annotations

import logging
import math

import pytest
import scipy.optimize
import sklearn.metrics
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from trainformer.core import BadArgument, DataError
from trainformer.eval import (
    brier_score,
    expected_calibration_error,
    fit_temperature,
    negative_log_likelihood,
    reliability,
)


def case(seed: int = 0, n: int = 500, classes: int = 6, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits that are too sure of themselves by the factor `scale`: labels are drawn from softmax(logits / scale)."""
    generator = torch.Generator().manual_seed(seed)
    honest = 1.5 * torch.randn(n, classes, generator=generator)
    labels = torch.multinomial(honest.softmax(1), 1, generator=generator).squeeze(1)
    return honest * scale, labels


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_matches_torchmetrics(seed: int, bins: int) -> None:
    logits, labels = case(seed, scale=2.0)
    probabilities = logits.softmax(1)
    want = multiclass_calibration_error(probabilities, labels, num_classes=6, n_bins=bins, norm="l1").item()
    assert expected_calibration_error(probabilities, labels, bins) == pytest.approx(want, abs=1e-6)
    assert want > 0.05


def test_reliability_matches_bins_by_hand() -> None:
    logits, labels = case(n=200)
    probabilities = logits.softmax(1)
    got = reliability(probabilities, labels, bins=8)
    confidence, predictions = probabilities.max(1)
    for i in range(8):
        inside = [j for j in range(200) if i / 8 < confidence[j] <= (i + 1) / 8]
        assert got.count[i] == len(inside)
        if inside:
            assert got.confidence[i].item() == pytest.approx(confidence[inside].mean().item(), abs=1e-6)
            assert got.accuracy[i].item() == pytest.approx((predictions == labels)[inside].float().mean().item())
    assert got.count.sum() == 200


def test_an_edge_belongs_to_the_bin_below_and_1_to_the_last() -> None:
    probabilities = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.75, 0.25]])
    assert reliability(probabilities, torch.tensor([0, 0, 0]), bins=4).count.tolist() == [0, 1, 1, 1]
    assert expected_calibration_error(probabilities[1:2], torch.tensor([0])) == 0.0
    assert expected_calibration_error(probabilities[1:2], torch.tensor([1])) == 1.0


def test_scores_match_sklearn() -> None:
    logits, labels = case()
    probabilities = logits.double().softmax(1)
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(
        sklearn.metrics.log_loss(labels, probabilities)
    )
    one_hot = F.one_hot(labels, 6)
    by_hand = (probabilities - one_hot).square().sum(1).mean().item()
    assert brier_score(probabilities, labels) == pytest.approx(by_hand)
    # Two classes: twice the classical score of one probability.
    two = torch.rand(50, 1, dtype=torch.float64)
    two, answer = torch.cat((1 - two, two), 1), torch.randint(0, 2, (50,))
    assert brier_score(two, answer) == pytest.approx(2 * sklearn.metrics.brier_score_loss(answer, two[:, 1]))


def test_a_probability_of_zero_is_finite() -> None:
    assert 87 < negative_log_likelihood(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) < 88


@pytest.mark.parametrize("scale", [0.05, 0.5, 1.0, 3.0, 40.0])
def test_temperature_matches_the_minimum_of_scipy(scale: float) -> None:
    logits, labels = case(scale=scale)

    def loss(inverse: float) -> float:
        return F.cross_entropy(logits.double() * inverse, labels).item()

    bounds, fine = (1e-3 / scale, 10 / scale), {"xatol": 1e-9}
    want = scipy.optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options=fine).x
    got = fit_temperature(logits, labels)
    assert got == pytest.approx(1 / want, rel=1e-4)
    assert got == pytest.approx(scale, rel=0.2)
    assert loss(1 / got) <= loss(want) + 1e-12


def test_temperature_improves_calibration_and_keeps_predictions() -> None:
    logits, labels = case(n=2000, scale=4.0)
    fitted, fresh = slice(0, 1000), slice(1000, None)
    temperature = fit_temperature(logits[fitted], labels[fitted])
    before, after = (scores.softmax(1) for scores in (logits[fresh], logits[fresh] / temperature))
    assert expected_calibration_error(before, labels[fresh]) > 0.2
    assert expected_calibration_error(after, labels[fresh]) < 0.06
    assert negative_log_likelihood(after, labels[fresh]) < negative_log_likelihood(before, labels[fresh])
    assert torch.equal(before.argmax(1), after.argmax(1))


def test_without_an_optimal_temperature_it_is_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    labels = torch.arange(4)
    with caplog.at_level(logging.WARNING):
        assert fit_temperature(torch.eye(4), labels) == 0.01
        assert fit_temperature(-torch.eye(4), labels) == 100.0
        assert fit_temperature(torch.zeros(4, 4), labels) == 100.0
    assert "No finite temperature" in caplog.text


def test_half_precision_probabilities_are_probabilities() -> None:
    logits, labels = case(classes=1000)
    half = logits.softmax(1).bfloat16()
    full = expected_calibration_error(logits.softmax(1), labels)
    assert expected_calibration_error(half, labels) == pytest.approx(full, abs=0.01)


def test_bad_input_is_rejected() -> None:
    logits, labels = case(n=10)
    probabilities = logits.softmax(1)
    for function in (expected_calibration_error, brier_score, negative_log_likelihood, reliability):
        with pytest.raises(BadArgument, match=r"Pass logits.softmax\(-1\)"):
            function(logits, labels)
        with pytest.raises(BadArgument, match="labels from 0 to 5, received 6"):
            function(probabilities, torch.full_like(labels, 6))
        with pytest.raises(BadArgument, match="class indices"):
            function(probabilities, labels[:9])
        with pytest.raises(DataError, match="at least 1 sample"):
            function(probabilities[:0], labels[:0])
        broken = probabilities.clone()
        broken[:4] = math.nan
        with pytest.raises(DataError, match="in 4 of 10 rows"):
            function(broken, labels)
    with pytest.raises(BadArgument, match="bins to be a positive integer"):
        reliability(probabilities, labels, bins=0)
    with pytest.raises(BadArgument, match="class indices"):
        fit_temperature(logits[:, 0], labels)
    with pytest.raises(BadArgument, match="labels from 0 to 5, received -1"):
        fit_temperature(logits, labels - labels - 1)
