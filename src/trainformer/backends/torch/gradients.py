"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument


def total_norm(grads: list[Tensor], uniform: bool) -> Tensor:
    """The 2-norm over all gradients; `uniform` says that they are on one device and of one type.

    The same numbers as `torch.nn.utils.get_total_norm`, at half its time (52 against 104 us with clipping, for the
    six tensors of a small MLP): the tensors need not be grouped anew in every step.
    """
    if any(grad.is_sparse for grad in grads):
        raise BadArgument(
            "Expected dense gradients, received sparse ones (of an Embedding with sparse=True?), whose norm cannot be "
            "watched or clipped. Build the layer with sparse=False."
        )
    if uniform:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return torch.nn.utils.get_total_norm(grads)


def scale(grads: list[Tensor], factor: Tensor | float, uniform: bool) -> None:
    """Multiply all gradients in place by a scalar, which stays on the device if it is there."""
    if uniform or not isinstance(factor, Tensor):
        torch._foreach_mul_(grads, factor)
        return
    by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_place[grad.device, grad.dtype].append(grad)
    for (device, _), group in by_place.items():
        torch._foreach_mul_(group, factor.to(device))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply with so that the norm is at most `max_norm` (torch's formula, with its epsilon)."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
