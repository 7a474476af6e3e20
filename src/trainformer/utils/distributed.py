"""What losses and momentum networks share over ranks. With one process every function is the identity, at no cost."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that train together.

    >>> world_size()
    1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process among them, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all ranks, in the order of the ranks; gradients flow back to the rank a row came from.

    Every rank must bring equally many rows. The gradient of a row is the sum over all ranks of what their losses say
    of it: averaged over ranks as data-parallel training does, that is the gradient of the mean loss of all ranks.

    >>> gather_rows(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    if world_size() == 1:
        return rows
    import torch.distributed.nn.functional as differentiable

    return torch.cat(differentiable.all_gather(rows.contiguous()))


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, as a new tensor without gradients."""
    if world_size() == 1:
        return value.detach()
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def shuffle_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of all ranks dealt out anew at random: this rank's new share, and the permutation to undo it with.

    BatchNorm then sees other samples together than those whose keys are compared ("shuffling BN" of MoCo).

    >>> shuffle_rows(torch.arange(3))[0].tolist()
    [0, 1, 2]
    """
    count = len(rows)
    if world_size() == 1:
        return rows, torch.arange(count, device=rows.device)
    permutation = torch.randperm(count * world_size(), device=rows.device)
    dist.broadcast(permutation, src=0)
    mine = permutation[rank() * count : (rank() + 1) * count]
    return gather_rows(rows.detach())[mine], permutation


def unshuffle_rows(rows: Tensor, permutation: Tensor) -> Tensor:
    """What became of the rows that `shuffle_rows` dealt out, back on the rank and at the place they came from."""
    if world_size() == 1:
        return rows
    count = len(rows)
    return gather_rows(rows.detach())[permutation.argsort()][rank() * count : (rank() + 1) * count]
