"""Router losses of mixtures of experts, from statistics that add up over micro-batches and processes.

The load-balancing loss (Switch Transformer, eq. 4-6) is a product of two means over tokens: the share of tokens that an
expert receives, and the mean probability that the router gives it. It is no sum over tokens; but the shares carry no
gradient. So with the shares of a whole optimizer step, the loss of the step is a sum over its micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.numerics import upcast


class RouterStatistics(NamedTuple):
    """Sums over tokens: choices (layers, experts), probabilities (layers, experts), tokens, and z (layers).

    `probabilities` and `z` carry gradients. `z` is the squared logsumexp of the router's logits.
    """

    choices: Tensor
    probabilities: Tensor
    tokens: Tensor
    z: Tensor

    def detached(self) -> RouterStatistics:
        """The same numbers without gradients."""
        return RouterStatistics(*(value.detach() for value in self))

    def __add__(self, other: RouterStatistics) -> RouterStatistics:  # type: ignore[override]
        return RouterStatistics(*(a + b for a, b in zip(self, other, strict=True)))


def router_statistics(logits: Sequence[Tensor], top_k: int, mask: Tensor) -> RouterStatistics:
    """The statistics of a batch. `logits` are (tokens, experts) for each layer, `mask` is 1 for tokens that count.

    >>> logits = [torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 9.0]])]
    >>> router_statistics(logits, 1, torch.tensor([1, 1, 0])).choices.tolist()
    [[1.0, 1.0]]
    """
    flat = mask.reshape(-1)
    rows = []
    for layer in logits:
        if layer.ndim != 2 or len(layer) != len(flat):
            what = f"router logits of shape ({len(flat)}, experts)"
            do = "Pass router_aux_loss_coef=0 to train without a router loss."
            raise BadArgument(expected(what, tuple(layer.shape), do))
        scores = upcast(layer)
        weight = flat.to(scores)
        chosen = scores.detach().topk(top_k, dim=-1).indices
        count = torch.zeros_like(scores[0]).scatter_add_(0, chosen.flatten(), weight.repeat_interleave(top_k))
        z = (scores.logsumexp(-1).square() * weight).sum()
        rows.append((count, weight @ scores.softmax(-1), z))
    choices, probabilities, z = (torch.stack(column) for column in zip(*rows, strict=True))
    return RouterStatistics(choices, probabilities, flat.to(choices).sum(), z)


def load_balancing_loss(part: RouterStatistics, whole: RouterStatistics | None = None) -> Tensor:
    """The load-balancing loss of a batch, as transformers' `load_balancing_loss_func` computes it.

    With the statistics of the `whole` optimizer step, it is this part's share of the step's loss: the parts add up.

    >>> even = router_statistics([torch.zeros(4, 2)], 2, torch.ones(4))
    >>> load_balancing_loss(even)  # as many experts as a token chooses
    tensor(2.)
    """
    whole = part if whole is None else whole
    layers, experts = part.choices.shape
    rows = (layers * whole.tokens).clamp(min=1)
    shares = whole.choices.detach().sum(0) / rows
    return experts * (shares * part.probabilities.sum(0)).sum() / rows


def router_z_loss(part: RouterStatistics, whole: RouterStatistics | None = None) -> Tensor:
    """The mean squared logsumexp of the router's logits over tokens and layers (ST-MoE); additive like the above."""
    whole = part if whole is None else whole
    return part.z.mean() / whole.tokens.clamp(min=1)


def expert_load(statistics: RouterStatistics) -> dict[str, Tensor]:
    """How evenly tokens are spread over the experts, averaged over layers.

    `load_max` is the load of the busiest expert relative to the mean: 1 is even. `load_entropy` is the entropy of the
    loads relative to the largest possible one: 1 is even, 0 means that one expert receives everything.

    >>> counts = torch.tensor([[3.0, 1.0]])
    >>> {name: round(float(value), 3) for name, value in expert_load(RouterStatistics(counts, *[counts] * 3)).items()}
    {'load_max': 1.5, 'load_entropy': 0.811}
    """
    experts = statistics.choices.shape[1]
    shares = statistics.choices / statistics.choices.sum(1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(shares).sum(1) / math.log(max(experts, 2))
    return {"load_max": (shares.max(1).values * experts).mean(), "load_entropy": entropy.mean()}
