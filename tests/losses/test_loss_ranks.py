"""Ranks with unequal shares of a batch compute the same losses and gradients as one process with the whole batch."""

from __future__ import annotations

import loss_ranks
import pytest
import torch
from torch import Tensor

from ranks import on_ranks, share_of

EXACT = ["ntxent", "moco_v3", "queue", "koleo", *loss_ranks.pair_losses()]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """The results of three ranks, whose shares of the batch differ in size."""
    return on_ranks(loss_ranks.results, 3, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """The results of one process."""
    return loss_ranks.results(0, 1)


@pytest.mark.parametrize("name", EXACT)
def test_losses_and_gradients_are_those_of_one_process(
    together: list[dict[str, Tensor]], alone: dict[str, Tensor], name: str
) -> None:
    keys = [key for key in alone if key.startswith((f"{name}.", f"padded.{name}."))]
    for key in keys:
        torch.testing.assert_close(together[0][key], alone[key], rtol=1e-8, atol=1e-10, msg=key)
    assert sum(key.startswith("padded") for key in keys) == (2 if name == "proxies" else 1)
    assert min(alone[key].abs().max() for key in keys) > 1e-3


def test_a_cross_batch_memory_holds_the_rows_of_all_ranks(
    together: list[dict[str, Tensor]], alone: dict[str, Tensor]
) -> None:
    for key in (key for key in alone if key.startswith("kept.")):
        for result in together:
            torch.testing.assert_close(result[key], alone[key], rtol=1e-12, atol=1e-12, msg=key)
    assert alone["kept.memory_state"].tolist() == [7, 1]  # 36 rows in a memory of 29


def test_without_gathering_there_are_fewer_negatives(
    together: list[dict[str, Tensor]], alone: dict[str, Tensor]
) -> None:
    assert together[0]["alone.loss0"] < alone["ntxent.loss0"] - 0.3


def test_all_ranks_have_the_center_of_the_whole_batch(together: list[dict[str, Tensor]]) -> None:
    """The reference is written out: two steps from nothing, over the rows of all shares."""
    whole = loss_ranks.problem()
    want = torch.zeros(1, loss_ranks.OUT, dtype=torch.float64)
    for step in range(2):
        shares = [whole["k1"][share_of(loss_ranks.BATCH, rank, len(together))] for rank in range(len(together))]
        rows = torch.cat([*(share[step:] for share in shares), whole["k2"] * (step + 1)])
        want = 0.9 * want + 0.1 * rows.mean(0)
    for result in together:
        torch.testing.assert_close(result["center"], want, rtol=1e-10, atol=1e-10)
        assert torch.equal(result["center"], together[0]["center"])
