"""Preference losses: DPO and its variants, ORPO, SimPO; and the implicit rewards.

Everything works on log probabilities, one number per response, in float32; `losses.tokens.sequence_log_probs` computes
them. The loss of a pair depends on that pair alone, so sums over pairs do not depend on the batch size.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.losses.numerics import Reduction, check_positive, no_autocast, reduce_loss, upcast

Variant = Literal["sigmoid", "ipo", "hinge"]

# Above this mean log probability the odds p / (1 - p) have no finite gradient.
_CERTAIN = -1e-6


class PreferenceRewards(NamedTuple):
    """Implicit rewards of the policy per pair, without a gradient."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """Reward of the chosen minus that of the rejected response."""
        return self.chosen - self.rejected

    @property
    def correct(self) -> Tensor:
        """Whether the chosen response has the higher reward, per pair; a tie is not correct."""
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
    """Direct preference optimisation: increase the margin of chosen over rejected responses relative to a reference.

    The first four are log probabilities (B,) of responses, summed over their tokens. `variant` is `"sigmoid"` (the
    original; `label_smoothing` is the assumed share of flipped labels), `"hinge"` (as in SLiC), or `"ipo"`, which
    regresses the margin to 1 / (2 beta). IPO takes means over the tokens of a response, not sums: with sums, long and
    short responses would share one target.

    >>> policy = torch.tensor([-10.0, -12.0]), torch.tensor([-10.0, -10.0])
    >>> dpo_loss(*policy, torch.tensor([-10.0, -10.0]), torch.tensor([-10.0, -10.0]), reduction="none")
    tensor([0.6931, 0.7981])
    """
    check_choice("variant", variant, get_args(Variant))
    check_positive("beta", beta, "0.1 is usual.")
    check_label_smoothing(label_smoothing, variant)
    given = {"policy_chosen": policy_chosen, "policy_rejected": policy_rejected}
    _check_pairs({**given, "reference_chosen": reference_chosen, "reference_rejected": reference_rejected})
    with no_autocast(policy_chosen):
        chosen = upcast(policy_chosen) - upcast(reference_chosen)
        margin = chosen - (upcast(policy_rejected) - upcast(reference_rejected))
        if variant == "sigmoid":
            losses = _smoothed(beta * margin, label_smoothing)
        elif variant == "hinge":
            losses = F.relu(1 - beta * margin)
        else:
            losses = (margin - 1 / (2 * beta)).square()
        return reduce_loss(losses, reduction)


def orpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    beta: float = 0.1,
    *,
    nll: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Odds ratio preference optimisation: NLL of the chosen response plus `beta` times the log odds ratio loss.

    There is no reference model. Both are mean log probabilities (B,) per token of a response. `nll` (B,) is the
    supervised loss of the chosen response, by default its negative mean log probability as in the paper. (TRL includes
    the prompt's tokens, and averages over all tokens of a batch.)

    >>> orpo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]))
    tensor(1.0693)
    """
    check_positive("beta", beta, "0.1 is usual.")
    given = {"policy_chosen": policy_chosen, "policy_rejected": policy_rejected}
    _check_pairs(given if nll is None else {**given, "nll": nll})
    with no_autocast(policy_chosen):
        chosen, rejected = upcast(policy_chosen), upcast(policy_rejected)
        log_odds = (chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected))
        supervised = -chosen if nll is None else upcast(nll)
        return reduce_loss(supervised - beta * F.logsigmoid(log_odds), reduction)


def simpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
    *,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Simple preference optimisation: `beta` times the margin of mean log probabilities should exceed `gamma`.

    There is no reference model. Both are mean log probabilities (B,) per token: sums would favour short responses.

    >>> simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor(0.6931)
    """
    check_positive("beta", beta, "2.0 is usual.")
    check_gamma(gamma)
    check_label_smoothing(label_smoothing, "sigmoid")
    _check_pairs({"policy_chosen": policy_chosen, "policy_rejected": policy_rejected})
    with no_autocast(policy_chosen):
        margin = upcast(policy_chosen) - upcast(policy_rejected)
        return reduce_loss(_smoothed(beta * margin - gamma, label_smoothing), reduction)


def preference_rewards(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    beta: float = 0.1,
) -> PreferenceRewards:
    """`beta` times the policy's log probabilities, minus the reference's if there is a reference.

    >>> zeros = torch.zeros(2)
    >>> rewards = preference_rewards(torch.tensor([1.0, -1.0]), zeros, zeros, zeros)
    >>> rewards.margin, rewards.correct
    (tensor([ 0.1000, -0.1000]), tensor([ True, False]))
    """
    if (reference_chosen is None) != (reference_rejected is None):
        raise BadArgument(expected("reference_chosen and reference_rejected, or neither", "one of them"))
    rewards = []
    for policy, reference in ((policy_chosen, reference_chosen), (policy_rejected, reference_rejected)):
        value = upcast(policy.detach())
        rewards.append(beta * (value if reference is None else value - upcast(reference.detach())))
    return PreferenceRewards(*rewards)


# -- arithmetic --------------------------------------------------------------------------------------------


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Binary cross-entropy of "chosen is better", with a share of flipped labels."""
    losses = -F.logsigmoid(logits)
    return losses if not label_smoothing else losses + label_smoothing * logits  # -logsigmoid(-x) = x - logsigmoid(x)


def _log_complement(log_probs: Tensor) -> Tensor:
    """log(1 - p) from log p. Each of the two formulas loses all digits where the other is exact."""
    log_probs = log_probs.clamp(max=_CERTAIN)
    likely = log_probs > -math.log(2)
    # Each formula gets harmless inputs where it is not used: its gradient there would be infinite, and 0 * inf is NaN.
    near = torch.log(-torch.expm1(torch.where(likely, log_probs, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(likely, -1.0, log_probs)))
    return torch.where(likely, near, far)


# -- checks ------------------------------------------------------------------------------------------------


def check_label_smoothing(label_smoothing: float, variant: str) -> None:
    """Reject label smoothing out of range, or with a loss that does not support it."""
    if isinstance(label_smoothing, bool) or not 0 <= label_smoothing < 0.5:
        do = "It is the share of pairs whose labels are flipped."
        raise BadArgument(expected("label_smoothing from 0 to less than 0.5", label_smoothing, do))
    if label_smoothing and variant != "sigmoid":
        what = f"label_smoothing=0 with {variant!r}, which has no label smoothing"
        raise BadArgument(expected(what, label_smoothing, "Use 'sigmoid' or 'simpo'."))


def check_gamma(gamma: float) -> None:
    """Reject a target margin that is negative or infinite."""
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma < math.inf:
        raise BadArgument(expected("gamma to be 0 or a positive number", gamma, "Half of beta is usual."))


def _check_pairs(given: dict[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        do = "Pass one log probability per response, as sequence_log_probs returns them."
        raise BadArgument(expected("log probabilities of one shape (B,)", shapes, do))
