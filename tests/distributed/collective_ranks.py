"""What four processes exchange, for the tests of `utils.distributed`."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainformer.core.errors import DataError
from trainformer.losses import nt_xent_loss
from trainformer.utils.distributed import (
    all_reduce_sum,
    gather_row_counts,
    gather_rows,
    padding,
    rank,
    set_data_parallel_group,
    shuffle_rows,
    unshuffle_rows,
    world_size,
)

COUNTS = (3, 0, 2, 1)
KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def rows_of(index: int, count: int, kind: torch.dtype = torch.float64) -> Tensor:
    """Rows that tell where they come from."""
    return (100 * index + torch.arange(6 * count).view(count, 2, 3)).to(kind)


def results(index: int, world: int) -> dict[str, Tensor]:
    """Everything, with one start of the processes. What is deprecated in torch is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gathered(index) | padded(index) | grouped(index)
    return found | compiled(index)


def gathered(index: int) -> dict[str, Tensor]:
    """Unequal numbers of rows, of all types; the gradients of a loss that differs from rank to rank."""
    found = {}
    for kind in KINDS:
        found[f"rows.{kind}"] = gather_rows(rows_of(index, COUNTS[index], kind))
    own = rows_of(index, COUNTS[index]).requires_grad_()
    shares = gather_row_counts(own)
    every = gather_rows(own, shares)
    (every.square().sum((1, 2)) * loss_weights(index)).sum().backward()
    assert own.grad is not None
    assert not gather_rows(own.detach(), shares).requires_grad
    return found | {"gradient": own.grad, "place": torch.tensor([shares.first, shares.total])}


def loss_weights(index: int) -> Tensor:
    """How much the loss of a rank depends on each of all rows."""
    return torch.arange(1.0, sum(COUNTS) + 1).double() ** index


def padded(index: int) -> dict[str, Tensor]:
    """A last batch with nothing for the last two ranks, refused at first, then taken part in."""
    rows = rows_of(index, 2).requires_grad_()
    if index < 2:
        with pytest.raises(DataError, match=r"rank 2, 3.*drop_last=True") as refused:
            nt_xent_loss(rows.flatten(1), rows.flatten(1))
    else:
        with padding(), pytest.raises(DataError, match=r"rank 2, 3.*drop_last=True") as refused:
            nt_xent_loss(rows.flatten(1), rows.flatten(1))
    assert str(refused.value).startswith("Expected samples for each of the 4 processes")
    found = {"after": gather_rows(torch.tensor([index]))}  # nobody is a message ahead or behind
    if index < 2:
        every, first, back = _exchanged(rows)
    else:
        with padding(participates=True):
            every, first, back = _exchanged(rows)
    every.sum().backward()
    assert rows.grad is not None
    return found | {"seen": every.detach(), "first": first, "dealt_back": back, "seen_gradient": rows.grad}


def _exchanged(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shares = gather_row_counts(rows)
    dealt, shuffle = shuffle_rows(rows)
    return gather_rows(rows, shares), torch.tensor(shares.first), unshuffle_rows(dealt, shuffle)


def grouped(index: int) -> dict[str, Tensor]:
    """Two models of two ranks each: ranks 0 and 1 compute the same samples, and 2 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    set_data_parallel_group(groups[index % 2])
    rows = rows_of(index, 1 + index).requires_grad_()
    torch.manual_seed(index)
    dealt, shuffle = shuffle_rows(rows)
    every = gather_rows(rows)
    every.sum().backward()
    found = {
        "group": torch.tensor([world_size(), rank()]),
        "group_rows": every.detach(),
        "group_sum": all_reduce_sum(torch.tensor(index)),
        "group_back": unshuffle_rows(dealt, shuffle),
        "group_gradient": rows.grad,
    }
    set_data_parallel_group(None)
    return found | {"all": torch.tensor([world_size(), rank()])}


def compiled(index: int) -> dict[str, Tensor]:
    """A loss inside torch.compile, with unequal shares."""
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 7, 4, dtype=torch.float64)[:, [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 7)][index]]
    found = {}
    for name, function in (("eager", nt_xent_loss), ("compiled", torch.compile(nt_xent_loss, backend="eager"))):
        leaf = z1.clone().requires_grad_()
        function(leaf, z2).backward()
        assert leaf.grad is not None
        found[name] = leaf.grad
    return found
