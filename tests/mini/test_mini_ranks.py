"""Several ranks: gradients are all-reduced once per step and match a single process with all the data."""

import pytest
import torch
from mini_ranks import STEPS, divided_by_the_user, flat, gradients_exchanged
from mini_toys import by_hand

from ranks import on_ranks
from toys import classes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def started(runs, folder):
    return folder, on_ranks(runs, 2, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return started(gradients_exchanged, tmp_path_factory.mktemp("ranks"))


def test_gradients_are_all_reduced_once_per_step(found):
    for rank in found[1]:
        quiet, loud = rank["exchanges"].tolist()
        assert quiet == STEPS  # one bucket, one exchange a step
        assert loud == 4 * STEPS


def test_gradients_match_a_single_process_with_all_the_data(found):
    _, (first, second) = found
    x, y = classes(32)
    order = [int((x == row).all(-1).nonzero()) for rank in (first, second) for row in rank["seen"]]
    shares = torch.tensor(order).view(2, STEPS * 4, 2)
    batches = [(x[i], y[i]) for i in shares.transpose(0, 1).reshape(STEPS, -1)]
    model, _ = by_hand(batches, STEPS)
    assert (first["weights"] - flat(model)).abs().max() < 1e-12
    assert torch.equal(first["weights"], second["weights"])
    assert (first["weights"] - first["loud"]).abs().max() < 1e-12


def test_logs_are_means_over_ranks_and_written_by_rank_0(found):
    _, (first, second) = found
    assert first["dry"].tolist() == [False] * STEPS
    assert second["dry"].tolist() == [True] * STEPS
    assert torch.equal(first["logged"], second["logged"])
    assert (first["logged"] - (first["own"] + second["own"]) / 2).abs().max() < 1e-6


def test_one_rank_saves_and_all_resume(found):
    folder, (first, second) = found
    assert sorted(p.name for p in (folder / "ws").iterdir()) == [
        "checkpoints",
        "config.json",
        "log.txt",
        "metrics.jsonl",
        "records.jsonl",
        "status.json",
    ]
    names = sorted(p.name for p in (folder / "ws/checkpoints").glob("checkpoint_step_*"))
    assert names == [f"checkpoint_step_{n}.pt" for n in (2, 3, 4, 5)]
    assert first["drawn"].item() == second["drawn"].item() == STEPS + 2
    assert torch.equal(first["resumed"], first["whole"])
    assert torch.equal(first["resumed"], second["resumed"])


def test_a_sharded_model_trains_like_a_replicated_one(tmp_path):
    """Its global gradient norm is clipped, and it resumes from a full state dict."""
    _, (first, second) = started(divided_by_the_user, tmp_path)
    assert (first["divided"] - first["weights"]).abs().max() < 1e-10
    assert torch.equal(first["divided"], second["divided"])
    assert torch.equal(first["norms"], second["norms"])
    assert first["norms"].min() > 0.05  # all of them were clipped
