"""How well queries find what belongs to them in a gallery, where a query may have several right answers.

Owns the ranks and what they are worth. Similarity is the cosine. Of equally similar rows the wrong ones come first, so
that embeddings that all lie in one point are worth nothing. Where rows of one class are to find each other, see
`retrieval`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, expected

_CELLS = 2**24  # similarities in memory at once: 64 MiB
_DEPTH = 10  # of nDCG


def ranking_metrics(
    queries: Tensor, gallery: Tensor, pairs: Tensor, *, recall_at: Sequence[int] = (1, 5, 10), temperature: float = 0.05
) -> dict[str, float]:
    """Queries (Q, D) search in a gallery (G, D); `pairs` (P, 2) say which row of it is right for which query.

    - ``recall@k``: share of queries with a right row among the `k` nearest;
    - ``mrr``: mean of 1 / rank of the first right row;
    - ``ndcg@10``: gain of the right rows among the first ten, against the best possible;
    - ``loss``: mean over pairs of the cross-entropy of the right row against all wrong ones.

    Queries without a pair are left out.

    >>> rows = torch.eye(3)
    >>> found = ranking_metrics(rows, rows, torch.tensor([[0, 0], [1, 1], [2, 0]]), recall_at=(1,))
    >>> {name: round(value, 3) for name, value in found.items() if name != "loss"}
    {'recall@1': 0.667, 'mrr': 0.778, 'ndcg@10': 0.833}
    """
    if pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
        raise BadArgument(expected("pairs of shape (P, 2), at least one", tuple(pairs.shape)))
    pairs = pairs.unique(dim=0)
    asked, counts = pairs[:, 0].unique(return_counts=True)
    starts = counts.cumsum(0) - counts
    queries, gallery = (F.normalize(rows.float(), dim=-1) for rows in (queries, gallery))
    totals = torch.zeros(len(recall_at) + 2, dtype=torch.float64)
    loss = 0.0
    for part in torch.arange(len(asked)).split(max(1, _CELLS // len(gallery))):
        similar = queries[asked[part]] @ gallery.T
        right = _right_rows(pairs, starts[part], counts[part])
        found, losses = _ranks(similar, right, temperature)
        totals += _worth(found, counts[part], recall_at)
        loss += losses
    names = [*(f"recall@{k}" for k in recall_at), "mrr", f"ndcg@{_DEPTH}"]
    values = dict(zip(names, (totals / len(asked)).tolist(), strict=True))
    return values | {"loss": loss / len(pairs)}


def _right_rows(pairs: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """The right rows of each query (queries, most), filled up with -1."""
    place = torch.arange(int(counts.max()))
    rows = pairs[(starts[:, None] + place).clamp(max=len(pairs) - 1), 1]
    return torch.where(place < counts[:, None], rows, -1)


def _ranks(similar: Tensor, right: Tensor, temperature: float) -> tuple[Tensor, float]:
    """Ranks of the right rows, best first (infinite where there is none), and the sum of their losses."""
    there = right >= 0
    own = similar.gather(1, right.clamp(min=0)).masked_fill(~there, -torch.inf)
    wrong = similar.scatter(1, torch.where(there, right, right[:, :1]), -torch.inf)  # the first is always there
    best = own.sort(1, descending=True).values
    # How many wrong rows are at least as similar: one column at a time, for most queries have one right row.
    above = torch.stack([(wrong >= column[:, None]).sum(1) for column in best.T], dim=1)
    ranks = above.double() + torch.arange(1, right.shape[1] + 1)
    rivals = (wrong / temperature).logsumexp(1, keepdim=True)
    losses = F.softplus(rivals - own / temperature).masked_fill(~there, 0.0)
    return ranks.masked_fill(best == -torch.inf, torch.inf), losses.double().sum().item()


def _worth(ranks: Tensor, counts: Tensor, recall_at: Sequence[int]) -> Tensor:
    """Sums over queries of each recall, of the reciprocal rank, and of nDCG."""
    first = ranks[:, 0]
    gain = torch.where(ranks <= _DEPTH, 1 / (ranks + 1).log2(), 0.0).sum(1)
    ideal = (1 / torch.arange(2, _DEPTH + 2).double().log2()).cumsum(0)[counts.clamp(max=_DEPTH) - 1]
    recalls = [(first <= k).sum() for k in recall_at]
    return torch.stack([*(r.double() for r in recalls), (1 / first).sum(), (gain / ideal).sum()])
