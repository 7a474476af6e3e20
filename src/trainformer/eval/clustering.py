"""Clustering of embeddings: k-means, normalised mutual information (NMI), and collapse statistics.

k-means runs in torch on any device, so metrics do not depend on which optional packages are installed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.eval.neighbours import check_embeddings, check_labels, normalize_rows, true_float32

# Distances computed at once: 64 MiB in float32.
_CELLS = 2**24

# k-means++ passes over all rows once per cluster, sequentially. Above this it takes longer than k-means itself.
_PLUSPLUS_CLUSTERS = 512


class Clusters(NamedTuple):
    """`assignment` (N,) of rows to `centers` (k, D); `inertia` is the sum of squared distances to them."""

    assignment: Tensor
    centers: Tensor
    inertia: float


@torch.no_grad()
def kmeans(embeddings: Tensor, clusters: int, *, seed: int = 0, iterations: int = 50, restarts: int = 3) -> Clusters:
    """Lloyd's k-means with k-means++ initialisation; the restart with the smallest inertia wins.

    The same rows and seed give the same clusters (on CUDA up to rounding of sums). An empty cluster moves to the row
    farthest from its center. Above 512 clusters the initial centers are random rows.

    >>> rows = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.0, 5.1]])
    >>> a = kmeans(rows, 2).assignment
    >>> bool(a[0] == a[1] and a[2] == a[3] and a[0] != a[2])
    True
    """
    rows = check_embeddings(embeddings).float()
    if isinstance(clusters, bool) or not isinstance(clusters, int) or not 1 <= clusters <= len(rows):
        raise BadArgument(expected(f"clusters from 1 to {len(rows)}, the number of rows", clusters))
    if iterations < 1 or restarts < 1:
        raise BadArgument(expected("iterations and restarts to be positive", (iterations, restarts)))
    rows = rows - rows.mean(0)  # distances stay the same, float32 loses fewer digits
    # On the CPU, so that all devices start from the same rows.
    generator = torch.Generator().manual_seed(seed)
    with true_float32(rows.device):
        tries = [_lloyd(rows, _first_centers(rows, clusters, generator), iterations) for _ in range(restarts)]
    best = min(tries, key=lambda one: one.inertia)
    return best._replace(centers=best.centers + embeddings.detach().float().mean(0))


def normalized_mutual_info(first: Tensor, second: Tensor) -> float:
    """Mutual information of two labellings over their mean entropy: 1 = the same up to renaming, 0 = independent.

    Two labellings with a single class each count as 1.

    >>> normalized_mutual_info(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 2, 2]))
    1.0
    """
    first = check_labels(first, len(first), "first")
    second = check_labels(second, len(first), "second").to(first.device)
    if len(first) == 0:
        raise DataError(expected("at least 1 label", 0))
    a, count_a = _compact(first)
    b, count_b = _compact(second)
    # Only pairs that occur: the full table for 10,000 classes and 10,000 clusters would take 800 MB.
    pairs, joint = (a * len(count_b) + b).unique(return_counts=True)
    total = float(len(first))
    independent = count_a[pairs // len(count_b)].double() * count_b[pairs % len(count_b)].double()
    joint = joint.double()
    information = (joint / total * (joint * total / independent).log()).sum().item()
    entropy = (_entropy(count_a) + _entropy(count_b)) / 2
    if entropy == 0:
        return 1.0
    return min(max(information / entropy, 0.0), 1.0)


def nmi(embeddings: Tensor, labels: Tensor, *, seed: int = 0) -> float:
    """NMI between the labels and as many k-means clusters of the L2-normalised rows.

    >>> nmi(torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4))
    1.0
    """
    rows = normalize_rows(embeddings)
    labels = check_labels(labels, len(rows))
    classes = len(labels.unique())
    if classes < 2:
        raise DataError(expected("labels of at least 2 classes to compare clusters with", classes))
    return normalized_mutual_info(labels, kmeans(rows, classes, seed=seed).assignment)


@torch.no_grad()
def feature_statistics(embeddings: Tensor) -> dict[str, float]:
    """Collapse statistics of embeddings.

    - ``feature_std``: mean standard deviation of the dimensions of the L2-normalised rows, times sqrt(D): 1 = uniform
      on the sphere, 0 = all rows point the same way;
    - ``effective_rank``: RankMe (Garrido et al., 2023), exp of the entropy of the singular values, from 1 (all rows on
      one line; 0 if all are zero) to D.

    >>> stats = feature_statistics(torch.eye(4))
    >>> round(stats["effective_rank"], 4)
    4.0
    """
    rows = check_embeddings(embeddings, least=2)
    spread = normalize_rows(rows).std(0).mean().item() * math.sqrt(rows.shape[1])
    values = _singular_values(rows)
    share = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny)
    rank = torch.special.entr(share).sum().exp().item() if bool(values.sum() > 0) else 0.0
    return {"feature_std": spread, "effective_rank": rank}


def _singular_values(rows: Tensor) -> Tensor:
    """From the Gram matrix (D x D or N x N): for 60,000 x 512 many times faster than an SVD of the rows."""
    kind = torch.float32 if rows.device.type == "mps" else torch.float64
    rows = rows.to(kind)
    rows = rows / rows.abs().max().clamp(min=torch.finfo(kind).tiny)  # squares of 1e200 are infinite
    products = rows.T @ rows if rows.shape[0] > rows.shape[1] else rows @ rows.T
    squares = torch.linalg.eigvalsh(products)
    # Zeros come out as rounding errors, and the square root turns 1e-16 into 1e-8.
    noise = squares.max().clamp(min=0) * max(rows.shape) * torch.finfo(kind).eps
    return torch.where(squares > noise, squares, 0).sqrt()


def _first_centers(rows: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++: sample each center with probability proportional to the squared distance; random rows if many."""
    if clusters > _PLUSPLUS_CLUSTERS:
        chosen = torch.randperm(len(rows), generator=generator)[:clusters]
        return rows[chosen.to(rows.device)].clone()
    centers = rows.new_empty(clusters, rows.shape[1])
    index = torch.randint(len(rows), (1,), generator=generator).to(rows.device)
    nearest = rows.new_full((len(rows),), math.inf)
    for i in range(clusters):
        centers[i : i + 1] = rows[index]
        nearest = torch.minimum(nearest, (rows - rows[index]).square().sum(1))
        # Inverse transform sampling. Rows at distance 0 are never drawn, unless there are no others.
        bounds = nearest.cpu().double().cumsum(0)  # cumsum of floats is not deterministic on CUDA
        drawn = torch.rand(1, generator=generator, dtype=torch.float64) * bounds[-1]
        index = torch.searchsorted(bounds, drawn, right=True).clamp(max=len(rows) - 1).to(rows.device)
    return centers


def _lloyd(rows: Tensor, centers: Tensor, iterations: int) -> Clusters:
    assignment, distance = _assign(rows, centers)
    for _ in range(iterations):
        counts = torch.bincount(assignment, minlength=len(centers))
        sums = torch.zeros_like(centers).index_add_(0, assignment, rows)
        centers = sums / counts.clamp(min=1).unsqueeze(1)
        empty = (counts == 0).nonzero().squeeze(1)
        if len(empty):
            centers[empty] = rows[distance.topk(len(empty)).indices]
        before = assignment
        assignment, distance = _assign(rows, centers)
        if torch.equal(before, assignment):
            break
    return Clusters(assignment, centers, (rows - centers[assignment]).double().square().sum().item())


def _assign(rows: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest center of each row, and the squared distance to it."""
    size = centers.square().sum(1)
    nearest, distance = [], []
    for part in rows.split(max(1, _CELLS // len(centers))):
        found = torch.addmm(size, part, centers.T, alpha=-2).min(1)
        nearest.append(found.indices)
        distance.append(found.values + part.square().sum(1))
    return torch.cat(nearest), torch.cat(distance)


def _compact(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels renumbered as 0, 1, 2, ..., and their counts."""
    found = labels.unique(return_inverse=True, return_counts=True)
    return found[1], found[2]


def _entropy(counts: Tensor) -> float:
    share = counts.double() / counts.sum()
    return -(share * share.log()).sum().item()
