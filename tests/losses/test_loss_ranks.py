"""Two processes, each with half of the batch, compute what one computes with all of it."""

from __future__ import annotations

import loss_ranks
import pytest
import torch
from torch import Tensor

from ranks import on_ranks


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """The results of both ranks."""
    return on_ranks(loss_ranks.results, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """The results of one process."""
    return loss_ranks.results(0, 1)


@pytest.mark.parametrize("name", ["ntxent", "moco_v3", "queue"])
def test_losses_and_gradients_averaged_over_ranks_are_those_of_one(
    together: list[dict[str, Tensor]], alone: dict[str, Tensor], name: str
) -> None:
    for key in (name, f"{name}_gradient"):
        mean = torch.stack([result[key] for result in together]).mean(0)
        torch.testing.assert_close(mean, alone[key], rtol=1e-6, atol=1e-6)
    assert alone[f"{name}_gradient"].abs().max() > 1e-2


def test_without_gathering_there_are_fewer_negatives(
    together: list[dict[str, Tensor]], alone: dict[str, Tensor]
) -> None:
    mean = torch.stack([result["alone"] for result in together]).mean()
    assert mean < alone["ntxent"] - 0.3


def test_all_ranks_have_the_centre_of_the_whole_batch(together: list[dict[str, Tensor]]) -> None:
    """The reference is written out: two steps from nothing, over the rows of both halves."""
    whole = loss_ranks.problem()
    want = torch.zeros(1, loss_ranks.OUT)
    for step in range(2):
        halves = whole["k1"].chunk(2)
        rows = torch.cat([*(half[step:] for half in halves), whole["k2"] * (step + 1)])
        want = 0.9 * want + 0.1 * rows.mean(0)
    for result in together:
        torch.testing.assert_close(result["center"], want, rtol=1e-6, atol=1e-6)
    assert torch.equal(together[0]["center"], together[1]["center"])
