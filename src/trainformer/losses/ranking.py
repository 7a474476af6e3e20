"""Losses that rank texts: multiple negatives, and cosine similarity to a wanted score.

Owns the losses, in float32. With several processes the candidates are those of all of them, and each computes the loss
of its own rows: averaged over ranks, gradients are those of one process with the whole batch.

Henderson et al., Efficient Natural Language Response Suggestion, 2017; Reimers & Gurevych, Sentence-BERT, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.numerics import (
    Reduction,
    check_positive,
    check_reduction,
    check_rows,
    full,
    full_precision,
    reduced,
    unit_rows,
)
from trainformer.utils.distributed import RowCounts, gather_row_counts, gather_rows

Share = Callable[[Tensor], Tensor]


class Keys(NamedTuple):
    """What tells texts apart: whole numbers, equal for equal texts. Of anchors and positives (B,), negatives (B, N)."""

    anchors: Tensor
    positives: Tensor
    negatives: Tensor | None = None


def multiple_negatives_loss(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    keys: Keys | None = None,
    temperature: float = 0.05,
    symmetric: bool = False,
    reduction: Reduction = "mean",
    gather: bool = True,
) -> Tensor:
    """Each anchor (B, D) shall find its positive (B, D) among those of the batch, and among all negatives (B, N, D).

    Similarity is the cosine, divided by `temperature`. With `symmetric` each positive shall also find its anchor, and
    the two losses are averaged. With `gather` the candidates of all ranks count.

    `keys` tell equal texts: another's positive is no negative if it is the same text as one's own positive or anchor,
    or if the other's anchor is the same text as one's own.

    >>> rows = torch.eye(4)
    >>> multiple_negatives_loss(rows, rows, temperature=0.1)
    tensor(0.0001)
    """
    check_positive("temperature", temperature)
    check_reduction(reduction)
    check_rows(("anchors", anchors), ("positives", positives))
    if negatives is not None and (negatives.ndim != 3 or negatives.shape[::2] != anchors.shape):
        shape = (len(anchors), "N", anchors.shape[1])
        raise BadArgument(expected(f"negatives of shape {shape}", tuple(negatives.shape)))
    keys = keys if keys is None or negatives is not None else keys._replace(negatives=None)
    shares = gather_row_counts(anchors) if gather else RowCounts((len(anchors),), 0)
    share: Share = partial(gather_rows, counts=shares) if gather else _as_they_are
    first = shares.first
    with full_precision(anchors):
        own, theirs = unit_rows(anchors), unit_rows(positives)
        candidates = share(theirs)
        if negatives is not None:
            candidates = torch.cat([candidates, share(unit_rows(negatives)).flatten(0, 1)])
        same = None if keys is None else _same_texts(keys, share)
        losses = _one_way(own / temperature, candidates, first, same)
        if symmetric:
            back = None if keys is None else _same_pairs(keys, share)
            losses = (losses + _one_way(theirs / temperature, share(own), first, back)) / 2
        return reduced(losses, reduction)


def cosine_similarity_loss(first: Tensor, second: Tensor, scores: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """The squared difference between the cosine of two rows (B, D) and the score (B,) it shall have.

    >>> rows = torch.eye(2)
    >>> cosine_similarity_loss(rows, rows, torch.tensor([1.0, 0.5]))
    tensor(0.1250)
    """
    check_reduction(reduction)
    check_rows(("first", first), ("second", second))
    if scores.shape != first.shape[:1]:
        raise BadArgument(expected(f"scores of shape ({len(first)},)", tuple(scores.shape)))
    with full_precision(first):
        cosine = (unit_rows(first) * unit_rows(second)).sum(1)
        return reduced((cosine - full(scores)).square(), reduction)


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _one_way(rows: Tensor, candidates: Tensor, first: int, same: Tensor | None) -> Tensor:
    """Cross-entropy of the right candidate of each row, `first` on, without those that are marked as the same."""
    logits = rows @ candidates.T
    if same is not None:
        same.diagonal(first)[: len(rows)].fill_(False)  # the right one stays, of course
        logits = logits.masked_fill(same, -torch.inf)
    wanted = torch.arange(len(rows), device=rows.device) + first
    return F.cross_entropy(logits, wanted, reduction="none")


def _same_texts(keys: Keys, share: Share) -> Tensor:
    """Which candidates (positives of all ranks, then negatives) are no negatives of an anchor."""
    texts = share(keys.positives)
    pairs = keys.anchors[:, None] == share(keys.anchors)
    if keys.negatives is not None:
        texts = torch.cat([texts, share(keys.negatives).flatten()])
        pairs = F.pad(pairs, (0, len(texts) - pairs.shape[1]))
    return pairs | (keys.positives[:, None] == texts) | (keys.anchors[:, None] == texts)


def _same_pairs(keys: Keys, share: Share) -> Tensor:
    """Which anchors are no negatives of a positive."""
    anchors, positives = share(keys.anchors), share(keys.positives)
    same = (keys.positives[:, None] == positives) | (keys.positives[:, None] == anchors)
    return same | (keys.anchors[:, None] == anchors)
