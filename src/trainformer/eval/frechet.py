"""The Fréchet distance between two sets of features: how close generated samples are to real ones."""

from __future__ import annotations

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, expected


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """The Fréchet distance between normal distributions fitted to two sets of rows, in float64.

    With the pool features of Inception-v3 as rows this is the Fréchet inception distance (FID). It is 0 for equal means
    and covariances, and biased upwards by few rows: compare numbers for the same number of rows only.

    >>> rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(frechet_distance(rows, rows + 3.0), 6)
    18.0
    """
    rows = [_checked("real", real), _checked("generated", generated)]
    if rows[0].shape[1] != rows[1].shape[1]:
        what = f"as many columns in `generated` as in `real` ({rows[0].shape[1]})"
        raise BadArgument(expected(what, rows[1].shape[1]))
    (mean_1, cov_1), (mean_2, cov_2) = ((r.mean(0), torch.cov(r.T).reshape(r.shape[1], -1)) for r in rows)
    # trace(sqrt(A B)) from the symmetric sqrt(A) B sqrt(A), which has the same eigenvalues as A B.
    values, vectors = torch.linalg.eigh(cov_1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_2 @ root).clamp(min=0).sqrt().sum()
    distance = (mean_1 - mean_2).square().sum() + cov_1.trace() + cov_2.trace() - 2 * cross
    return max(float(distance), 0.0)


def _checked(name: str, rows: Tensor) -> Tensor:
    if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) < 2:
        received = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise BadArgument(expected(f"{name} to be a tensor with one row of features per sample, two or more", received))
    if not bool(torch.isfinite(rows).all()):
        raise BadArgument(expected(f"{name} to be finite", "NaN or infinite values"))
    return rows.detach().double().cpu()
