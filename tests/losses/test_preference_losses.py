"""Preference losses: equal to TRL's on the same log probabilities, and finite where probabilities end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from loss_tools import HALVES, value_and_gradients
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from trainformer.core.errors import BadArgument
from trainformer.losses.preference import Divergence, Variant, dpo_loss, orpo_loss, preference_rewards, simpo_loss


def pairs(count: int, size: int = 50, scale: float = 8.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [-scale * torch.rand(size, generator=generator) - 0.05 for _ in range(count)]


def trl(trainer: Any, method: str, **settings: Any) -> Any:
    """A loss of TRL, with what it reads of its trainer."""
    about = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), alpha=0.0, label_smoothing=0.0)
    about.__dict__.update(settings)
    return lambda *inputs: getattr(trainer, method)(about, *inputs)


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize(("variant", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)])
def test_dpo_matches_trl(variant, smoothing, beta):
    """TRL's loss without a reference, on what each answer gained: with one that is DPO."""
    chosen, rejected, by_chosen, by_rejected = pairs(4)
    oracle = trl(CPOTrainer, "cpo_loss", loss_type=variant, beta=beta, label_smoothing=smoothing)
    losses, worth, less = oracle(chosen - by_chosen, rejected - by_rejected)
    options: dict[str, Any] = {"beta": beta, "variant": variant, "label_smoothing": smoothing}
    found = dpo_loss(chosen, rejected, by_chosen, by_rejected, **options, reduction="none")
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
    rewards = preference_rewards(chosen, rejected, by_chosen, by_rejected, beta)
    torch.testing.assert_close([rewards.chosen, rewards.rejected], [worth, less], rtol=1e-6, atol=1e-6)
    assert torch.equal(rewards.correct, worth > less)
    torch.testing.assert_close(rewards.margin, worth - less, rtol=1e-6, atol=1e-6)


def test_the_gradient_is_that_of_the_paper():
    """Equation 7: each pair pulls by beta times how wrong its implied reward is."""
    given = pairs(4)
    _, by_chosen, by_rejected, by_reference, _ = value_and_gradients(
        lambda *x: dpo_loss(*x, beta=0.3, reduction="sum"), *given
    )
    rewards = preference_rewards(*given, beta=0.3)
    pull = 0.3 * torch.sigmoid(-rewards.margin)
    torch.testing.assert_close(by_chosen, -pull)
    torch.testing.assert_close(by_rejected, pull)
    torch.testing.assert_close(by_reference, pull)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_matches_trl(smoothing):
    chosen, rejected = pairs(2)
    oracle = trl(
        CPOTrainer, "cpo_loss", loss_type="simpo", beta=2.5, simpo_gamma=1.4, label_smoothing=smoothing
    )  # fmt: skip
    losses, worth, _ = oracle(chosen, rejected)
    found = simpo_loss(chosen, rejected, 2.5, 1.4, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(preference_rewards(chosen, rejected, beta=2.5).chosen, worth)


def test_orpo_matches_trl():
    chosen, rejected = pairs(2, scale=4.0)
    ratio = trl(ORPOTrainer, "odds_ratio_loss", beta=0.3)(chosen, rejected)[0]
    found = orpo_loss(chosen, rejected, 0.3, reduction="none")
    torch.testing.assert_close(found, -chosen - ratio, rtol=1e-6, atol=1e-6)
    other = torch.ones_like(chosen)
    torch.testing.assert_close(orpo_loss(chosen, rejected, 0.3, nll=other), (1 - ratio).mean(), rtol=1e-6, atol=1e-6)


def test_odds_are_exact_near_both_ends():
    """Against float64, from nearly certain to hopeless tokens."""
    chosen = -torch.logspace(-5, 2, 60, dtype=torch.float64)
    rejected = chosen.flip(0)
    odds = [torch.log(p.exp() / -torch.expm1(p)) for p in (chosen, rejected)]
    wanted = -chosen - 0.1 * F.logsigmoid(odds[0] - odds[1])
    found = orpo_loss(chosen.float(), rejected.float(), reduction="none")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_extreme_log_probabilities_have_finite_gradients():
    ends = torch.tensor([0.0, 0.0, -1e4, -1e-8, -math.log(2)])
    for loss in (orpo_loss, simpo_loss):
        assert all(x.isfinite().all() for x in value_and_gradients(loss, ends, ends.flip(0)))
    zeros = torch.zeros_like(ends)
    assert all(x.isfinite().all() for x in value_and_gradients(dpo_loss, ends, ends.flip(0), zeros, zeros))


@pytest.mark.parametrize("variant", get_args(Variant))
def test_every_variant_has_finite_gradients(variant):
    values = torch.tensor([-1e4, -1.0, 0.0, -1e4])
    options = {"label_smoothing": 0.1} if variant in ("robust", "exo_pair") else {}
    divergences = get_args(Divergence) if variant in ("sigmoid", "hinge", "robust", "exo_pair", "discopop") else ()
    for divergence in divergences or ("reverse_kl",):
        chosen, rejected = values.clone().requires_grad_(), values.flip(0).clone().requires_grad_()
        fixed = values.roll(1), values.roll(2)
        loss = dpo_loss(chosen, rejected, *fixed, variant=variant, f_divergence=divergence, **options)
        loss.backward()
        assert loss.isfinite(), divergence
        assert chosen.grad.isfinite().all(), divergence
        assert rejected.grad.isfinite().all(), divergence
        assert chosen.grad.any() or rejected.grad.any()


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_computed_in_float32(dtype):
    given = [x.to(dtype) for x in pairs(4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [dpo_loss(*given), orpo_loss(*given[:2]), simpo_loss(*given[:2])]
    wide = [x.float() for x in given]
    wanted = [dpo_loss(*wide), orpo_loss(*wide[:2]), simpo_loss(*wide[:2])]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert all(x.dtype is torch.float32 for x in found)


def test_sums_over_pairs_do_not_depend_on_the_batch_size():
    given = pairs(4, size=12)
    whole = dpo_loss(*given, reduction="sum")
    pieces = [dpo_loss(*(x[part] for x in given), reduction="sum") for part in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(whole, pieces[0] + pieces[1])
    torch.testing.assert_close(dpo_loss(*given), whole / 12)


def test_wrong_arguments():
    a, b, c, d = pairs(4, size=3)
    with pytest.raises(BadArgument, match="Did you mean 'sigmoid'"):
        dpo_loss(a, b, c, d, variant="sigmoids")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="beta to be a positive number"):
        dpo_loss(a, b, c, d, beta=0.0)
    with pytest.raises(BadArgument, match=r"less than 0\.5"):
        dpo_loss(a, b, c, d, label_smoothing=0.5)
    with pytest.raises(BadArgument, match="which has no label smoothing"):
        dpo_loss(a, b, c, d, label_smoothing=0.1, variant="ipo")
    with pytest.raises(BadArgument, match="one shape"):
        dpo_loss(a, b[:2], c, d)
    with pytest.raises(BadArgument, match="one shape"):
        orpo_loss(a, b, nll=a.sum())
    with pytest.raises(BadArgument, match="gamma to be 0 or"):
        simpo_loss(a, b, gamma=-1.0)
    with pytest.raises(BadArgument, match="or neither"):
        preference_rewards(a, b, c)
    with pytest.raises(BadArgument, match="reduction"):
        dpo_loss(a, b, c, d, reduction="avg")  # type: ignore[arg-type]
