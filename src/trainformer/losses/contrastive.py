"""Contrastive losses: NT-Xent (SimCLR), InfoNCE (MoCo v2 and v3), multiple negatives ranking, cosine regression.

All are computed in float32 with one matrix product per direction. With several processes the negatives come from all
ranks, and each rank computes the loss of its own rows: averaged over ranks, the gradients equal those of one process
with the whole batch, also when ranks hold different numbers of rows.

Chen et al., SimCLR, 2020; Chen et al., MoCo v2, 2020; Chen et al., MoCo v3, 2021; Henderson et al., Efficient Natural
Language Response Suggestion, 2017; Reimers & Gurevych, Sentence-BERT, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.numerics import (
    Reduction,
    check_positive,
    check_rows,
    l2_normalize,
    no_autocast,
    reduce_loss,
    upcast,
)
from trainformer.utils.distributed import RowCounts, gather_row_counts, gather_rows


def nt_xent_loss(
    z1: Tensor, z2: Tensor, temperature: float = 0.1, *, reduction: Reduction = "mean", gather: bool = True
) -> Tensor:
    """NT-Xent of two views (B, D): the positive of a row is the other view of its image, all others are negatives.

    `reduction="none"` returns one value per image, the mean of its two rows. With `gather` the rows of all ranks are
    negatives. A single image has no negatives: its loss is 0.

    >>> z = torch.eye(4)
    >>> nt_xent_loss(z, z, temperature=0.1)
    tensor(0.0003)
    """
    check_positive("temperature", temperature)
    check_rows(("z1", z1), ("z2", z2))
    batch = len(z1)
    with no_autocast(z1):
        rows = l2_normalize(torch.cat([z1, z2]))
        counts = gather_row_counts(rows) if gather else RowCounts((len(rows),), 0)
        candidates = gather_rows(rows, counts) if gather else rows
        # Scaling the rows costs B x D, scaling the logits would cost B x N.
        logits = (rows / temperature) @ candidates.T
        logits.diagonal(counts.first).fill_(-torch.inf)  # a row is not its own negative
        positive = torch.arange(2 * batch, device=rows.device).roll(batch) + counts.first
        losses = F.cross_entropy(logits, positive, reduction="none")
        return reduce_loss(losses.view(2, batch).mean(0), reduction)


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
        return f"temperature={self.temperature:g}, gather={self.gather}"


def infonce_with_queue(
    queries: Tensor, keys: Tensor, queue: Tensor, temperature: float = 0.2, *, reduction: Reduction = "mean"
) -> Tensor:
    """MoCo v2: the positive of each query (B, D) is its key (B, D), the negatives are the keys in a queue (K, D).

    Queries and keys are normalised here; the queue holds normalised keys already. Neither keys nor queue get a
    gradient. The queue may change in place before the backward pass: autograd keeps a copy (32 MiB for 65536 keys of
    width 128).

    >>> q = torch.eye(4)
    >>> infonce_with_queue(q, q, -q)
    tensor(0.0201)
    """
    check_positive("temperature", temperature)
    check_rows(("queries", queries), ("keys", keys))
    if queue.ndim != 2 or queue.shape[1] != queries.shape[1]:
        do = "The queue holds one key per row."
        raise BadArgument(expected(f"a queue of shape (K, {queries.shape[1]})", tuple(queue.shape), do))
    with no_autocast(queries):
        query = l2_normalize(queries) / temperature
        positive = (query * l2_normalize(keys.detach())).sum(1)
        negative = query @ queue.detach().to(query.dtype, copy=True).T
        # Cross-entropy of [positive, negatives], without copying B x K logits to prepend one column.
        return reduce_loss(F.softplus(negative.logsumexp(1) - positive), reduction)


def moco_v3_loss(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, temperature: float = 0.2, *, reduction: Reduction = "mean"
) -> Tensor:
    """MoCo v3: queries (B, D) of one view against keys (B, D) of the other, both ways, times 2 x temperature.

    The keys of all ranks are negatives and get no gradient. The two directions are added, as in the paper.

    >>> q = torch.eye(4)
    >>> moco_v3_loss(q, q, q, q)
    tensor(0.0160)
    """
    check_positive("temperature", temperature)
    for name, rows in (("q2", q2), ("k1", k1), ("k2", k2)):
        check_rows(("q1", q1), (name, rows))
    with no_autocast(q1):
        counts = gather_row_counts(q1)
        keys = torch.cat([l2_normalize(k1.detach()), l2_normalize(k2.detach())], dim=1)
        first, second = gather_rows(keys, counts).chunk(2, dim=1)
        forward = info_nce(l2_normalize(q1) / temperature, second, counts.first)
        backward = info_nce(l2_normalize(q2) / temperature, first, counts.first)
        return reduce_loss(2 * temperature * (forward + backward), reduction)


# -- text pairs --------------------------------------------------------------------------------------------


class TextKeys(NamedTuple):
    """Integers that are equal for equal texts: of anchors and positives (B,), of negatives (B, N)."""

    anchors: Tensor
    positives: Tensor
    negatives: Tensor | None = None


_Gather = Callable[[Tensor], Tensor]


def multiple_negatives_loss(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    keys: TextKeys | None = None,
    temperature: float = 0.05,
    symmetric: bool = False,
    reduction: Reduction = "mean",
    gather: bool = True,
) -> Tensor:
    """Multiple negatives ranking: each anchor (B, D) against all positives (B, D) of the batch and negatives (B, N, D).

    Similarity is the cosine divided by `temperature`. With `symmetric` the loss is averaged with that of each positive
    against all anchors. With `gather` the candidates of all ranks count.

    `keys` identify equal texts, so that they are not used as negatives of each other: another row's positive is masked
    if it equals this row's positive or anchor, or if the two anchors are equal.

    >>> rows = torch.eye(4)
    >>> multiple_negatives_loss(rows, rows, temperature=0.1)
    tensor(0.0001)
    """
    check_positive("temperature", temperature)
    check_rows(("anchors", anchors), ("positives", positives))
    if negatives is not None and (negatives.ndim != 3 or negatives.shape[::2] != anchors.shape):
        shape = (len(anchors), "N", anchors.shape[1])
        raise BadArgument(expected(f"negatives of shape {shape}", tuple(negatives.shape)))
    keys = keys if keys is None or negatives is not None else keys._replace(negatives=None)
    counts = gather_row_counts(anchors) if gather else RowCounts((len(anchors),), 0)
    gathered: _Gather = partial(gather_rows, counts=counts) if gather else lambda rows: rows
    first = counts.first
    with no_autocast(anchors):
        own, theirs = l2_normalize(anchors), l2_normalize(positives)
        candidates = gathered(theirs)
        if negatives is not None:
            candidates = torch.cat([candidates, gathered(l2_normalize(negatives)).flatten(0, 1)])
        duplicates = None if keys is None else _duplicate_candidates(keys, gathered)
        losses = info_nce(own / temperature, candidates, first, duplicates)
        if symmetric:
            duplicates = None if keys is None else _duplicate_anchors(keys, gathered)
            losses = (losses + info_nce(theirs / temperature, gathered(own), first, duplicates)) / 2
        return reduce_loss(losses, reduction)


def cosine_similarity_loss(first: Tensor, second: Tensor, scores: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Squared error between the cosines of two matrices' rows (B, D) and the target scores (B,).

    >>> rows = torch.eye(2)
    >>> cosine_similarity_loss(rows, rows, torch.tensor([1.0, 0.5]))
    tensor(0.1250)
    """
    check_rows(("first", first), ("second", second))
    if scores.shape != first.shape[:1]:
        raise BadArgument(expected(f"scores of shape ({len(first)},)", tuple(scores.shape)))
    with no_autocast(first):
        cosine = (l2_normalize(first) * l2_normalize(second)).sum(1)
        return reduce_loss((cosine - upcast(scores)).square(), reduction)


def info_nce(rows: Tensor, candidates: Tensor, first: int, masked: Tensor | None = None) -> Tensor:
    """Cross-entropy per row. The positive of row i is candidate `first` + i; masked candidates are left out."""
    logits = rows @ candidates.T
    positive = torch.arange(len(rows), device=rows.device) + first
    if masked is not None:  # never mask the positive
        logits = logits.masked_fill(masked.scatter(1, positive.unsqueeze(1), False), -torch.inf)
    return F.cross_entropy(logits, positive, reduction="none")


def _duplicate_candidates(keys: TextKeys, gathered: _Gather) -> Tensor:
    """Which candidates (positives of all ranks, then negatives) must not be negatives of an anchor."""
    texts = gathered(keys.positives)
    pairs = keys.anchors[:, None] == gathered(keys.anchors)
    if keys.negatives is not None:
        texts = torch.cat([texts, gathered(keys.negatives).flatten()])
        pairs = F.pad(pairs, (0, len(texts) - pairs.shape[1]))
    return pairs | (keys.positives[:, None] == texts) | (keys.anchors[:, None] == texts)


def _duplicate_anchors(keys: TextKeys, gathered: _Gather) -> Tensor:
    """Which anchors must not be negatives of a positive."""
    anchors, positives = gathered(keys.anchors), gathered(keys.positives)
    same = (keys.positives[:, None] == positives) | (keys.positives[:, None] == anchors)
    return same | (keys.anchors[:, None] == anchors)
