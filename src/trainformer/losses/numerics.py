"""What all losses share: single precision whatever autocast says, safe directions, and one way to reduce.

Owns the arithmetic that must not go wrong in half precision. What a loss means is the business of its own module.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, did_you_mean, expected

Reduction = Literal["mean", "sum", "none"]


def full_precision(tensor: Tensor) -> torch.autocast:
    """A block in which autocast does not lower anything on the device of `tensor`."""
    return torch.autocast(tensor.device.type, enabled=False)


def full(tensor: Tensor) -> Tensor:
    """The tensor in float32; a float64 one stays as it is.

    >>> full(torch.ones(1, dtype=torch.bfloat16)).dtype, full(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def unit_rows(rows: Tensor, eps: float = 1e-12) -> Tensor:
    """Rows divided by their lengths, in full precision; a row of length zero stays zero.

    `torch.nn.functional.normalize` divides such a row by 1e-12, and so its gradient too: beyond what half precision
    holds. Here it is divided by one.

    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows = full(rows)
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / torch.where(length > eps, length, torch.ones_like(length))


def reduced(values: Tensor, reduction: Reduction) -> Tensor:
    """One value per sample, or their mean or sum.

    >>> reduced(torch.tensor([1.0, 3.0]), "mean")
    tensor(2.)
    """
    check_reduction(reduction)
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def check_reduction(reduction: Reduction) -> None:
    """Refuse a reduction that does not exist."""
    if reduction not in get_args(Reduction):
        hint = did_you_mean(str(reduction), get_args(Reduction))
        raise BadArgument(expected("reduction to be 'mean', 'sum' or 'none'", reduction, hint))


def check_positive(name: str, value: object, hint: str = "") -> None:
    """Refuse a number that is not positive and finite. A tensor is taken as it is: to look at it would cost a wait."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise BadArgument(expected(f"{name} to be a positive number", value, hint))


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadArgument(expected(f"{name} to be an integer of at least {least}", value))


def check_rows(first: tuple[str, Tensor], second: tuple[str, Tensor]) -> None:
    """Refuse two tensors that are not matrices (B, D) of one shape."""
    (name, a), (other, b) = first, second
    if a.ndim != 2 or a.shape != b.shape:
        raise BadArgument(
            expected(f"{name} and {other} of one shape (B, D)", f"{name} {tuple(a.shape)} and {other} {tuple(b.shape)}")
        )
