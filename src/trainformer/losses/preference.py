"""Preference losses: DPO and its variants, ORPO, SimPO, CPO, KTO, reward models; and the implicit rewards.

Everything but the loss of reward models works on log probabilities, one number per response, in float32;
`losses.tokens.sequence_log_probs` computes them. The loss of a pair depends on that pair alone, so sums over pairs do
not depend on the batch size.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.losses.numerics import Reduction, check_positive, no_autocast, reduce_loss, upcast

Variant = Literal[
    "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop",
]  # fmt: skip
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
CPOVariant = Literal["sigmoid", "hinge", "ipo", "simpo"]
KTOVariant = Literal["kto", "apo_zero_unpaired"]

_SMOOTHED = ("sigmoid", "robust", "exo_pair")  # variants with label smoothing
_OF_MARGIN = ("sigmoid", "ipo", "hinge", "robust", "exo_pair", "discopop")  # those of a single difference
_LARGEST = 80.0  # exp() overflows beyond 88 in float32

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
    discopop_tau: float = 0.05,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.5,
    reduction: Reduction = "mean",
) -> Tensor:
    """Direct preference optimisation: increase the margin of chosen over rejected responses relative to a reference.

    The first four are log probabilities (B,) of responses, summed over their tokens. `variant` is `"sigmoid"` (the
    original; `label_smoothing` is the assumed share of flipped labels), `"hinge"` (as in SLiC), or `"ipo"`, which
    regresses the margin to 1 / (2 beta). IPO takes means over the tokens of a response, not sums: with sums, long and
    short responses would share one target.

    `"robust"` and `"exo_pair"` use `label_smoothing` too, `"discopop"` has a temperature `discopop_tau`. `"nca_pair"`,
    `"bco_pair"`, `"sppo_hard"`, `"apo_zero"` and `"apo_down"` move each response by itself relative to the reference.

    `f_divergence` is the divergence from the reference; with `"alpha_divergence"` of order `f_alpha`. It applies to
    `"sigmoid"`, `"hinge"`, `"robust"`, `"exo_pair"` and `"discopop"`.

    >>> policy = torch.tensor([-10.0, -12.0]), torch.tensor([-10.0, -10.0])
    >>> dpo_loss(*policy, torch.tensor([-10.0, -10.0]), torch.tensor([-10.0, -10.0]), reduction="none")
    tensor([0.6931, 0.7981])
    """
    check_choice("variant", variant, get_args(Variant))
    check_positive("beta", beta, "0.1 is usual.")
    check_positive("discopop_tau", discopop_tau, "0.05 is usual.")
    check_label_smoothing(label_smoothing, variant)
    check_divergence(f_divergence, variant)
    given = {"policy_chosen": policy_chosen, "policy_rejected": policy_rejected}
    _check_pairs({**given, "reference_chosen": reference_chosen, "reference_rejected": reference_rejected})
    with no_autocast(policy_chosen):
        chosen = upcast(policy_chosen) - upcast(reference_chosen)
        rejected = upcast(policy_rejected) - upcast(reference_rejected)
        if variant not in _OF_MARGIN:
            return reduce_loss(_loss_of_both(variant, beta, chosen, rejected), reduction)
        margin = _scores(chosen, f_divergence, f_alpha) - _scores(rejected, f_divergence, f_alpha)
        if variant == "ipo":
            losses = (margin - 1 / (2 * beta)).square()
        elif variant == "hinge":
            losses = F.relu(1 - beta * margin)
        elif variant == "robust":
            flipped = label_smoothing * (F.logsigmoid(-beta * margin) + F.logsigmoid(beta * margin))
            losses = (flipped - F.logsigmoid(beta * margin)) / (1 - 2 * label_smoothing)
        elif variant == "exo_pair":
            losses = _reverse_cross_entropy(beta * margin, label_smoothing)
        elif variant == "discopop":
            share = torch.sigmoid(beta * margin / discopop_tau)
            exponential = torch.exp((-beta * margin).clamp(max=_LARGEST))
            losses = share * exponential - (1 - share) * F.logsigmoid(beta * margin)
        else:
            losses = _smoothed(beta * margin, label_smoothing)
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


def cpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    beta: float = 0.1,
    *,
    variant: CPOVariant = "sigmoid",
    gamma: float = 0.5,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Contrastive preference optimisation: DPO with a uniform reference. The supervised loss is not included.

    Both are log probabilities (B,) of responses: sums over tokens for `"sigmoid"` and `"hinge"`, means for `"ipo"` and
    `"simpo"`, which has the target margin `gamma`. With `alpha` they are replaced by (1 - p^-alpha) / alpha (AlphaPO).

    >>> cpo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]))
    tensor(0.6931)
    """
    check_choice("variant", variant, get_args(CPOVariant))
    check_positive("beta", beta, "0.1 is usual.")
    check_gamma(gamma)
    check_label_smoothing(label_smoothing, "sigmoid" if variant == "simpo" else variant)
    _check_pairs({"policy_chosen": policy_chosen, "policy_rejected": policy_rejected})
    with no_autocast(policy_chosen):
        margin = alpha_rewards(policy_chosen, alpha) - alpha_rewards(policy_rejected, alpha)
        if variant == "hinge":
            losses = F.relu(1 - beta * margin)
        elif variant == "ipo":
            losses = (margin - 1 / (2 * beta)).square()
        else:
            losses = _smoothed(beta * margin - (gamma if variant == "simpo" else 0.0), label_smoothing)
        return reduce_loss(losses, reduction)


def alpha_rewards(log_probs: Tensor, alpha: float) -> Tensor:
    """The reward of AlphaPO, (1 - p^-alpha) / alpha; for alpha = 0 the log probability itself.

    >>> alpha_rewards(torch.tensor([-1.0]), 0.0), alpha_rewards(torch.tensor([-1.0]), 0.5)
    (tensor([-1.]), tensor([-1.2974]))
    """
    values = upcast(log_probs)
    return values if alpha == 0 else -torch.expm1((-alpha * values).clamp(max=_LARGEST)) / alpha


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    variant: KTOVariant = "kto",
    reduction: Reduction = "mean",
) -> Tensor:
    """Kahneman-Tversky optimisation of single responses that are desirable or not.

    `policy` and `reference` are log probabilities (B,), summed over the tokens of a response. `kl` is the estimated
    divergence of the policy from the reference, without a gradient. `"apo_zero_unpaired"` does not use it.

    >>> policy, reference = torch.tensor([-9.0, -9.0]), torch.tensor([-10.0, -10.0])
    >>> kto_loss(policy, reference, torch.tensor([True, False]), reduction="none")
    tensor([0.4750, 0.5250])
    """
    check_choice("variant", variant, get_args(KTOVariant))
    check_positive("beta", beta, "0.1 is usual.")
    check_weight("desirable_weight", desirable_weight)
    check_weight("undesirable_weight", undesirable_weight)
    _check_pairs({"policy": policy, "reference": reference, "desirable": desirable})
    with no_autocast(policy):
        value = upcast(policy) - upcast(reference)
        value = beta * (value - kl if variant == "kto" else value)
        wanted = desirable.bool()
        losses = torch.sigmoid(torch.where(wanted, -value, value))  # 1 - sigmoid(x) = sigmoid(-x)
        return reduce_loss(torch.where(wanted, desirable_weight, undesirable_weight) * losses, reduction)


def reward_model_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    *,
    center: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """The loss of a reward model (Bradley-Terry): the chosen response should score higher, by at least `margin`.

    All are (B,). `center` weighs the squared sum of both rewards, which keeps them around zero.

    >>> reward_model_loss(torch.tensor([1.0]), torch.tensor([1.0])), reward_model_loss(*torch.tensor([[1.0], [0.0]]))
    (tensor(0.6931), tensor(0.3133))
    """
    check_weight("center", center)
    given = {"chosen": chosen, "rejected": rejected}
    _check_pairs(given if margin is None else {**given, "margin": margin})
    with no_autocast(chosen):
        chosen, rejected = upcast(chosen), upcast(rejected)
        gap = chosen - rejected if margin is None else chosen - rejected - margin.to(chosen.dtype)
        losses = -F.logsigmoid(gap)
        if center:
            losses = losses + center * (chosen + rejected).square()
        return reduce_loss(losses, reduction)


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


def _loss_of_both(variant: str, beta: float, chosen: Tensor, rejected: Tensor) -> Tensor:
    """The variants that move each response by itself, given log ratios to the reference."""
    up, down = beta * chosen, beta * rejected
    if variant == "nca_pair":
        return -F.logsigmoid(up) - 0.5 * F.logsigmoid(-up) - 0.5 * F.logsigmoid(-down)
    if variant == "bco_pair":
        return -F.logsigmoid(up) - F.logsigmoid(-down)
    if variant == "sppo_hard":
        return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
    if variant == "apo_zero":
        return torch.sigmoid(-up) + torch.sigmoid(down)
    return torch.sigmoid(up) + torch.sigmoid(down - up)  # apo_down


def _reverse_cross_entropy(logits: Tensor, label_smoothing: float) -> Tensor:
    """KL divergence of the model's preference from the smoothed label (EXO)."""
    wins = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-label_smoothing))
    return wins + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(label_smoothing))


def _scores(log_ratio: Tensor, f_divergence: str, alpha: float) -> Tensor:
    """f'(t) for t = exp(log_ratio), where f defines the divergence; constants cancel in margins."""
    if f_divergence == "forward_kl":
        return -torch.exp((-log_ratio).clamp(max=_LARGEST))
    if f_divergence == "js_divergence":
        return F.logsigmoid(log_ratio)
    if f_divergence == "alpha_divergence" and abs(alpha - 1) > 1e-6:
        return torch.expm1(((alpha - 1) * log_ratio).clamp(max=_LARGEST)) / (alpha - 1)
    return log_ratio


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
    if label_smoothing and variant not in _SMOOTHED:
        what = f"label_smoothing=0 with {variant!r}, which has no label smoothing"
        raise BadArgument(expected(what, label_smoothing, "Use 'sigmoid' or 'simpo'."))
    if variant == "exo_pair" and not label_smoothing:
        raise BadArgument(expected("label_smoothing above 0 with 'exo_pair'", label_smoothing, "1e-3 is usual."))


def check_divergence(f_divergence: str, variant: str) -> None:
    """Reject an unknown divergence, or one with a loss that is not defined for it."""
    check_choice("f_divergence", f_divergence, get_args(Divergence))
    if f_divergence != "reverse_kl" and (variant not in _OF_MARGIN or variant == "ipo"):
        do = "Use 'sigmoid', 'hinge', 'robust', 'exo_pair' or 'discopop'."
        raise BadArgument(expected(f"f_divergence='reverse_kl' with {variant!r}", f_divergence, do))


def check_weight(name: str, value: object) -> None:
    """Reject a weight that is negative or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadArgument(expected(f"{name} to be 0 or a positive number", value))


def check_gamma(gamma: float) -> None:
    """Reject a target margin that is negative or infinite."""
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma < math.inf:
        raise BadArgument(expected("gamma to be 0 or a positive number", gamma, "Half of beta is usual."))


def _check_pairs(given: dict[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        do = "Pass one log probability per response, as sequence_log_probs returns them."
        raise BadArgument(expected("log probabilities of one shape (B,)", shapes, do))
