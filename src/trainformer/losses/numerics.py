"""What all losses share: float32 arithmetic under autocast, safe normalisation, reductions and argument checks."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, check_choice, expected

Reduction = Literal["mean", "sum", "none"]


def no_autocast(tensor: Tensor) -> torch.autocast:
    """Disable autocast on the device of `tensor` within a `with` block."""
    return torch.autocast(tensor.device.type, enabled=False)


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32; float64 stays float64.

    >>> upcast(torch.ones(1, dtype=torch.bfloat16)).dtype, upcast(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def l2_normalize(rows: Tensor, eps: float = 1e-12) -> Tensor:
    """Rows divided by their L2 norms, upcast; a zero row stays zero.

    `torch.nn.functional.normalize` divides a zero row, and therefore its gradient, by 1e-12: out of range in half
    precision. Here it is divided by one.

    >>> l2_normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows = upcast(rows)
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / torch.where(norm > eps, norm, torch.ones_like(norm))


def reduce_loss(values: Tensor, reduction: Reduction) -> Tensor:
    """Per-sample values as they are, or their mean or sum.

    >>> reduce_loss(torch.tensor([1.0, 3.0]), "mean")
    tensor(2.)
    """
    check_choice("reduction", reduction, get_args(Reduction))
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def check_positive(name: str, value: object, hint: str = "") -> None:
    """Reject a number that is not positive and finite. Tensors pass unchecked: reading one is a sync."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise BadArgument(expected(f"{name} to be a positive number", value, hint))


def check_rows(first: tuple[str, Tensor], second: tuple[str, Tensor]) -> None:
    """Reject two tensors that are not matrices (B, D) of the same shape."""
    (name, a), (other, b) = first, second
    if a.ndim != 2 or a.shape != b.shape:
        shapes = f"{name} {tuple(a.shape)} and {other} {tuple(b.shape)}"
        raise BadArgument(expected(f"{name} and {other} of one shape (B, D)", shapes))
