"""Advantages of completions: how much better each is than the others of its prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainformer.core.errors import check_choice
from trainformer.utils.distributed import all_reduce_sum, is_padding

SCALES = ("group", "batch", "none")
_EPSILON = 1e-4


class Advantages(NamedTuple):
    """One advantage per completion, in the order of the completions, and which groups have rewards of no variance."""

    values: Tensor
    has_no_variance: Tensor


def group_advantages(
    rewards: Tensor, generations: int, *, scale: str = "group", leave_one_out: bool = False
) -> Advantages:
    """Advantages (B * G,) of completions from their rewards; those of one prompt are next to each other.

    From each reward the mean of its group is subtracted, or with `leave_one_out` the mean of the others of its group
    (RLOO). The difference is divided by the standard deviation of the `"group"`, or of the rewards of the whole
    `"batch"`, over all processes, or not at all. A completion without a reward (NaN) has the advantage 0 and does not
    count in the means.

    >>> found = group_advantages(torch.tensor([1.0, 0.0, 2.0, 2.0]), 2, scale="none")
    >>> found.values, found.has_no_variance
    (tensor([ 0.5000, -0.5000,  0.0000,  0.0000], dtype=torch.float64), tensor([False,  True]))
    """
    check_choice("scale_rewards", scale, SCALES)
    groups = rewards.double().unflatten(0, (-1, generations))
    scored = ~groups.isnan()
    counts = scored.sum(1, keepdim=True)
    known = torch.where(scored, groups, 0.0)
    means = known.sum(1, keepdim=True) / counts
    deviations = torch.where(scored, groups - means, 0.0)
    spread = (deviations.square().sum(1, keepdim=True) / (counts - 1)).sqrt()  # NaN for a group of one
    values = deviations
    if leave_one_out:
        values = groups - (known.sum(1, keepdim=True) - known) / (counts - 1)
    if scale == "group":
        values = values / (spread + _EPSILON)
    elif scale == "batch":
        values = values / (_batch_spread(values if leave_one_out else groups) + _EPSILON)
    values = torch.nan_to_num(torch.where(scored, values, 0.0), nan=0.0)
    has_none = torch.isclose(torch.nan_to_num(spread[:, 0]), spread.new_zeros(1), atol=1e-8)
    return Advantages(values.flatten(), has_none)


def _batch_spread(values: Tensor) -> Tensor:
    """The standard deviation of all values but NaN, over all processes."""
    scored = ~values.isnan() & (not is_padding())
    known = torch.where(scored, values, 0.0)
    count, total = all_reduce_sum(torch.stack([scored.sum().double(), known.sum()]))
    squares = all_reduce_sum(torch.where(scored, values - total / count, 0.0).square().sum())
    return torch.nan_to_num((squares / (count - 1)).sqrt())
