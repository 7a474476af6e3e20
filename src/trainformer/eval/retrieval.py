"""Retrieval metrics and k-nearest-neighbour classification, computed once from all embeddings and labels of a set.

Owns the metrics; `neighbours` owns the search. Similarity is the cosine.

Class-based metrics follow "A Metric Learning Reality Check" (Musgrave et al., 2020). R is the number of gallery rows of
the query's class. Without a separate gallery, a query searches the rest of the set, so R is the size of its class minus
one. Queries with R = 0 are left out of the means. `ranking_metrics` is for explicit query-document pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.eval.neighbours import IndexKind, NeighbourIndex, check_labels

# Cells (queries x neighbours) processed at once, at about 32 bytes each: 64 MiB.
_CELLS = 2**21
# Similarities in memory at once in `ranking_metrics`: 64 MiB.
_SIMILARITIES = 2**24
_NDCG_DEPTH = 10


@dataclass(frozen=True)
class _Search:
    """Queries and their gallery. `exclude` is each query's own row in the gallery, if it has one."""

    queries: Tensor
    labels: Tensor
    index: NeighbourIndex
    gallery_labels: Tensor
    exclude: Tensor | None

    @property
    def max_neighbours(self) -> int:
        return len(self.index) - (self.exclude is not None)


def retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    recall_at: Sequence[int] = (1, 5, 10),
    index: IndexKind = "auto",
) -> dict[str, float]:
    """Retrieval metrics of embeddings (N, D) with class labels (N,), within the set or against a `gallery`.

    - ``recall@k``: share of queries with at least one row of their class among the `k` nearest;
    - ``precision@1``: share of queries whose nearest row is of their class;
    - ``r_precision``: share of rows of their class among the R nearest;
    - ``map@r``: mean average precision at R;
    - ``queries_without_match``: number of queries without another row of their class, left out of the means.

    `index` selects the search, see `nearest`. Memory stays below about 200 MB for classes of any size.

    >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [1.0, -1.0]])
    >>> retrieval_metrics(rows, torch.tensor([0, 0, 1, 1, 2]), recall_at=(1,))
    {'recall@1': 1.0, 'precision@1': 1.0, 'r_precision': 1.0, 'map@r': 1.0, 'queries_without_match': 1.0}
    """
    if not recall_at or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in recall_at):
        raise BadArgument(expected("recall_at to be positive integers", recall_at, "Pass recall_at=(1, 5, 10)."))
    search = _prepare(embeddings, labels, gallery, gallery_labels, index)
    relevant = _relevant(search)
    answerable = relevant > 0
    count = int(answerable.sum())
    if count == 0:
        alone = "Every label occurs once: check the labels, or pass a gallery."
        do = alone if gallery is None else "Check that labels and gallery_labels name the same classes."
        what = "at least one query with another row of its class"
        raise DataError(f"Expected {what}, received none among {len(labels)} queries. {do}")
    least = min(max(recall_at), search.max_neighbours)
    rows = answerable.nonzero().squeeze(1)
    rows = rows[relevant[rows].argsort(stable=True)]  # by R, so that short lists are not padded to the longest
    if search.index.kind == "ivf":
        longest = max(least, int(relevant.max()))
        search.index.tune(search.queries[rows], longest, exclude=_of(search.exclude, rows))

    totals = torch.zeros(len(recall_at) + 3, dtype=torch.float64)
    for part, k in _query_chunks(rows, relevant[rows], least):
        found = search.index.search(search.queries[part], k, exclude=_of(search.exclude, part))
        match = search.gallery_labels[found.indices] == search.labels[part].unsqueeze(1)
        totals += _sums(match, relevant[part], recall_at)
    names = [*(f"recall@{k}" for k in recall_at), "precision@1", "r_precision", "map@r"]
    values = dict(zip(names, (totals / count).tolist(), strict=True))
    return values | {"queries_without_match": float(len(relevant) - count)}


def faiss_retrieval_metrics(embeddings: Tensor, labels: Tensor, **options: Any) -> dict[str, float]:
    """`retrieval_metrics` with the exact search of faiss."""
    return retrieval_metrics(embeddings, labels, index="exact", **options)


def knn_accuracy(
    embeddings: Tensor,
    labels: Tensor,
    k: int = 5,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    weighted: bool = False,
    temperature: float = 0.07,
    num_classes: int | None = None,
    index: IndexKind = "auto",
) -> float:
    """Accuracy of a majority vote of the `k` nearest rows, in `gallery` or in the rest of the set.

    Ties go to the class with the nearest row. `weighted` weights votes by similarity (see `knn_predict`). `k` is capped
    at the number of rows. A label that is missing in the gallery counts as wrong.

    >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> knn_accuracy(rows, torch.tensor([0, 0, 1, 1]), k=1)
    1.0
    """
    search = _prepare(embeddings, labels, gallery, gallery_labels, index)
    _check_classes(num_classes, labels, search.gallery_labels if gallery_labels is None else gallery_labels)
    predictions = _predict(search, k, _check_temperature(temperature) if weighted else None)
    return (predictions == search.labels).double().mean().item()


def knn_predict(
    queries: Tensor,
    gallery: Tensor,
    gallery_labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    num_classes: int | None = None,
    *,
    index: IndexKind = "auto",
) -> Tensor:
    """The label of each query by a weighted vote of its `k` nearest rows: the kNN classifier of InstDisc and DINO.

    A neighbour of cosine similarity s votes for its label with weight exp(s / temperature). `k` is capped at the number
    of rows. `num_classes` only validates the labels.

    >>> bank = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    >>> knn_predict(torch.tensor([[0.9, 0.1], [0.1, 0.8]]), bank, torch.tensor([7, 7, 3]), k=3)
    tensor([7, 3])
    """
    rows = check_labels(gallery_labels, len(gallery), "gallery_labels")
    _check_classes(num_classes, rows)
    found = NeighbourIndex(gallery, index, num_queries=len(queries))
    search = _Search(queries, rows.new_empty(0), found, rows.to(queries.device), None)
    return _predict(search, k, _check_temperature(temperature))


def ranking_metrics(
    queries: Tensor, gallery: Tensor, pairs: Tensor, *, recall_at: Sequence[int] = (1, 5, 10), temperature: float = 0.05
) -> dict[str, float]:
    """Queries (Q, D) search a gallery (G, D); `pairs` (P, 2) are (query, relevant row), any number per query.

    - ``recall@k``: share of queries with a relevant row among the `k` nearest;
    - ``mrr``: mean reciprocal rank of the first relevant row;
    - ``ndcg@10``: normalised discounted cumulative gain of the first ten;
    - ``loss``: mean cross-entropy over pairs, of the relevant row against all irrelevant ones.

    Queries without a pair are left out. Ties rank irrelevant rows first, so collapsed embeddings score nothing.

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
    for part in torch.arange(len(asked)).split(max(1, _SIMILARITIES // len(gallery))):
        similar = queries[asked[part]] @ gallery.T
        column = torch.arange(int(counts[part].max()))
        rows = pairs[(starts[part, None] + column).clamp(max=len(pairs) - 1), 1]
        relevant = torch.where(column < counts[part, None], rows, -1)  # (queries, most), padded with -1
        found, losses = _ranks(similar, relevant, temperature)
        totals += _ranking_sums(found, counts[part], recall_at)
        loss += losses
    names = [*(f"recall@{k}" for k in recall_at), "mrr", f"ndcg@{_NDCG_DEPTH}"]
    values = dict(zip(names, (totals / len(asked)).tolist(), strict=True))
    return values | {"loss": loss / len(pairs)}


def _prepare(
    embeddings: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None, index: IndexKind
) -> _Search:
    """Queries and gallery with checked labels on one device; without a gallery, the set itself minus the query."""
    if (gallery is None) != (gallery_labels is None):
        missing = "gallery_labels" if gallery_labels is None else "gallery"
        raise BadArgument(expected("gallery and gallery_labels together", f"no {missing}"))
    labels = check_labels(labels, len(embeddings)).to(embeddings.device)
    if gallery is None or gallery_labels is None:
        if len(embeddings) < 2:
            do = "Pass more rows, or a gallery."
            raise DataError(expected("at least 2 rows to find neighbours among", len(embeddings), do))
        found = NeighbourIndex(embeddings, index)
        return _Search(embeddings, labels, found, labels, torch.arange(len(labels), device=labels.device))
    others = check_labels(gallery_labels, len(gallery), "gallery_labels").to(embeddings.device)
    if len(embeddings) == 0:
        raise DataError(expected("at least 1 query", 0))
    return _Search(embeddings, labels, NeighbourIndex(gallery, index, num_queries=len(labels)), others, None)


def _relevant(search: _Search) -> Tensor:
    """R of each query."""
    classes, place, counts = search.gallery_labels.unique(return_inverse=True, return_counts=True)
    if search.exclude is not None:
        return counts[place] - 1
    place = torch.searchsorted(classes, search.labels).clamp(max=len(classes) - 1)
    return torch.where(classes[place] == search.labels, counts[place], 0)


def _query_chunks(rows: Tensor, relevant: Tensor, least: int) -> Iterator[tuple[Tensor, int]]:
    """Chunks of queries, and the number of neighbours each chunk needs. `rows` are sorted by R."""
    lengths = relevant.clamp(min=least).cpu()
    start = 0
    while start < len(rows):
        # As many as fit in memory, with lists at most twice as long as the first; at least one query.
        within = int(torch.searchsorted(lengths, 2 * lengths[start], right=True))
        room = max(1, _CELLS // int(lengths[within - 1]))
        end = min(within, start + room)
        yield rows[start:end], int(lengths[end - 1])
        start = end


def _sums(match: Tensor, relevant: Tensor, recall_at: Sequence[int]) -> Tensor:
    """Sums over queries of the metrics; `match` (queries, k) marks neighbours, best first, of the query's class."""
    recalls = [match[:, :k].any(1).sum() for k in recall_at]
    rank = torch.arange(1, match.shape[1] + 1, device=match.device)
    hits = match & (rank <= relevant.unsqueeze(1))
    precision = hits.cumsum(1, dtype=torch.int32).double() / rank
    r_precision = (hits.sum(1).double() / relevant).sum()
    average = ((precision * hits).sum(1) / relevant).sum()
    return torch.stack([*(r.double() for r in recalls), match[:, 0].sum().double(), r_precision, average]).cpu()


def _predict(search: _Search, k: int, temperature: float | None) -> Tensor:
    """The winning label of each query. Without a temperature all votes have weight one."""
    check_count("k", k, do="Pass k=5, for instance.")
    k = min(k, search.max_neighbours)
    predictions = []
    for part in torch.arange(len(search.queries), device=search.queries.device).split(max(1, _CELLS // k**2)):
        found = search.index.search(search.queries[part], k, exclude=_of(search.exclude, part))
        labels = search.gallery_labels[found.indices]
        votes = torch.ones_like(found.similarities)
        if temperature is not None:
            # Relative to the nearest, which does not change the ranking: exp(1 / 0.005) alone overflows float32.
            votes = ((found.similarities - found.similarities[:, :1]) / temperature).exp()
        # Votes per neighbour's label instead of a matrix (queries, classes): there may be 100,000 classes. argmax takes
        # the first of equal maxima: the class with the nearest row.
        same = labels.unsqueeze(2) == labels.unsqueeze(1)
        votes = (same * votes.double().unsqueeze(1)).sum(2)
        predictions.append(labels.gather(1, votes.argmax(1, keepdim=True)).squeeze(1))
    return torch.cat(predictions)


def _of(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values[rows]


def _check_temperature(temperature: float) -> float:
    if not 0 < temperature < float("inf"):
        raise BadArgument(expected("temperature to be a positive number", temperature, "Pass temperature=0.07."))
    return temperature


def _check_classes(num_classes: int | None, *labels: Tensor) -> None:
    if num_classes is None:
        return
    for values in labels:
        lowest, highest = (int(v) for v in values.aminmax())
        if lowest < 0 or highest >= num_classes:
            wrong = lowest if lowest < 0 else highest
            raise BadArgument(expected(f"labels from 0 to {num_classes - 1}", wrong))


def _ranks(similar: Tensor, relevant: Tensor, temperature: float) -> tuple[Tensor, float]:
    """Ranks of the relevant rows, best first (infinite for padding), and the sum of their losses."""
    valid = relevant >= 0
    positive = similar.gather(1, relevant.clamp(min=0)).masked_fill(~valid, -torch.inf)
    negative = similar.scatter(1, torch.where(valid, relevant, relevant[:, :1]), -torch.inf)  # the first is valid
    best = positive.sort(1, descending=True).values
    # How many irrelevant rows are at least as similar: column by column, as most queries have one relevant row.
    above = torch.stack([(negative >= column[:, None]).sum(1) for column in best.T], dim=1)
    ranks = above.double() + torch.arange(1, relevant.shape[1] + 1)
    partition = (negative / temperature).logsumexp(1, keepdim=True)
    losses = F.softplus(partition - positive / temperature).masked_fill(~valid, 0.0)
    return ranks.masked_fill(best == -torch.inf, torch.inf), losses.double().sum().item()


def _ranking_sums(ranks: Tensor, counts: Tensor, recall_at: Sequence[int]) -> Tensor:
    first = ranks[:, 0]
    gain = torch.where(ranks <= _NDCG_DEPTH, 1 / (ranks + 1).log2(), 0.0).sum(1)
    ideal = (1 / torch.arange(2, _NDCG_DEPTH + 2).double().log2()).cumsum(0)[counts.clamp(max=_NDCG_DEPTH) - 1]
    recalls = [(first <= k).sum() for k in recall_at]
    return torch.stack([*(r.double() for r in recalls), (1 / first).sum(), (gain / ideal).sum()])
