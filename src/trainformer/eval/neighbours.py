"""Nearest-neighbour search by cosine similarity, and input checks for functions of embeddings.

The search is exact by matrix product in torch (any device), or exact or approximate (IVF) by faiss. Ties are ordered by
index, also at the end of the list, so duplicates and collapsed embeddings give reproducible neighbours. The full matrix
of queries by rows never exists: the largest block is 64 MiB.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch.nn import functional as F

from trainformer.core.errors import BadArgument, DataError, check_choice, expected
from trainformer.core.optional import require

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

IndexKind = Literal["auto", "torch", "exact", "ivf"]

# A block of similarities has at most 2**16 columns and 2**24 cells: 64 MiB in float32. Wide blocks are the fast ones:
# (256, 60000) takes 1.2 s where (256, 4096) takes 1.5 s, and 1.7 s against 4.5 s for 200 neighbours.
_COLUMNS, _CELLS, _ROWS = 2**16, 2**24, 2**11

# top-k looks at groups of 16 columns first: the k best cells lie in the k groups with the highest maximum. For
# (256, 60000) and k = 12 that takes 8 ms instead of 33, for k = 200 36 instead of 64, for k = 1000 103 instead of 154.
_GROUP = 16

# Below this "auto" is torch: 60,000 x 60,000 x 128 with 10 neighbours takes 18 s on one thread, exact faiss 1.15 takes
# 51 s, and torch was at least as fast at all sizes tried (2,000 to 60,000 rows, k up to 1,000). Above, "auto" is IVF if
# there are enough queries to pay for the index: building it for 1,000,000 x 128 in 5,000 clusters takes 25 s, then a
# query takes 1 ms instead of 5. Without clear clusters a quarter of the lists must be probed: slower than torch.
_IVF_ROWS, _IVF_QUERIES = 1_000_000, 10_000

_TUNING_QUERIES = 256


class Neighbours(NamedTuple):
    """The nearest rows of each query, best first: cosine similarities and row indices, both (queries, k)."""

    similarities: Tensor
    indices: Tensor


def nearest(
    queries: Tensor, gallery: Tensor, k: int, *, exclude_self: bool = False, index: IndexKind = "auto"
) -> Neighbours:
    """The `k` rows of `gallery` with the highest cosine similarity to each query.

    With `exclude_self` query i is row i of the gallery and not its own neighbour; a duplicate of it is. `index` is
    `"torch"` or `"exact"` (faiss), with equal results, `"ivf"` (faiss, approximate), or `"auto"`: torch, or IVF above a
    million rows if faiss is installed. A zero row has similarity 0 to everything.

    >>> rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 1.0]])
    >>> nearest(rows, rows, 1, exclude_self=True).indices.flatten().tolist()
    [2, 3, 0, 0]
    """
    if exclude_self and len(queries) != len(gallery):
        sizes = f"{len(queries)} queries and {len(gallery)} rows"
        raise BadArgument(expected("exclude_self with the queries as the gallery", sizes))
    found = NeighbourIndex(gallery, index, num_queries=len(queries))
    return found.search(queries, k, exclude=torch.arange(len(queries)) if exclude_self else None)


class NeighbourIndex:
    """A gallery to search repeatedly. `index` as in `nearest`.

    `num_queries`, if known, lets `"auto"` decide whether IVF pays off. `recall` is the share of true neighbours that
    IVF must find; the number of probed lists is tuned on a sample of the queries.

    >>> bank = NeighbourIndex(torch.eye(3))
    >>> bank.search(torch.tensor([[0.1, 0.9, 0.2]]), k=2).indices
    tensor([[1, 2]])
    """

    def __init__(
        self, gallery: Tensor, index: IndexKind = "auto", *, num_queries: int | None = None, recall: float = 0.98
    ) -> None:
        if not 0 < recall <= 1:
            raise BadArgument(expected("recall to be a share above 0 and up to 1", recall, "Pass recall=0.98."))
        self._rows = normalize_rows(gallery, "gallery")
        self._recall = recall
        self._tuned_k = 0
        self._ivf_pays_off = True
        self.kind = _resolve(index, self._rows, num_queries)
        self._faiss = None if self.kind == "torch" else _build_faiss(self._rows, self.kind)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_exact(self) -> bool:
        """Whether searches are exact: always, except with IVF where its approximate search pays off."""
        return self.kind != "ivf" or not self._ivf_pays_off

    @torch.no_grad()
    def search(self, queries: Tensor, k: int, *, exclude: Tensor | None = None) -> Neighbours:
        """The `k` nearest rows of each query, on the device of the queries.

        `exclude` (queries,) is one row per query to leave out, usually the query itself.
        """
        wanted, home = self._checked(queries, k, exclude), queries.device
        if exclude is not None:
            exclude = exclude.to(self._rows.device)
        if self.kind == "ivf" and k > self._tuned_k:
            self.tune(queries, k, exclude=exclude)
        similarities = wanted.new_empty(len(wanted), k)
        indices = torch.empty(len(wanted), k, dtype=torch.int64, device=wanted.device)
        approximate = self._faiss is not None and self._ivf_pays_off
        search = self._search_faiss if approximate else self._search_torch
        # Queries per chunk: 64 MiB of similarities in torch, or of results in faiss.
        rows = min(_ROWS, _CELLS // min(len(self), _COLUMNS), 4 * _CELLS // (_GROUP * k))
        rows = max(1, min(2**14, _CELLS // (4 * k)) if approximate else rows)
        with true_float32(wanted.device):
            for start in range(0, len(wanted), rows):
                part = slice(start, start + rows)
                similarities[part], indices[part] = search(wanted[part], None if exclude is None else exclude[part], k)
        return Neighbours(similarities.to(home), indices.to(home))

    @torch.no_grad()
    def tune(self, queries: Tensor, k: int, *, exclude: Tensor | None = None) -> None:
        """Choose the number of lists an IVF index probes, for up to `k` neighbours of similar queries.

        Searches a sample of 256 queries exactly (about a second for a million rows) and doubles the number of lists
        until the recall on the sample is half way between the requested one and 1. If that takes more than a tenth of
        the lists (embeddings without clear clusters), exact search is faster and used instead. No-op for exact indexes.
        """
        if self._faiss is None or self.kind != "ivf":
            return
        wanted = self._checked(queries, k, exclude)
        chosen = torch.linspace(0, len(wanted) - 1, min(_TUNING_QUERIES, len(wanted))).long()
        # -1 means that no row is left out.
        sample, left_out = wanted[chosen], torch.full_like(chosen, -1) if exclude is None else exclude.cpu()[chosen]
        with true_float32(sample.device):
            pieces = zip(sample.split(64), left_out.to(sample.device).split(64), strict=True)
            exact = torch.cat([self._search_torch(*piece, k).similarities for piece in pieces])
        # Compare similarities, not indices, because of duplicates. 1e-5 is above rounding.
        least = exact[:, -1:].cpu() - 1e-5
        lists, share, probes = self._faiss.nlist, 0.0, 0
        most = min(lists, max(8, lists // 10))
        while share < (1 + self._recall) / 2 and probes < most:
            probes = min(max(8, 2 * probes), most)
            self._faiss.nprobe = probes
            arrays = self._faiss.search(sample.cpu().numpy(), min(k + 1, len(self)))
            found, rows = (torch.from_numpy(array) for array in arrays)
            good = (found >= least) & (rows != left_out.unsqueeze(1))
            share = good.sum(1).clamp(max=k).float().mean().item() / k
        self._tuned_k, self._ivf_pays_off = k, share >= (1 + self._recall) / 2
        logger.info("IVF finds %.4f of %d neighbours in %d of %d lists", share, k, probes, lists)

    def _checked(self, queries: Tensor, k: int, exclude: Tensor | None) -> Tensor:
        """The normalised queries on the device of the gallery, or an error."""
        wanted = normalize_rows(queries, "queries").to(self._rows.device)
        if wanted.shape[1] != self._rows.shape[1]:
            sizes = f"{wanted.shape[1]} and {self._rows.shape[1]}"
            raise BadArgument(expected("queries and gallery of one width", sizes))
        if exclude is not None and exclude.shape != wanted.shape[:1]:
            raise BadArgument(expected("one excluded row per query", f"a tensor of shape {tuple(exclude.shape)}"))
        most = len(self) - (exclude is not None)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
            raise BadArgument(
                expected(f"k from 1 to {most}, the number of rows that can be found", k)
                if most
                else expected("a gallery of two rows at least, to leave the query itself out", len(self))
            )
        return wanted

    def _search_torch(self, queries: Tensor, exclude: Tensor | None, k: int) -> Neighbours:
        best: Neighbours | None = None
        for start in range(0, len(self), _COLUMNS):
            block = self._rows[start : start + _COLUMNS]
            similarities = queries @ block.T
            if exclude is not None:
                hit = ((exclude >= start) & (exclude < start + len(block))).nonzero().squeeze(1)
                similarities[hit, exclude[hit] - start] = -math.inf
            found = _topk_columns(similarities, min(k, len(block)))
            found = Neighbours(found.similarities, found.indices + start)
            best = found if best is None else _merge(best, found, k)
        assert best is not None
        return best

    def _search_faiss(self, queries: Tensor, exclude: Tensor | None, k: int) -> Neighbours:
        """Request one more than needed to detect ties at the end, and one more to leave the query out."""
        assert self._faiss is not None
        more = min(k + 1 + (exclude is not None), len(self))
        arrays = self._faiss.search(queries.cpu().numpy(), more)
        similarities, indices = (torch.from_numpy(a).to(queries.device) for a in arrays)
        # faiss returns -1 if it finds no more.
        none = indices < 0 if exclude is None else (indices < 0) | (indices == exclude.unsqueeze(1))
        similarities, indices = _lowest_index_first(similarities.masked_fill(none, -math.inf), indices)
        again = similarities[:, k - 1] == -math.inf
        if self.kind == "exact" and more > k:
            again |= similarities[:, k] == similarities[:, k - 1]
        # Repeat rare queries exactly: too few found, or a tie at the end.
        for part in again.nonzero().squeeze(1).split(max(1, _CELLS // min(len(self), _COLUMNS))):
            exact = self._search_torch(queries[part], None if exclude is None else exclude[part], k)
            similarities[part, :k], indices[part, :k] = exact
        return Neighbours(similarities[:, :k], indices[:, :k])


def normalize_rows(embeddings: Tensor, name: str = "embeddings", least: int = 1) -> Tensor:
    """The checked rows, L2-normalised in float32. A zero row stays zero.

    >>> normalize_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows = check_embeddings(embeddings, name, least).float()
    # Squares of 1e20 or 1e-23 are infinite or 0 in float32: scale by the largest entry first.
    largest = rows.abs().amax(1, keepdim=True)
    return F.normalize(rows / largest.masked_fill(largest == 0, 1), dim=1).contiguous()


def check_embeddings(embeddings: Tensor, name: str = "embeddings", least: int = 1) -> Tensor:
    """The embeddings, detached, if they are finite floats (N, D) with at least `least` rows, else an error."""
    if embeddings.ndim != 2 or not embeddings.is_floating_point() or embeddings.shape[1] == 0:
        what = f"{str(embeddings.dtype).removeprefix('torch.')} of shape {tuple(embeddings.shape)}"
        raise BadArgument(expected(f"{name} to be floats of shape (N, D)", what))
    embeddings = embeddings.detach()
    if len(embeddings) < least:
        raise DataError(expected(f"{name} to have at least {least} row{'s' * (least > 1)}", len(embeddings)))
    bad = int((~torch.isfinite(embeddings).all(1)).sum())
    if bad:
        raise DataError(
            f"Expected {name} to be finite, received NaN or infinity in {bad} of {len(embeddings)} rows. "
            "Look for a diverged model, or for overflow in float16."
        )
    return embeddings


def check_labels(labels: Tensor, rows: int, name: str = "labels") -> Tensor:
    """The labels as int64, if there is one integer per row, else an error."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        what = f"{str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}"
        raise BadArgument(expected(f"{name} to be integers of shape (N,)", what))
    if len(labels) != rows:
        raise DataError(expected(f"{name}, one per row of the embeddings ({rows})", len(labels)))
    return labels.long()


@contextmanager
def true_float32(device: torch.device) -> Iterator[None]:
    """Matrix products in float32, without autocast and TF32: their error (1e-3) would swap close neighbours."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _resolve(index: str, rows: Tensor, num_queries: int | None) -> str:
    check_choice("index", index, get_args(IndexKind))
    if index != "auto":
        return index
    queries = len(rows) if num_queries is None else num_queries
    large = len(rows) >= _IVF_ROWS and queries >= _IVF_QUERIES
    return "ivf" if large and rows.device.type == "cpu" and find_spec("faiss") is not None else "torch"


def _build_faiss(rows: Tensor, kind: str) -> Any:
    faiss = require("faiss", "retrieval", f"to search with index={kind!r}")
    width, array = rows.shape[1], rows.cpu().numpy()
    if kind == "exact":
        index = faiss.IndexFlatIP(width)
    else:
        lists = max(1, round(math.sqrt(len(rows))))
        # The quantizer must outlive the index, so the index owns it.
        quantizer = faiss.IndexFlatIP(width)
        index = faiss.IndexIVFFlat(quantizer, width, lists, faiss.METRIC_INNER_PRODUCT)
        index.own_fields = True
        quantizer.this.disown()
        # 64 samples per centroid instead of 256: a quarter of the build time; the probing is tuned anyway.
        index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, 64
        index.train(array)
    index.add(array)
    return index


def _topk_columns(similarities: Tensor, k: int) -> Neighbours:
    """The `k` largest entries of each row; ties by lowest index."""
    if 2 * k >= similarities.shape[1]:  # here one stable sort is faster than topk plus the tie handling
        ordered = similarities.sort(dim=1, descending=True, stable=True)
        return Neighbours(ordered.values[:, :k], ordered.indices[:, :k])
    values, columns = _largest(similarities, k + 1)
    cut = values[:, k] == values[:, k - 1]  # a tie at the end: take the lowest indices
    tied = cut | (values[:, 1:k] == values[:, : k - 1]).any(1)
    values, columns = values[:, :k].contiguous(), columns[:, :k].contiguous()
    for rows in cut.nonzero().squeeze(1).split(64):
        chosen = _lowest_columns(similarities[rows], values[rows, -1:], k)
        values[rows], columns[rows] = similarities[rows].gather(1, chosen), chosen
    rows = tied.nonzero().squeeze(1)
    if len(rows):
        values[rows], columns[rows] = _lowest_index_first(values[rows], columns[rows])
    return Neighbours(values, columns)


def _largest(similarities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` of each row, through groups with the largest maxima if that is faster."""
    groups = similarities.shape[1] // _GROUP
    if 4 * k > groups:
        found = similarities.topk(k, dim=1)
        return found.values, found.indices
    # Group g holds the columns g, g + groups, g + 2 * groups, ...: a maximum over the middle dimension is vectorised.
    head = similarities[:, : groups * _GROUP].unflatten(1, (_GROUP, groups))
    chosen = head.amax(1).topk(k, dim=1).indices.unsqueeze(1).expand(-1, _GROUP, -1)
    tail = torch.arange(groups * _GROUP, similarities.shape[1], device=similarities.device)
    first = torch.arange(_GROUP, device=similarities.device).mul(groups).view(1, -1, 1)
    candidates = torch.cat((head.gather(2, chosen).flatten(1), similarities[:, groups * _GROUP :]), dim=1)
    columns = torch.cat(((chosen + first).flatten(1), tail.expand(len(similarities), -1)), dim=1)
    values, place = candidates.topk(k, dim=1)
    return values, columns.gather(1, place)


def _lowest_columns(similarities: Tensor, least: Tensor, k: int) -> Tensor:
    """Sorted columns of all entries above `least` and the first ones equal to it, `k` per row."""
    above, equal = similarities > least, similarities == least
    room = k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))
    return chosen.nonzero()[:, 1].view(-1, k)


def _lowest_index_first(similarities: Tensor, indices: Tensor) -> Neighbours:
    """Sorted by similarity, ties by index."""
    order = indices.argsort(dim=1)
    similarities, indices = similarities.gather(1, order), indices.gather(1, order)
    similarities, order = similarities.sort(dim=1, descending=True, stable=True)
    return Neighbours(similarities, indices.gather(1, order))


def _merge(best: Neighbours, later: Neighbours, k: int) -> Neighbours:
    """The `k` best of two lists; the second has the higher indices, so a stable sort keeps ties in order."""
    similarities = torch.cat((best.similarities, later.similarities), dim=1)
    values, order = similarities.sort(dim=1, descending=True, stable=True)
    indices = torch.cat((best.indices, later.indices), dim=1).gather(1, order[:, :k])
    return Neighbours(values[:, :k], indices)
