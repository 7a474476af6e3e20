"""What losses and momentum networks share over ranks. With one process every function is the identity, at no cost.

Owns the gathering of rows with gradients, however many rows each rank brings, sums, and the shuffling of rows. "Ranks"
are those of `use_group`: all processes, unless some of them hold parts of one model and compute the same samples.

Everything here is a collective: every rank must make the same calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainformer.core.errors import DataError

_REFUSED = -1  # said instead of a number of rows


class _Place:
    """Where this process stands: its group, and whether what it computes now is padding."""

    group: Any = None
    is_padding = False
    takes_part = False


def use_group(group: Any) -> None:
    """Let the functions of this module mean the ranks of a process group; None means all of them, as at first.

    Tensor and pipeline parallelism set the group of the ranks that compute different samples.
    """
    _Place.group = group


def data_group() -> Any:
    """The process group of `use_group`; None for all processes."""
    return _Place.group


def world_size() -> int:
    """Number of processes that train together.

    >>> world_size()
    1
    """
    return dist.get_world_size(_Place.group) if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process among them, from 0."""
    return dist.get_rank(_Place.group) if world_size() > 1 else 0


def is_first() -> bool:
    """Whether this is the first of all processes, whatever their group: the one that prints and records."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def is_first_here() -> bool:
    """Whether this is the first process of its machine."""
    return is_first() or os.environ.get("LOCAL_RANK") == "0"


@contextmanager
def padding(*, takes_part: bool = False) -> Iterator[None]:
    """Within this context what is computed is padding: this rank has no sample of a batch that others have some of.

    Statistics over ranks go without it. Rows of padding must not be taken for samples by anyone: `gather_rows` raises
    `DataError`, on all ranks. With `takes_part` it gives the other ranks nothing instead, and this one the rows of all
    others with its own behind them, so that its loss, which does not count, can be computed. Whoever keeps something
    of a batch beyond the step (a queue, a centre) must then leave out padding: see `is_padding`.

    >>> with padding():
    ...     is_padding()
    True
    """
    before = _Place.is_padding, _Place.takes_part
    _Place.is_padding, _Place.takes_part = True, takes_part
    try:
        yield
    finally:
        _Place.is_padding, _Place.takes_part = before


def is_padding() -> bool:
    """Whether what is being computed is padding."""
    return _Place.is_padding


class Shares(NamedTuple):
    """How many rows each rank brings, and which of the ranks this one is. Their order is that of the ranks.

    >>> Shares((3, 2, 2), 1).first, Shares((3, 2, 2), 1).total
    (3, 7)
    """

    counts: tuple[int, ...]
    rank: int
    #: This rank brings nothing, and sees its own rows behind those of the others.
    is_apart: bool = False

    @property
    def first(self) -> int:
        """The place of this rank's first row among the gathered ones."""
        return self.total if self.is_apart else sum(self.counts[: self.rank])

    @property
    def total(self) -> int:
        """Number of rows that all ranks bring together."""
        return sum(self.counts)


def row_shares(rows: Tensor) -> Shares:
    """How many rows each rank brings: to be asked once, and handed to every `gather_rows` of tensors as long as `rows`.

    Ranks cannot know it of each other. A batch may end anywhere, and only then do shares differ; a rank that relied on
    what it saw last would wait for rows that do not come. So they tell each other, on the host, where the numbers are:
    nobody waits for a device, which meanwhile works off what it has been given. That costs a message between CPUs
    (0.7 ms on a machine of two cores). A group without a backend for the CPU sends it through the device, and waits.
    """
    if world_size() == 1:
        return Shares((len(rows),), 0)
    own = len(rows)
    if _Place.is_padding:
        own = 0 if _Place.takes_part else _REFUSED
    through_host = "cpu:" in dist.get_backend_config(_Place.group)
    mine = torch.tensor([own], device="cpu" if through_host else rows.device)
    numbers = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(numbers, mine, group=_Place.group)
    counts = tuple(torch.cat(numbers).tolist())
    if _REFUSED in counts:
        idle = ", ".join(str(index) for index, count in enumerate(counts) if count == _REFUSED)
        raise DataError(
            f"Expected samples for each of the {len(counts)} processes in every batch, as this loss compares the "
            f"samples of all of them; received a batch too small for that (none for rank {idle}), most likely the last "
            "of an epoch. Pass drop_last=True."
        )
    return Shares(counts, rank(), _Place.is_padding)


def gather_rows(rows: Tensor, shares: Shares | None = None) -> Tensor:
    """The rows of all ranks, in the order of the ranks; gradients flow back to the rank a row came from.

    Ranks may bring different numbers of rows. `shares` says how many; without, they tell each other (`row_shares`).
    The place of one's own rows is ``shares.first``.

    The gradient of a row is the sum over all ranks of what their losses say of it. So the sum of the ranks' gradients
    is the gradient of the sum of their losses, and their average, as data-parallel training takes it, that of the mean.

    >>> gather_rows(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    if world_size() == 1:
        return rows
    shares = shares or row_shares(rows)
    if shares.is_apart:
        return torch.cat([_Gather.apply(rows[:0], shares, _Place.group), rows])
    return _Gather.apply(rows, shares, _Place.group)


class _Gather(torch.autograd.Function):
    """Rows of all ranks; backwards, the sum of the gradients that all ranks have for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: Shares, group: Any) -> Tensor:
        ctx.shares, ctx.group = shares, group
        most = max(shares.counts)
        mine = rows.contiguous()
        if len(mine) < most:  # messages are equally long
            mine = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
        parts = [torch.empty_like(mine) for _ in shares.counts]
        dist.all_gather(parts, mine, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, shares.counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # A reduce-scatter would send half as much, but not all backends have it, and none for unequal shares.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        shares: Shares = ctx.shares
        first = sum(shares.counts[: shares.rank])
        return total[first : first + shares.counts[shares.rank]], None, None


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, as a new tensor without gradients."""
    if world_size() == 1:
        return value.detach()
    total = value.detach().clone()
    dist.all_reduce(total, group=_Place.group)
    return total


class Shuffle(NamedTuple):
    """How rows were dealt out: row ``permutation[i]`` of all became row i."""

    permutation: Tensor
    shares: Shares


def shuffle_rows(rows: Tensor) -> tuple[Tensor, Shuffle]:
    """Rows of all ranks dealt out anew at random: this rank's new share, as large as before, and how to undo it.

    BatchNorm then sees other samples together than those whose keys are compared ("shuffling BN" of MoCo).

    >>> shuffle_rows(torch.arange(3))[0].tolist()
    [0, 1, 2]
    """
    shares = row_shares(rows)
    if world_size() == 1:
        return rows, Shuffle(torch.arange(len(rows), device=rows.device), shares)
    permutation = torch.randperm(shares.total, device=rows.device)
    dist.broadcast(permutation, group=_Place.group, group_src=0)
    every = gather_rows(rows.detach(), shares)
    mine = every[shares.first :] if shares.is_apart else every[permutation[_own(shares)]]
    return mine, Shuffle(permutation, shares)


def unshuffle_rows(rows: Tensor, shuffle: Shuffle) -> Tensor:
    """What became of the rows that `shuffle_rows` dealt out, back on the rank and at the place they came from."""
    if world_size() == 1:
        return rows
    shares = shuffle.shares
    every = gather_rows(rows.detach(), shares)
    return every[shares.first :] if shares.is_apart else every[shuffle.permutation.argsort()[_own(shares)]]


def _own(shares: Shares) -> slice:
    return slice(shares.first, shares.first + shares.counts[shares.rank])


def is_divided(value: Any) -> bool:
    """Whether it is a `DTensor`. To import the class for that would take most of a second in every process.

    >>> is_divided(torch.zeros(2))
    False
    """
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def local_parts(tensors: Sequence[Any]) -> list[Tensor]:
    """What this rank holds of each tensor, in the same memory; of a tensor that is not divided, all of it."""
    with torch.no_grad():
        return [t.to_local() if is_divided(t) else t for t in tensors]
