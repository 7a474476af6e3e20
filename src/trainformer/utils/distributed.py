"""Collectives for losses, momentum networks and metrics. With one process every function is the identity, at no cost.

Owns gathering rows with gradients (ranks may have different numbers of rows), all-reduce sums, and shuffling rows over
ranks. "Ranks" are those of `set_data_parallel_group`: all processes, unless tensor or pipeline parallelism makes some
of them compute the same samples.

Everything here is a collective: every rank must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainformer.core.errors import DataError

_REFUSED = -1  # sent instead of a row count


class _Current:
    """The data-parallel group of this process, and whether it is computing padding."""

    group: Any = None
    is_padding = False
    participates = False


def set_data_parallel_group(group: Any) -> None:
    """Set the process group that this module's functions use; None (the default) means all processes.

    Tensor and pipeline parallelism set the group of ranks that compute different samples.
    """
    _Current.group = group


def data_parallel_group() -> Any:
    """The group of `set_data_parallel_group`; None for all processes."""
    return _Current.group


def world_size() -> int:
    """Number of data-parallel processes.

    >>> world_size()
    1
    """
    return dist.get_world_size(_Current.group) if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process among them."""
    return dist.get_rank(_Current.group) if world_size() > 1 else 0


@contextmanager
def padding(*, participates: bool = False) -> Iterator[None]:
    """Mark what is computed inside as padding: this rank has no sample of a batch in which other ranks have some.

    Statistics over ranks ignore padding, and padding rows must never count as samples: `gather_rows` raises
    `DataError` on all ranks. With `participates` it instead sends nothing to the other ranks and returns their rows
    followed by this rank's own, so that its loss, which does not count, can be computed. Code that keeps part of a
    batch beyond the step (a queue, a centre) must skip padding itself: see `is_padding`.

    >>> with padding():
    ...     is_padding()
    True
    """
    before = _Current.is_padding, _Current.participates
    _Current.is_padding, _Current.participates = True, participates
    try:
        yield
    finally:
        _Current.is_padding, _Current.participates = before


def is_padding() -> bool:
    """Whether the current computation is padding."""
    return _Current.is_padding


class RowCounts(NamedTuple):
    """Number of rows on each rank, in rank order, and the rank of this process.

    >>> RowCounts((3, 2, 2), 1).first, RowCounts((3, 2, 2), 1).total
    (3, 7)
    """

    counts: tuple[int, ...]
    rank: int
    #: This rank contributes no rows and sees its own behind those of the others.
    is_padding: bool = False

    @property
    def first(self) -> int:
        """Index of this rank's first row among the gathered ones."""
        return self.total if self.is_padding else sum(self.counts[: self.rank])

    @property
    def total(self) -> int:
        """Number of rows over all ranks."""
        return sum(self.counts)


def gather_row_counts(rows: Tensor) -> RowCounts:
    """Number of rows on each rank. Call it once and pass the result to `gather_rows` for all tensors of that length.

    Ranks cannot know it of each other: only the last batch of an epoch has unequal shards, and it may come at any
    time. The exchange runs on the host, so nothing waits for a device (0.7 ms on a machine with two cores). A group
    without a CPU backend sends the counts through the device and does wait.
    """
    if world_size() == 1:
        return RowCounts((len(rows),), 0)
    own = len(rows)
    if _Current.is_padding:
        own = 0 if _Current.participates else _REFUSED
    has_cpu_backend = "cpu:" in dist.get_backend_config(_Current.group)
    mine = torch.tensor([own], device="cpu" if has_cpu_backend else rows.device)
    numbers = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(numbers, mine, group=_Current.group)
    counts = tuple(torch.cat(numbers).tolist())
    if _REFUSED in counts:
        idle = ", ".join(str(index) for index, count in enumerate(counts) if count == _REFUSED)
        raise DataError(
            f"Expected samples for each of the {len(counts)} processes in every batch, as this loss compares the "
            f"samples of all of them; received a batch too small for that (none for rank {idle}), most likely the last "
            "of an epoch. Pass drop_last=True."
        )
    return RowCounts(counts, rank(), _Current.is_padding)


def gather_rows(rows: Tensor, counts: RowCounts | None = None) -> Tensor:
    """Rows of all ranks, in rank order, with gradients flowing back to the rank that a row came from.

    Ranks may have different numbers of rows. Pass `counts` from `gather_row_counts` to save an exchange; this rank's
    own rows begin at ``counts.first``.

    The gradient of a row is the sum of the gradients from all ranks' losses. So the sum of the ranks' gradients is the
    gradient of the summed loss, and their average, as DDP computes it, the gradient of the mean loss.

    >>> gather_rows(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    if world_size() == 1:
        return rows
    counts = counts or gather_row_counts(rows)
    if counts.is_padding:
        return torch.cat([_AllGather.apply(rows[:0], counts, _Current.group), rows])
    return _AllGather.apply(rows, counts, _Current.group)


class _AllGather(torch.autograd.Function):
    """All-gather of rows; the backward pass sums the gradients that all ranks have for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: RowCounts, group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        longest = max(counts.counts)
        mine = rows.contiguous()
        if len(mine) < longest:  # all_gather needs equal shapes
            mine = torch.cat([mine, mine.new_zeros(longest - len(mine), *mine.shape[1:])])
        parts = [torch.empty_like(mine) for _ in counts.counts]
        dist.all_gather(parts, mine, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts.counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # A reduce-scatter would send half as much, but not all backends have it, and none for unequal shards.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        counts: RowCounts = ctx.counts
        first = sum(counts.counts[: counts.rank])
        return total[first : first + counts.counts[counts.rank]], None, None


def all_reduce_sum(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, as a new tensor without gradients."""
    if world_size() == 1:
        return value.detach()
    total = value.detach().clone()
    dist.all_reduce(total, group=_Current.group)
    return total


class Shuffle(NamedTuple):
    """How rows were permuted: row ``permutation[i]`` of all ranks became row i."""

    permutation: Tensor
    counts: RowCounts


def shuffle_rows(rows: Tensor) -> tuple[Tensor, Shuffle]:
    """Shuffle rows over all ranks. Returns as many rows as this rank had, and what `unshuffle_rows` needs.

    BatchNorm then sees other samples together than those whose keys are compared ("shuffling BN" of MoCo).

    >>> shuffle_rows(torch.arange(3))[0].tolist()
    [0, 1, 2]
    """
    counts = gather_row_counts(rows)
    if world_size() == 1:
        return rows, Shuffle(torch.arange(len(rows), device=rows.device), counts)
    permutation = torch.randperm(counts.total, device=rows.device)
    dist.broadcast(permutation, group=_Current.group, group_src=0)
    every = gather_rows(rows.detach(), counts)
    mine = every[counts.first :] if counts.is_padding else every[permutation[_own(counts)]]
    return mine, Shuffle(permutation, counts)


def unshuffle_rows(rows: Tensor, shuffle: Shuffle) -> Tensor:
    """Undo `shuffle_rows`: each row returns to the rank and position it came from."""
    if world_size() == 1:
        return rows
    counts = shuffle.counts
    every = gather_rows(rows.detach(), counts)
    return every[counts.first :] if counts.is_padding else every[shuffle.permutation.argsort()[_own(counts)]]


def _own(counts: RowCounts) -> slice:
    return slice(counts.first, counts.first + counts.counts[counts.rank])


def is_dtensor(value: Any) -> bool:
    """Whether it is a `DTensor`, without importing the class (which takes most of a second).

    >>> is_dtensor(torch.zeros(2))
    False
    """
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def local_tensors(tensors: Sequence[Any]) -> list[Tensor]:
    """This rank's shard of each DTensor, sharing its memory; other tensors as they are."""
    with torch.no_grad():
        return [t.to_local() if is_dtensor(t) else t for t in tensors]
