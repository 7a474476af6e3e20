"""Retrieval metrics and k-nearest-neighbour classification, as functions of all embeddings and labels of a set.

Owns what a list of neighbours is worth; finding them is the business of `neighbours`. Similarity is the cosine.

Definitions are those of "A Metric Learning Reality Check" (Musgrave et al., 2020). R is the number of rows of the
query's class that can be found: without a gallery of its own, a query is searched in the rest of the set, so R is the
size of its class less one. A query with R = 0 cannot be answered and is left out of the means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.eval.neighbours import IndexKind, NeighbourIndex, check_labels

# Cells (queries x neighbours) worked on at once. About 32 bytes are alive per cell: 64 MiB.
_CELLS = 2**21


@dataclass(frozen=True)
class _Search:
    """A set of queries and what they are searched in. `exclude` names each query's own row, where it has one."""

    queries: Tensor
    labels: Tensor
    index: NeighbourIndex
    gallery_labels: Tensor
    exclude: Tensor | None

    @property
    def most(self) -> int:
        """The largest number of neighbours a query can have."""
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
    """How well rows of the same label find each other, or find their like in `gallery`.

    - ``recall@k``: share of queries with at least one of their class among the `k` nearest;
    - ``precision@1``: share of queries whose nearest row is of their class;
    - ``r_precision``: share of their class among the R nearest;
    - ``map@r``: mean over the R nearest of the precision up to there, where that row is of the class, else 0;
    - ``queries_without_match``: how many queries have no other row of their class, and are left out of the means.

    `index` is how neighbours are found, see `nearest`. Memory stays below some 200 MB however large a class is.

    >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [1.0, -1.0]])
    >>> retrieval_metrics(rows, torch.tensor([0, 0, 1, 1, 2]), recall_at=(1,))
    {'recall@1': 1.0, 'precision@1': 1.0, 'r_precision': 1.0, 'map@r': 1.0, 'queries_without_match': 1.0}
    """
    if not recall_at or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in recall_at):
        raise BadArgument(expected("recall_at to be positive whole numbers", recall_at, "Pass recall_at=(1, 5, 10)."))
    search = _prepare(embeddings, labels, gallery, gallery_labels, index)
    relevant = _relevant(search)
    answerable = relevant > 0
    count = int(answerable.sum())
    if count == 0:
        raise DataError(
            f"Expected at least one query with another row of its class, received none among {len(labels)} queries. "
            + (
                "Every label occurs once: check the labels, or pass a gallery."
                if gallery is None
                else "Check that labels and gallery_labels name the same classes."
            )
        )
    least = min(max(recall_at), search.most)
    rows = answerable.nonzero().squeeze(1)
    rows = rows[relevant[rows].argsort(stable=True)]  # by R, so that short lists need not be as long as the longest
    if search.index.kind == "ivf":
        longest = max(least, int(relevant.max()))
        search.index.tune(search.queries[rows], longest, exclude=_of(search.exclude, rows))

    totals = torch.zeros(len(recall_at) + 3, dtype=torch.float64)
    for part, k in _parts(rows, relevant[rows], least):
        found = search.index.search(search.queries[part], k, exclude=_of(search.exclude, part))
        match = search.gallery_labels[found.indices] == search.labels[part].unsqueeze(1)
        totals += _sums(match, relevant[part], recall_at)
    names = [*(f"recall@{k}" for k in recall_at), "precision@1", "r_precision", "map@r"]
    values = dict(zip(names, (totals / count).tolist(), strict=True))
    return values | {"queries_without_match": float(len(relevant) - count)}


def faiss_retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    recall_at: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """`retrieval_metrics` with the exact search of faiss."""
    return retrieval_metrics(
        embeddings, labels, gallery=gallery, gallery_labels=gallery_labels, recall_at=recall_at, index="exact"
    )


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
    """Share of rows whose label is the majority among their `k` nearest, in `gallery` or in the rest of the set.

    Of classes with equally many votes the one with the nearest row wins. `weighted` lets near rows count more, as in
    `knn_predict`. A `k` above the number of rows takes all of them. A label the gallery does not have counts as wrong.

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
    """The label of each query by a weighted vote of its `k` nearest rows: the kNN of InstDisc and DINO.

    A neighbour of cosine similarity s votes for its label with the weight exp(s / temperature). A `k` above the number
    of rows takes all of them. `num_classes`, if given, is what labels are checked against.

    >>> bank = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    >>> knn_predict(torch.tensor([[0.9, 0.1], [0.1, 0.8]]), bank, torch.tensor([7, 7, 3]), k=3)
    tensor([7, 3])
    """
    rows = check_labels(gallery_labels, len(gallery), "gallery_labels")
    _check_classes(num_classes, rows)
    found = NeighbourIndex(gallery, index, num_queries=len(queries))
    search = _Search(queries, rows.new_empty(0), found, rows.to(queries.device), None)
    return _predict(search, k, _check_temperature(temperature))


def _prepare(
    embeddings: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None, index: IndexKind
) -> _Search:
    """Queries and gallery with checked labels on one device; the set itself, less the query, without a gallery."""
    if (gallery is None) != (gallery_labels is None):
        missing = "gallery_labels" if gallery_labels is None else "gallery"
        raise BadArgument(expected("gallery and gallery_labels together", f"no {missing}"))
    labels = check_labels(labels, len(embeddings)).to(embeddings.device)
    if gallery is None or gallery_labels is None:
        if len(embeddings) < 2:
            raise DataError(
                expected("at least 2 rows to find neighbours among", len(embeddings), "Pass more rows, or a gallery.")
            )
        found = NeighbourIndex(embeddings, index)
        return _Search(embeddings, labels, found, labels, torch.arange(len(labels), device=labels.device))
    others = check_labels(gallery_labels, len(gallery), "gallery_labels").to(embeddings.device)
    if len(embeddings) == 0:
        raise DataError(expected("at least 1 query", 0))
    return _Search(embeddings, labels, NeighbourIndex(gallery, index, num_queries=len(labels)), others, None)


def _relevant(search: _Search) -> Tensor:
    """R of each query: how many rows of its class it could find."""
    classes, place, counts = search.gallery_labels.unique(return_inverse=True, return_counts=True)
    if search.exclude is not None:
        return counts[place] - 1
    place = torch.searchsorted(classes, search.labels).clamp(max=len(classes) - 1)
    return torch.where(classes[place] == search.labels, counts[place], 0)


def _parts(rows: Tensor, relevant: Tensor, least: int) -> Iterator[tuple[Tensor, int]]:
    """Queries that are searched together, and how many neighbours each of them needs. `rows` are in order of R."""
    lengths = relevant.clamp(min=least).cpu()
    start = 0
    while start < len(rows):
        # As many as fit if all had the longest list of twice the first one's length; the first of them always does.
        within = int(torch.searchsorted(lengths, 2 * lengths[start], right=True))
        room = max(1, _CELLS // int(lengths[within - 1]))
        end = min(within, start + room)
        yield rows[start:end], int(lengths[end - 1])
        start = end


def _sums(match: Tensor, relevant: Tensor, recall_at: Sequence[int]) -> Tensor:
    """Sums over the queries of recall at each k, precision at 1, R-precision and average precision at R.

    `match` (queries, k) says which neighbours, best first, are of the query's class.
    """
    recalls = [match[:, :k].any(1).sum() for k in recall_at]
    rank = torch.arange(1, match.shape[1] + 1, device=match.device)
    hits = match & (rank <= relevant.unsqueeze(1))
    precision = hits.cumsum(1, dtype=torch.int32).double() / rank
    r_precision = (hits.sum(1).double() / relevant).sum()
    average = ((precision * hits).sum(1) / relevant).sum()
    return torch.stack([*(r.double() for r in recalls), match[:, 0].sum().double(), r_precision, average]).cpu()


def _predict(search: _Search, k: int, temperature: float | None) -> Tensor:
    """The winning label of each query. Without a temperature all votes count the same."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise BadArgument(expected("k to be a positive integer", k, "Pass k=5, for instance."))
    k = min(k, search.most)
    predictions = []
    for part in torch.arange(len(search.queries), device=search.queries.device).split(max(1, _CELLS // k**2)):
        found = search.index.search(search.queries[part], k, exclude=_of(search.exclude, part))
        labels = search.gallery_labels[found.indices]
        votes = torch.ones_like(found.similarities)
        if temperature is not None:
            # Relative to the nearest, which changes no ranking: exp(1 / 0.005) alone is beyond float32.
            votes = ((found.similarities - found.similarities[:, :1]) / temperature).exp()
        # Votes for the label of each neighbour; no matrix (queries, classes), for there may be 100,000 classes. Of
        # equal maxima argmax takes the first: the class with the nearest row.
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
    """Labels from 0 to num_classes - 1, if that number is known."""
    if num_classes is None:
        return
    for values in labels:
        lowest, highest = (int(v) for v in values.aminmax())
        if lowest < 0 or highest >= num_classes:
            wrong = lowest if lowest < 0 else highest
            raise BadArgument(expected(f"labels from 0 to {num_classes - 1}", wrong))
