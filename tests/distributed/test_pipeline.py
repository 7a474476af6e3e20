"""Pipelines on real ranks against the same runs written by hand for one process."""

from __future__ import annotations

from functools import partial

import pipeline_runs as runs
import pytest
import torch
from pipeline_runs import Classify, NextToken, by_hand, plain_optimizer, tied_gpt2, tower, windows_of_samples

from ranks import named, on_ranks
from toys import largest_difference

EXACT = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def two(folder):
    (folder / "two").mkdir()
    return on_ranks(partial(runs.results, str(folder)), 2, folder / "two")


@pytest.fixture(scope="module")
def four(folder, two):
    (folder / "four").mkdir()
    return on_ranks(partial(runs.results, str(folder)), 4, folder / "four")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request):
    return request.getfixturevalue("two" if request.param == 2 else "four")


@pytest.fixture(scope="module")
def alone():
    """Each run in one process."""
    return {
        "mlp": by_hand(Classify(tower()), windows_of_samples()),
        "llama": by_hand(NextToken(runs.small_llama()), runs.windows_of_tokens()),
        "gpt2": by_hand(NextToken(tied_gpt2()), runs.windows_of_tokens(packed=True)),
    }


def labels_of(found, kind):
    return sorted({key.split(":")[0] for key in found if key.startswith(kind) and ":" in key})


@pytest.mark.parametrize("kind", ["mlp", "llama", "gpt2"])
def test_every_schedule_matches_one_process(ranks, alone, kind):
    labels = labels_of(ranks[0], kind)
    assert len(labels) == {"mlp": 3, "llama": 3 if len(ranks) == 2 else 1, "gpt2": 1}[kind]
    for label in labels:
        main = named(ranks[0], f"{label}: ")
        assert set(main) == set(alone[kind])
        assert largest_difference(main, alone[kind]) < EXACT
        for other in ranks[1:]:
            seen = named(other, f"{label}: ")
            assert {"losses", "norms"} < set(seen) < set(main)
            assert largest_difference(seen, alone[kind]) < EXACT


def test_metrics_of_micro_batches_are_those_of_the_batch(two):
    task, right, size = Classify(tower()), [], []
    optimizer = plain_optimizer(task.model)
    for window in windows_of_samples():
        for batch in window:
            metrics = task.train_step(batch).metrics
            right.append(metrics["right"][0])
            size.append(metrics["size"])
        by_hand(task, [window], optimizer)
    assert torch.equal(two[0]["right"], torch.stack(right))
    assert (two[0]["size"] - torch.stack(size)).abs().max() < EXACT


def test_evaluation_is_the_same_on_every_rank(ranks, alone):
    task = Classify(tower())
    task.model.load_state_dict({name: alone["mlp"][name] for name in task.model.state_dict()})
    wanted = task.eval_step(windows_of_samples()[0][0])
    for found in ranks:
        assert abs(found["eval loss"] - wanted["loss"]) < EXACT
        assert abs(found["eval total"] - wanted["total"][0]) < EXACT
        assert torch.equal(found["eval rows"], wanted["prediction"])


def test_each_rank_holds_only_its_own_layers(ranks):
    sizes = [found["own parameters"].item() for found in ranks]
    assert sum(sizes) == sum(p.numel() for p in tower().parameters())
    assert max(sizes) < 2 * sum(sizes) / len(sizes)


@pytest.mark.parametrize("source", ["same", "one", "two"])
def test_state_is_that_of_one_process_and_resumes_anywhere(ranks, alone, source):
    found = named(ranks[0], f"from {source}: ")
    if source == "two" and len(ranks) == 2:
        assert not found  # that is "same"
        return
    steps = {"losses", "norms"}
    wanted = {name: value[2:] if name in steps else value for name, value in alone["mlp"].items()}
    assert set(found) == set(wanted)
    assert largest_difference(found, wanted) < EXACT


def test_one_process_resumes_from_a_pipeline(two, folder, alone):
    state = torch.load(folder / "2.state", weights_only=True)
    task = Classify(tower())
    task.model.load_state_dict(state["weights"])
    optimizer = plain_optimizer(task.model)
    optimizer.load_state_dict(state["optimizer"])
    went_on = by_hand(task, windows_of_samples()[2:], optimizer)
    assert list(state["weights"]) == list(tower().state_dict())
    assert largest_difference({name: went_on[name] for name in task.model.state_dict()}, alone["mlp"]) < EXACT


def test_the_full_model_is_gathered_for_export(ranks, alone):
    model = tied_gpt2()
    model.load_state_dict({name: alone["gpt2"][name] for name in model.state_dict()})
    wanted = NextToken(model).train_step(runs.windows_of_tokens()[0][0]).sum
    assert abs(ranks[0]["gpt2 exported"] - wanted) < 1e-8
    assert ranks[0]["gpt2 tied"]


def test_probing_shapes_has_no_side_effects(ranks):
    micro_batches = 2 * len(ranks)  # of the two batches of a step
    for rank, found in enumerate(ranks):
        torch.manual_seed(9)
        if rank == len(ranks) - 1:
            torch.stack([torch.rand(()) for _ in range(micro_batches)])
        assert torch.equal(found["random state"], torch.get_rng_state())
        assert found["batches seen"].eq(micro_batches).all()


def test_autocast_reaches_every_stage(ranks):
    wanted = by_hand(runs.Rounded(runs.small_llama().float()), runs.windows_of_tokens())
    plain = by_hand(NextToken(runs.small_llama().float()), runs.windows_of_tokens())
    losses = ranks[0]["bf16: losses"]
    assert (losses - wanted["losses"]).abs().max() < 1e-2
    assert (losses - plain["losses"]).abs().max() > 1e-6  # fp32 would be this near


def test_what_a_pipeline_cannot_do_is_refused_on_every_rank(ranks):
    assert [found["refused"].item() for found in ranks] == [2] * len(ranks)


def test_a_tied_weight_counts_once_and_random_numbers_and_rows_stay_per_rank(ranks):
    every = sum(p.numel() for p in tied_gpt2().parameters())
    assert [found["counted"].item() for found in ranks] == [every] * len(ranks)
    assert [found["stream"].item() for found in ranks] == list(range(len(ranks)))
    assert [found["rows"].tolist() for found in ranks] == [[rank] for rank in range(len(ranks))]
