"""Rows that ranks exchange: unequal numbers of them, with gradients, within groups, and with padding."""

from __future__ import annotations

from pathlib import Path

import collective_ranks
import pytest
import torch
from collective_ranks import COUNTS, KINDS, rows_of
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException

from ranks import on_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """The results of four ranks."""
    return on_ranks(collective_ranks.results, 4, tmp_path_factory.mktemp("ranks"))


def test_unequal_numbers_of_rows_are_gathered_in_rank_order(found: list[dict[str, Tensor]]) -> None:
    for kind in KINDS:
        want = torch.cat([rows_of(index, count, kind) for index, count in enumerate(COUNTS)])
        for result in found:
            assert torch.equal(result[f"rows.{kind}"], want), kind
    assert [result["place"].tolist() for result in found] == [[0, 6], [3, 6], [3, 6], [5, 6]]


def test_the_gradient_of_a_row_is_the_sum_over_all_losses(found: list[dict[str, Tensor]]) -> None:
    """Against one process that has all rows and adds up the losses of all ranks."""
    every = torch.cat([rows_of(index, count) for index, count in enumerate(COUNTS)]).requires_grad_()
    losses = [(every.square().sum((1, 2)) * collective_ranks.loss_weights(index)).sum() for index in range(4)]
    torch.stack(losses).sum().backward()
    assert every.grad is not None
    for result, want in zip(found, every.grad.split(COUNTS), strict=True):
        torch.testing.assert_close(result["gradient"], want, rtol=1e-14, atol=0)


def test_padding_is_refused_on_all_ranks_which_stay_in_sync(found: list[dict[str, Tensor]]) -> None:
    """That all of them raised is asserted where they did."""
    for result in found:
        assert result["after"].tolist() == [0, 1, 2, 3]


def test_participating_padding_is_invisible_to_other_ranks(found: list[dict[str, Tensor]]) -> None:
    real = torch.cat([rows_of(0, 2), rows_of(1, 2)])
    for index, result in enumerate(found):
        apart = index >= 2
        assert torch.equal(result["seen"], torch.cat([real, rows_of(index, 2)]) if apart else real)
        assert int(result["first"]) == (4 if apart else 2 * index)
        assert torch.equal(result["dealt_back"], rows_of(index, 2))
        # The sum of all rows has the gradient 1 on each rank that sees a row: all four, or the padding's own alone.
        assert result["seen_gradient"].unique().tolist() == [1.0 if apart else 4.0]


def test_collectives_stay_within_the_data_parallel_group(found: list[dict[str, Tensor]]) -> None:
    for index, result in enumerate(found):
        partners = [index % 2, index % 2 + 2]
        assert result["group"].tolist() == [2, index // 2]
        assert result["all"].tolist() == [4, index]
        assert torch.equal(result["group_rows"], torch.cat([rows_of(i, 1 + i) for i in partners]))
        assert int(result["group_sum"]) == sum(partners)
        assert torch.equal(result["group_back"], rows_of(index, 1 + index))
        assert result["group_gradient"].unique().tolist() == [2.0]


def test_a_compiled_loss_communicates_the_same(found: list[dict[str, Tensor]]) -> None:
    for result in found:
        assert torch.equal(result["compiled"], result["eager"])
        assert result["eager"].abs().max() > 1e-3


def broken(index: int, world: int) -> dict[str, Tensor]:
    if index == 1:
        raise ValueError("rank one cannot go on")
    return {}


def test_an_exception_on_a_rank_reaches_the_parent(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="rank one cannot go on"):
        on_ranks(broken, 2, tmp_path)
