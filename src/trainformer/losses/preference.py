"""Losses on pairs of answers of which one is preferred: DPO and its variants, ORPO, SimPO; and the rewards they imply.

Owns the arithmetic on log probabilities, one number per answer, in float32. Where these come from (`losses.tokens` sums
them over the tokens of an answer) and which model is the reference is for the task. A pair's loss depends on that pair
alone, so that sums over pairs do not depend on how a batch was cut.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.losses.numerics import Reduction, check_positive, full, full_precision, reduced

Variant = Literal["sigmoid", "ipo", "hinge"]

# Beyond this mean log probability a token is certain, and the odds p / (1 - p) have no use (nor a finite gradient).
_CERTAIN = -1e-6


class PreferenceRewards(NamedTuple):
    """What the policy's probabilities say each answer is worth; per pair, without a gradient."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """By how much the chosen answer is worth more."""
        return self.chosen - self.rejected

    @property
    def correct(self) -> Tensor:
        """Whether it is worth more: True or False per pair. A tie is not."""
        return self.chosen > self.rejected


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    variant: Variant = "sigmoid",
    reduction: Reduction = "mean",
) -> Tensor:
    """Direct preference optimisation: widen the gap between chosen and rejected answers, beyond the reference's.

    The first four are log probabilities (B,) of answers, summed over their tokens. `variant` is `"sigmoid"` (the
    original; `label_smoothing` is the share of pairs believed to be labelled the wrong way round), `"hinge"` (as in
    SLiC), or `"ipo"`: the gap is drawn to 1 / (2 beta). IPO wants means over the tokens of an answer, not sums: a sum
    would compare long answers with the same number as short ones.

    >>> gained = torch.tensor([-10.0, -12.0]), torch.tensor([-10.0, -10.0])
    >>> dpo_loss(*gained, torch.tensor([-10.0, -10.0]), torch.tensor([-10.0, -10.0]), reduction="none")
    tensor([0.6931, 0.7981])
    """
    _check_known("variant", variant, get_args(Variant))
    check_positive("beta", beta, "0.1 is usual.")
    check_label_smoothing(label_smoothing, variant)
    given = {"policy_chosen": policy_chosen, "policy_rejected": policy_rejected}
    _check_pairs({**given, "reference_chosen": reference_chosen, "reference_rejected": reference_rejected})
    with full_precision(policy_chosen):
        gained = full(policy_chosen) - full(reference_chosen)
        gap = gained - (full(policy_rejected) - full(reference_rejected))
        if variant == "sigmoid":
            losses = _smoothed(beta * gap, label_smoothing)
        elif variant == "hinge":
            losses = F.relu(1 - beta * gap)
        else:
            losses = (gap - 1 / (2 * beta)).square()
        return reduced(losses, reduction)


def orpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    beta: float = 0.1,
    *,
    nll: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Odds ratio preference optimisation: learn the chosen answer, and `beta` of making its odds the larger ones.

    There is no reference. Both are mean log probabilities (B,) per token of an answer. `nll` (B,) is what is learned of
    the chosen answer: its negative mean log probability unless given, as in the paper. (TRL takes the prompt's
    tokens in, and the mean over the tokens of a batch.)

    >>> orpo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]))
    tensor(1.0693)
    """
    check_positive("beta", beta, "0.1 is usual.")
    given = {"policy_chosen": policy_chosen, "policy_rejected": policy_rejected}
    _check_pairs(given if nll is None else {**given, "nll": nll})
    with full_precision(policy_chosen):
        chosen, rejected = full(policy_chosen), full(policy_rejected)
        log_odds = (chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected))
        learned = -chosen if nll is None else full(nll)
        return reduced(learned - beta * F.logsigmoid(log_odds), reduction)


def simpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
    *,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Simple preference optimisation: `beta` times the gap of mean log probabilities is to exceed `gamma`.

    There is no reference. Both are mean log probabilities (B,) per token of an answer: without the division a model
    would learn that short answers are good.

    >>> simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor(0.6931)
    """
    check_positive("beta", beta, "2.0 is usual.")
    check_gamma(gamma)
    check_label_smoothing(label_smoothing, "sigmoid")
    _check_pairs({"policy_chosen": policy_chosen, "policy_rejected": policy_rejected})
    with full_precision(policy_chosen):
        gap = full(policy_chosen) - full(policy_rejected)
        return reduced(_smoothed(beta * gap - gamma, label_smoothing), reduction)


def preference_rewards(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    beta: float = 0.1,
) -> PreferenceRewards:
    """`beta` times what the policy's log probability of each answer gained on the reference's, or without one: itself.

    >>> zeros = torch.zeros(2)
    >>> rewards = preference_rewards(torch.tensor([1.0, -1.0]), zeros, zeros, zeros)
    >>> rewards.margin, rewards.correct
    (tensor([ 0.1000, -0.1000]), tensor([ True, False]))
    """
    if (reference_chosen is None) != (reference_rejected is None):
        raise BadArgument(expected("reference_chosen and reference_rejected, or neither", "one of them"))
    worths = []
    for policy, reference in ((policy_chosen, reference_chosen), (policy_rejected, reference_rejected)):
        value = full(policy.detach())
        worths.append(beta * (value if reference is None else value - full(reference.detach())))
    return PreferenceRewards(*worths)


# -- arithmetic --------------------------------------------------------------------------------------------


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """The cross-entropy of "the first is better", with a share of labels that say the opposite."""
    losses = -F.logsigmoid(logits)
    return losses if not label_smoothing else losses + label_smoothing * logits  # -logsigmoid(-x) = x - logsigmoid(x)


def _log_complement(log_probs: Tensor) -> Tensor:
    """log(1 - p) of log p. Each of the two ways to compute it loses all digits where the other is exact."""
    log_probs = log_probs.clamp(max=_CERTAIN)
    likely = log_probs > -math.log(2)
    # Each formula gets harmless numbers where it is not used: its gradient there would be infinite, and 0 * inf is nan.
    near = torch.log(-torch.expm1(torch.where(likely, log_probs, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(likely, -1.0, log_probs)))
    return torch.where(likely, near, far)


# -- checks ------------------------------------------------------------------------------------------------


def check_label_smoothing(label_smoothing: float, variant: str) -> None:
    """Refuse a share of wrong labels that makes no sense, or a loss that has no use for it."""
    if isinstance(label_smoothing, bool) or not 0 <= label_smoothing < 0.5:
        do = "It is the share of pairs that are labelled the wrong way round."
        raise BadArgument(expected("label_smoothing from 0 to less than 0.5", label_smoothing, do))
    if label_smoothing and variant != "sigmoid":
        what = f"label_smoothing=0 with {variant!r}, which takes every label at its word"
        raise BadArgument(expected(what, label_smoothing, "Use 'sigmoid' or 'simpo'."))


def check_gamma(gamma: float) -> None:
    """Refuse a target margin that is negative or infinite."""
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma < math.inf:
        raise BadArgument(expected("gamma to be 0 or a positive number", gamma, "Half of beta is usual."))


def _check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        choices = ", ".join(map(repr, known))
        raise BadArgument(expected(f"{name} to be one of {choices}", value, did_you_mean(str(value), known)))


def _check_pairs(given: dict[str, Tensor]) -> None:
    """One number per pair in each."""
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        do = "Pass one log probability per answer, as sequence_log_probs gives them."
        raise BadArgument(expected("log probabilities of one shape (B,)", shapes, do))
