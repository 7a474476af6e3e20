"""Contrastive losses: NT-Xent (SimCLR), InfoNCE against a queue (MoCo v2), and against the batch (MoCo v3).

Owns the losses, in float32 and as one matrix product each. With several processes the negatives are those of all of
them, and each computes the loss of its own rows: averaged over ranks, gradients are those of one process with the
whole batch, also where ranks have different numbers of rows. Filling a queue and computing keys is the task's business.

Chen et al., SimCLR, 2020; Chen et al., MoCo v2, 2020; Chen et al., MoCo v3, 2021.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.numerics import (
    Reduction,
    check_positive,
    check_reduction,
    check_rows,
    full_precision,
    reduced,
    unit_rows,
)
from trainformer.utils.distributed import RowCounts, gather_row_counts, gather_rows


def nt_xent_loss(
    z1: Tensor, z2: Tensor, temperature: float = 0.1, *, reduction: Reduction = "mean", gather: bool = True
) -> Tensor:
    """NT-Xent of two views (B, D): each row shall find the other view of its image among all other rows.

    `reduction="none"` gives one value per image, the mean of its two rows. With `gather` the rows of all ranks are
    negatives. A single image has nothing to be told from: its loss is 0.

    >>> z = torch.eye(4)
    >>> nt_xent_loss(z, z, temperature=0.1)
    tensor(0.0003)
    """
    check_positive("temperature", temperature)
    check_reduction(reduction)
    check_rows(("z1", z1), ("z2", z2))
    batch = len(z1)
    with full_precision(z1):
        rows = unit_rows(torch.cat([z1, z2]))
        shares = gather_row_counts(rows) if gather else RowCounts((len(rows),), 0)
        every = gather_rows(rows, shares) if gather else rows
        own = shares.first
        # Dividing the rows costs B x D, dividing the logits would cost B x N.
        logits = (rows / temperature) @ every.T
        logits.diagonal(own).fill_(-torch.inf)  # a row is no negative of itself
        positive = torch.arange(2 * batch, device=rows.device).roll(batch) + own
        losses = F.cross_entropy(logits, positive, reduction="none")
        return reduced(losses.view(2, batch).mean(0), reduction)


class NTXentLoss(nn.Module):
    """`nt_xent_loss` as a module.

    >>> NTXentLoss(temperature=0.5)(torch.randn(4, 8), torch.randn(4, 8)).shape
    torch.Size([])
    """

    def __init__(self, temperature: float = 0.1, *, gather: bool = True) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        self.temperature = temperature
        self.gather = gather

    def forward(self, z1: Tensor, z2: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of two views (B, D)."""
        return nt_xent_loss(z1, z2, self.temperature, reduction=reduction, gather=self.gather)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"temperature={self.temperature:g}, gather={self.gather}"


def infonce_with_queue(
    queries: Tensor, keys: Tensor, queue: Tensor, temperature: float = 0.2, *, reduction: Reduction = "mean"
) -> Tensor:
    """MoCo v2: each query (B, D) shall find its own key (B, D) among the keys of a queue (K, D).

    The rows of the queue have length one already, as keys are when they enter it; queries and keys are normalised here.
    Neither keys nor queue get a gradient, and the queue may be changed in place before the backward pass: what
    autograd keeps is a copy (32 MiB for 65536 keys of 128).

    >>> q = torch.eye(4)
    >>> infonce_with_queue(q, q, -q)
    tensor(0.0201)
    """
    check_positive("temperature", temperature)
    check_reduction(reduction)
    check_rows(("queries", queries), ("keys", keys))
    if queue.ndim != 2 or queue.shape[1] != queries.shape[1]:
        do = "The queue holds one key per row."
        raise BadArgument(expected(f"a queue of shape (K, {queries.shape[1]})", tuple(queue.shape), do))
    with full_precision(queries):
        query = unit_rows(queries) / temperature
        positive = (query * unit_rows(keys.detach())).sum(1)
        negative = query @ queue.detach().to(query.dtype, copy=True).T
        # Cross-entropy of [positive, negatives], without copying B x K logits to put one column before them.
        return reduced(F.softplus(negative.logsumexp(1) - positive), reduction)


def moco_v3_loss(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, temperature: float = 0.2, *, reduction: Reduction = "mean"
) -> Tensor:
    """MoCo v3: queries (B, D) of one view against keys (B, D) of the other, both ways, times 2 x temperature.

    The keys of all ranks are negatives, and get no gradient. The two directions are added, as in the paper.

    >>> q = torch.eye(4)
    >>> moco_v3_loss(q, q, q, q)
    tensor(0.0160)
    """
    check_positive("temperature", temperature)
    check_reduction(reduction)
    for name, rows in (("q2", q2), ("k1", k1), ("k2", k2)):
        check_rows(("q1", q1), (name, rows))
    with full_precision(q1):
        shares = gather_row_counts(q1)
        keys = torch.cat([unit_rows(k1.detach()), unit_rows(k2.detach())], dim=1)
        first, second = gather_rows(keys, shares).chunk(2, dim=1)
        own = torch.arange(len(q1), device=q1.device) + shares.first

        def one_way(queries: Tensor, candidates: Tensor) -> Tensor:
            logits = (unit_rows(queries) / temperature) @ candidates.T
            return F.cross_entropy(logits, own, reduction="none")

        return reduced(2 * temperature * (one_way(q1, second) + one_way(q2, first)), reduction)
