"""One, two and four processes train the same model: losses, metrics and weights do not depend on their number."""

from functools import partial

import pytest
import torch
from training_runs import training

from ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

RUNS = [  # run, strategy, settings
    *("mlp,ddp", "mlp,ddp,accumulation_steps=3", "llama,ddp", "llama,ddp,accumulation_steps=2", "simclr,ddp"),
    *("mlp,ddp,dispatch_batches=1", "mlp,fsdp", "llama,fsdp,accumulation_steps=2", "simclr,fsdp"),
    *("mlp,pipeline", "llama,pipeline", "sets,ddp", "sets,fsdp", "sets,pipeline"),
    *("mixture,ddp,accumulation_steps=2", "mixture,fsdp"),
    *("kto,ddp,accumulation_steps=2", "kto,fsdp", "cpo,ddp,accumulation_steps=2", "reward,ddp"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    runs = partial(training, specs=RUNS)
    return {world: on_ranks(runs, world, tmp_path_factory.mktemp(f"numbers{world}")) for world in (1, 2, 4)}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("world", [2, 4])
def test_the_world_size_changes_nothing(results, run, world):
    alone = {key: value for key, value in results[1][0].items() if key.startswith(f"{run} ")}
    assert len(alone) > 6
    for number, rank in enumerate(results[world]):
        there = {key: value for key, value in alone.items() if key in rank}
        assert len(there) == len(alone) or (number > 0 and "pipeline" in run)
        for key, value in there.items():
            assert rank[key].shape == value.shape, key
            difference = (rank[key] - value).abs().max().item()
            assert difference <= 1e-8, (key, difference)


def test_losses_fall_and_every_sample_counts_once_per_epoch(results):
    for run, samples in (("mlp,ddp", 3 * 37), ("llama,ddp", 2 * 14), ("simclr,ddp", 2 * 30)):
        losses = results[4][0][f"{run} train/loss"]
        assert losses[-3:].mean() < losses[:3].mean()
        assert results[4][3][f"{run} counts"][1] == samples
    assert len(results[4][0]["mlp,fsdp train/positive"]) == 15  # values that the task logs itself
    assert torch.allclose(results[4][1]["mlp,ddp val/logged"], results[1][0]["mlp,ddp val/loss"], rtol=0, atol=1e-12)
    assert results[4][3]["sets,ddp val/small/rows"].tolist() == [3, 3, 3]
    assert results[4][3]["sets,ddp val/clean/rows"].tolist() == [13] * 8  # every second of 15 steps, and the last
    assert len(results[4][0]["sets,ddp train/lr"].unique()) > 4
    mixed = {key: value for key, value in results[4][0].items() if key.startswith("mixture,fsdp train/")}
    assert len(mixed) == 11
    assert mixed["mixture,fsdp train/passes/short"][-1] > 2  # repeated
    assert results[4][2]["mlp,ddp val/rows"].unique().tolist() == [13]
    assert torch.unique(results[2][0]["mlp,ddp val/ordered"]).numel() == 3  # one evaluation an epoch, each its own
