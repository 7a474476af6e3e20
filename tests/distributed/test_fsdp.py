"""Divided models against one process and a loop written by hand, in float64."""

import copy
from functools import partial

import pytest
import torch
from fsdp_runs import (
    HALF,
    STEPS,
    TASKS,
    all_weights,
    by_hand,
    follow,
    on_four,
    on_two,
    opened,
    optimizer_by_hand,
    trainer_of,
    windows,
)
from torch import nn

from ranks import named, on_ranks
from toys import MeanTask, largest_difference, weights
from trainformer.core.errors import BadArgument, DataError
from trainformer.distributed.fsdp import FSDP
from trainformer.distributed.optimizer_state import NamedParameters, unsharded_optimizer_state
from trainformer.distributed.process_group import TorchProcessGroup

TOLERANCE = 1e-8


class SingleProcess:
    """The runs of a single process, by hand, with their states in the middle."""

    def __init__(self, folder):
        self.results, self.halfway = {}, {}
        for name, make in TASKS.items():
            task = make()
            optimizer = optimizer_by_hand(task)
            losses = [by_hand(task, optimizer, 0, HALF)]
            states = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict(), "beside": task.beside()}
            self.halfway[name] = copy.deepcopy(states)
            torch.save(states, folder / f"{name}-one.pt")
            losses.append(by_hand(task, optimizer, HALF, STEPS))
            self.results[name] = {"losses": torch.cat(losses), **all_weights(task)}

    def after(self, name, first=0):
        found = self.results[name]
        return {**found, "losses": found["losses"][first:]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def alone(folder):
    return SingleProcess(folder)


@pytest.fixture(scope="module")
def four(folder, alone, tmp_path_factory):
    return on_ranks(partial(on_four, folder=str(folder)), 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def two(folder, four, tmp_path_factory):
    return on_ranks(partial(on_two, folder=str(folder)), 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_four_ranks_match_one_process(name, alone, four):
    for found in four:
        own = named(found, f"{name}/")
        assert own.keys() == alone.after(name).keys()
        assert largest_difference(own, alone.after(name)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_two_ranks_resume_from_four(name, alone, two):
    for found in two:
        assert largest_difference(named(found, f"{name}-resumed/"), alone.after(name, HALF)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_one_process_resumes_from_four_ranks(name, alone, four, folder):
    task = TASKS[name](seed=5)
    optimizer = optimizer_by_hand(task)
    saved = folder / f"{name}-four"
    task.model.load_state_dict(opened(saved, "model").unsharded())
    optimizer.load_state_dict(unsharded_optimizer_state(opened(saved, "optimizer")))
    task.load_beside(opened(saved, "beside").unsharded())
    losses = by_hand(task, optimizer, HALF, STEPS)
    assert largest_difference({"losses": losses, **all_weights(task)}, alone.after(name, HALF)) < TOLERANCE


@pytest.mark.slow
def test_two_ranks_resume_from_one_process(alone, two):
    for found in two:
        assert largest_difference(named(found, "from-one/"), alone.after("teaching", HALF)) < TOLERANCE


@pytest.mark.slow
def test_the_full_model_matches_the_files_and_keeps_tied_weights(alone, two, folder):
    whole = [torch.load(folder / f"whole-{rank}.pt", weights_only=True) for rank in range(2)]
    saved = opened(folder / "telling-two", "model").unsharded()
    for found in whole:
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], saved[key]) for key in saved)
    assert saved["lm_head.weight"] is saved["model.embed_tokens.weight"]
    model = TASKS["telling"]().model
    model.load_state_dict(saved)
    assert largest_difference(model.state_dict(), named(alone.after("telling"), "model.")) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_evaluation_uses_the_model_or_its_average_and_leaves_both_sharded(name, two):
    task = TASKS[name]()
    average = copy.deepcopy(task.model)
    by_hand(task, optimizer_by_hand(task), 0, 2)
    follow(average, task.model)
    batch = windows(task)[0][0]
    with torch.no_grad():
        expected = {f"{name}/eval": torch.stack(task.eval_step(batch)["loss"])}
        task.model = average
        expected[f"{name}/eval-average"] = torch.stack(task.eval_step(batch)["loss"])
    scalars = sum(p.ndim == 0 for p in average.parameters())
    for found in two:
        assert largest_difference({key: found[key] for key in expected}, expected) < TOLERANCE
        assert (~found[f"{name}/divided"]).sum() == 2 * scalars
    held = [found[f"{name}/held"].tolist() for found in two]
    assert sum(here for here, _ in held) == held[0][1] - 2 * scalars


@pytest.mark.slow
def test_an_overflow_on_one_rank_counts_on_all(two):
    assert [found["flag"].item() for found in two] == [1, 1]


@pytest.mark.slow
def test_one_process_resumes_a_run_of_two_ranks_with_the_same_result(two, folder, tmp_path):
    assert (folder / "run/checkpoints/step_00000005/model.tree.pt").exists()
    resumed = trainer_of(folder, "single", steps=9).fit()
    alone = trainer_of(tmp_path, "single", steps=9).fit()
    assert resumed.state.step == alone.state.step == 9
    assert largest_difference(weights(resumed.task), weights(alone.task)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", partial(torch.optim.SGD, momentum=0.9)),
        ("adagrad", torch.optim.Adagrad),
        ("nadam", torch.optim.NAdam),
    ],
)
def test_other_optimizers_match_one_process(name, make, two):
    task = TASKS["teaching"]()
    losses = by_hand(task, optimizer_by_hand(task, make))
    assert all((found[f"{name}/losses"] - losses).abs().max() < TOLERANCE for found in two)


@pytest.mark.slow
def test_mixed_precision_is_close_and_an_overflow_skips_the_step(two):
    for found in two:
        whole, short, half = (found[f"{precision}/losses"] for precision in ("no", "bf16", "fp16"))
        assert (whole - short).abs().max() < 0.02 * whole.max()
        assert not torch.equal(whole, short)
        assert half.isfinite().all()
        # A scale of 2 ** 40 overflows: it is halved with every step, on all ranks alike, and nothing is learned.
        assert found["fp16/scale"] == 2.0 ** (40 - STEPS)
    assert torch.equal(two[0]["fp16/losses"], two[1]["fp16/losses"])


@pytest.mark.slow
def test_what_cannot_be_sharded_is_refused(two):
    assert all(found["refused"] == 7 for found in two)


# -- one process -------------------------------------------------------------------------------------------


def test_one_process_behaves_like_the_single_strategy():
    task, strategy = MeanTask(), FSDP(cpu_offload=True)
    strategy.setup_environment("cpu", 1.0)
    before = task.model
    strategy.prepare(task, torch.device("cpu"))
    optimizer = strategy.prepare_optimizer(torch.optim.SGD(task.model.parameters(), lr=0.1))
    assert task.model is before
    assert strategy.unsharded_model() is before
    assert not strategy.shards_state
    assert strategy.train_step() is None
    assert strategy.optimizer_state(optimizer).keys() == optimizer.state_dict().keys()
    assert strategy.infer(lambda batch: batch + 1, 2) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 0}, "replicas to be a positive integer"),
        ({"param_dtype": "bf17"}, "param_dtype to be 'bf16'"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward to be True, False or a number"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(BadArgument, match=words):
        FSDP(**options)


def test_replicas_must_divide_the_world_size():
    strategy = FSDP(replicas=3)
    strategy.process_group = TorchProcessGroup(0, 4)
    with pytest.raises(BadArgument, match="4 processes can hold 1, 2, 4 replicas"):
        strategy.prepare(MeanTask(), torch.device("cpu"))


# -- the optimizer's state by names ------------------------------------------------------------------------


def adam_of(model, order=None):
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in names]} for names in order or [list(named)]], lr=0.1)
    return optimizer, NamedParameters(optimizer, named)


def stepped(model, optimizer):
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, i + 1.0)
    optimizer.step()


def test_a_state_by_names_fits_other_groups_in_another_order():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer, names = adam_of(model)
    stepped(model, optimizer)
    other, other_names = adam_of(model, [["1.bias", "0.weight"], ["1.weight", "0.bias"]])
    other_names.load(other, names.state_of(optimizer))
    for p in model.parameters():
        assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    back = unsharded_optimizer_state(names.state_of(optimizer))
    assert [group["params"] for group in back["param_groups"]] == [[0, 1, 2, 3]]
    assert torch.equal(back["state"][2]["exp_avg"], optimizer.state[model[1].weight]["exp_avg"])


def test_a_state_of_other_parameters_or_shapes_is_refused_and_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer, names = adam_of(model)
    stepped(model, optimizer)
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    wide = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    for changed, words in ((other, "missing: 2.bias, 2.weight"), (wide, "exp_avg of 0.weight: \\(3, 2\\) in the")):
        theirs, their_names = adam_of(changed)
        with pytest.raises(DataError, match=words):
            their_names.load(theirs, names.state_of(optimizer))
        assert not theirs.state


def test_an_optimizer_of_other_parameters_is_refused():
    model = nn.Linear(2, 3)
    with pytest.raises(BadArgument, match="created after sharding"):
        NamedParameters(torch.optim.SGD(nn.Linear(2, 3).parameters()), dict(model.named_parameters()))
