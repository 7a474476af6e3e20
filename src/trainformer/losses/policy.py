"""Policy-gradient losses of language models: GRPO and its variants, from log probabilities of sampled tokens.

A loss is (sum, weight): the weight is the number of tokens, of sequences, or of tokens that sequences could have,
depending on the variant. So gradient accumulation and the number of processes do not change it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.losses.numerics import no_autocast, upcast

PolicyVariant = Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "rloo"]
POLICY_VARIANTS: tuple[str, ...] = get_args(PolicyVariant)
_BY_TOKEN = ("dapo", "bnpo", "cispo")  # divided by the number of tokens
_UNCLIPPED = ("cispo", "sapo")
_CHUNK_ELEMENTS = 1 << 24  # logits at a time: 64 MiB in float32
_SAPO_TEMPERATURES = 1.0, 1.05  # of tokens with positive and with negative advantage, as in the paper
_CISPO_MAXIMUM = 5.0


class TokenScores(NamedTuple):
    """Log probability (with gradient) and entropy (without) at each target; 0 where nothing is supervised."""

    log_probs: Tensor
    entropy: Tensor


class PolicyLoss(NamedTuple):
    """Loss sum with gradient, its weight, and (sum, weight) pairs to log."""

    sum: Tensor
    weight: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


def token_scores(
    states: Tensor,
    targets: Tensor,
    head: nn.Linear | None = None,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
) -> TokenScores:
    """Log probabilities of `targets` (B, T) and entropies of the distributions they were sampled from.

    `states` are logits (B, T, V), or hidden states (B, T, D) with the output layer `head`; state t belongs to target
    t. The logits are divided by `temperature`, computed `chunk_tokens` tokens at a time, and recomputed in the
    backward pass.

    >>> found = token_scores(torch.zeros(1, 2, 4), torch.tensor([[-100, 3]]))
    >>> found.log_probs, found.entropy
    (tensor([[ 0.0000, -1.3863]]), tensor([[0.0000, 1.3863]]))
    """
    if states.shape[:-1] != targets.shape:
        shapes = f"{tuple(states.shape)} and {tuple(targets.shape)}"
        raise BadArgument(expected("states (B, T, size) and targets (B, T)", shapes))
    flat = targets.reshape(-1)
    places = (flat != ignore_index).nonzero().squeeze(1)
    rows, labels = states.reshape(-1, states.shape[-1])[places], flat[places]
    wide = torch.promote_types(states.dtype, torch.float32)
    size = states.shape[-1] if head is None else head.out_features
    chunk = chunk_tokens or max(16, _CHUNK_ELEMENTS // size)
    found = []
    for begin in range(0, len(labels), chunk):
        part = rows[begin : begin + chunk], labels[begin : begin + chunk], head, temperature
        if torch.is_grad_enabled() and len(labels) > chunk:
            found.append(checkpoint(_scores, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(_scores(*part))
    if not found:  # nothing is supervised: zeros that still depend on the model
        zero = states.to(wide).sum() * 0
        return TokenScores(zero.expand(targets.shape), torch.zeros(targets.shape, dtype=wide, device=states.device))
    spread = [
        torch.cat(values).new_zeros(len(flat)).index_copy(0, places, torch.cat(values)).view(targets.shape)
        for values in zip(*found, strict=True)
    ]
    return TokenScores(*spread)


def _scores(rows: Tensor, labels: Tensor, head: nn.Linear | None, temperature: float) -> tuple[Tensor, Tensor]:
    logits = rows if head is None else F.linear(rows, head.weight, head.bias)
    with no_autocast(logits):
        logs = (upcast(logits) / temperature).log_softmax(-1)
        chosen = logs.gather(-1, labels[:, None]).squeeze(-1)
        with torch.no_grad():
            probabilities = logs.exp()
            # A token that top_k or a mask excluded has log probability -inf: 0 * inf is NaN.
            entropy = -torch.where(probabilities > 0, probabilities * logs, 0.0).sum(-1)
    return chosen, entropy


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    variant: PolicyVariant | str = "dapo",
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    unbiased_kl: bool = True,
    reference_log_probs: Tensor | None = None,
    correction: Tensor | None = None,
    token_mask: Tensor | None = None,
    row_mask: Tensor | None = None,
    max_length: int | None = None,
) -> PolicyLoss:
    """The loss of sampled completions: log probabilities (B, T) of their tokens and one advantage (B,) for each.

    `mask` (B, T) marks tokens of the policy. The ratio of new to old probabilities is clipped to 1 - `epsilon` and
    1 + `epsilon_high` (default: `epsilon`), and from above to `delta` where that would not. With ``level="sequence"``
    the ratio is the geometric mean over the tokens of a sequence (GSPO). `beta` weights the KL divergence from
    `reference_log_probs`; with `unbiased_kl` its terms are multiplied by the ratio, which makes its gradient that of
    the KL divergence (DeepSeek-V3.2). `correction` multiplies the loss of each token (or of each sequence), for samples
    of another distribution than that of `old_log_probs`. Only tokens in `token_mask` get a policy gradient; rows
    outside of `row_mask` count for nothing.

    Variants differ in the weight: tokens (`"dapo"`, `"bnpo"`, `"cispo"`), sequences (`"grpo"`: the mean over tokens of
    each; `"luspo"`: the sum; `"sapo"`, `"rloo"`), or `max_length` tokens per sequence (`"dr_grpo"`). `"rloo"` takes the
    ratio of whole sequences, `"cispo"` clips the weight of the gradient only (to `epsilon_high`, default 5), and
    `"sapo"` replaces the clipping by a sigmoid.

    >>> new, old = torch.tensor([[-0.5, -1.0]]), torch.tensor([[-1.0, -1.0]])
    >>> found = policy_loss(new, old, torch.tensor([1.0]), torch.ones(1, 2))
    >>> found.sum, found.weight
    (tensor(-2.2000), tensor(2.))
    """
    check_choice("variant", variant, POLICY_VARIANTS)
    check_choice("level", level, ("token", "sequence"))
    mask = mask.to(log_probs.dtype)
    if row_mask is not None:
        mask = mask * row_mask.to(mask.dtype)[:, None]
    tokens, lengths = mask.sum(), mask.sum(-1)
    advantages = advantages.to(log_probs.dtype)[:, None]
    log_ratio = (log_probs - old_log_probs) * mask
    if variant == "rloo":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    elif level == "sequence":
        log_ratio = (log_ratio.sum(-1) / lengths.clamp(min=1))[:, None]
    ratio = log_ratio.exp()
    losses, low, high = _surrogate(ratio, log_probs, advantages, variant, epsilon, epsilon_high, delta)
    if variant == "rloo":  # one value per sequence: spread evenly over its tokens, which are summed below
        losses = losses / lengths.clamp(min=1)[:, None]
    if token_mask is not None:
        losses = losses * token_mask
    if correction is not None:
        losses = losses * correction
    metrics = {}
    if beta and variant != "rloo":  # in RLOO it is a part of the reward
        assert reference_log_probs is not None
        difference = (reference_log_probs - log_probs) * mask
        kl = (difference.exp() - difference - 1) * (ratio if unbiased_kl else 1)
        losses = losses + beta * kl
        metrics["kl"] = ((kl * mask).sum().detach(), tokens)
    metrics |= _ratio_metrics(ratio.detach(), mask, None if variant in _UNCLIPPED else (low, high))
    weight = _weight(variant, tokens, mask if row_mask is None else row_mask, max_length)
    by_row = (losses * mask).sum(-1)
    if variant in ("grpo", "sapo"):
        by_row = by_row / lengths.clamp(min=1)
    return PolicyLoss(by_row.sum(), weight.to(log_probs.dtype), metrics)


def _surrogate(
    ratio: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    variant: str,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of the tokens (or sequences), and where the ratio was clipped from below and from above."""
    upper = epsilon if epsilon_high is None else epsilon_high
    low, high = (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + upper) & (advantages > 0)
    if variant == "cispo":
        largest = _CISPO_MAXIMUM if epsilon_high is None else epsilon_high
        return -ratio.clamp(max=largest).detach() * advantages * log_probs, low, high
    if variant == "sapo":
        positive, negative = (torch.full_like(advantages, t) for t in _SAPO_TEMPERATURES)
        temperature = torch.where(advantages > 0, positive, negative)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages, low, high
    clipped = ratio.clamp(1 - epsilon, 1 + upper)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, clipped * advantages), low, high


def _weight(variant: str, tokens: Tensor, rows: Tensor, max_length: int | None) -> Tensor:
    if variant in _BY_TOKEN:
        return tokens
    sequences = rows.sum() if rows.ndim == 1 else torch.full_like(tokens, len(rows))
    if variant != "dr_grpo":
        return sequences
    if max_length is None:
        raise BadArgument(expected("max_length with variant='dr_grpo'", None, "Pass the most tokens of a completion."))
    return sequences * max_length


@torch.no_grad()
def _ratio_metrics(
    ratio: Tensor, mask: Tensor, clipped: tuple[Tensor, Tensor] | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean, smallest and largest importance ratio, and the shares of clipped ones."""
    counted = mask if ratio.shape[1] == mask.shape[1] else (mask.sum(-1, keepdim=True) > 0).to(mask.dtype)
    total, one = counted.sum(), torch.ones_like(mask.sum())
    is_any = (total > 0).to(mask.dtype)
    least = torch.where(counted > 0, ratio, torch.inf).amin() if ratio.numel() else one
    most = torch.where(counted > 0, ratio, -torch.inf).amax() if ratio.numel() else one
    found = {
        "importance_ratio/mean": ((ratio * counted).sum(), total),
        "importance_ratio/min": (torch.where(total > 0, least, 0.0), is_any),
        "importance_ratio/max": (torch.where(total > 0, most, 0.0), is_any),
    }
    for name, values in zip(("low", "high"), clipped or (), strict=False):
        found[f"clip_ratio/{name}"] = ((values * counted).sum(), total)
    return found


def importance_correction(
    log_probs: Tensor, sampling_log_probs: Tensor, mask: Tensor, *, level: str = "sequence", maximum: float = 3.0
) -> Tensor:
    """Truncated importance weights of samples that another engine drew: (B, T), or (B, 1) for whole sequences.

    Where an engine gave no log probability (NaN) the weight is that of equal probabilities.

    >>> importance_correction(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.ones(1, 1))
    tensor([[3.]])
    """
    difference = torch.nan_to_num((log_probs - sampling_log_probs) * mask, nan=0.0)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    return difference.exp().clamp(max=maximum)
