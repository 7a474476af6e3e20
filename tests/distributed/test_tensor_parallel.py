"""Layers divided over ranks against one process and a loop written by hand, in float64; and plans for dividing them."""

from functools import partial

import pytest
import torch
from fsdp_runs import HALF, STEPS, all_weights, by_hand, opened, optimizer_by_hand
from tensor_parallel_runs import MAKE, Divisible, fresh, on_four, on_two, tied_llama, untied_llama
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel
from training_runs import average_of, found, run_llama
from transformers import GPT2LMHeadModel

from ranks import named, on_ranks
from text_toys import gpt2
from toys import MeanTask, largest_difference, same
from trainformer.core.errors import BadArgument
from trainformer.distributed.optimizer_state import unsharded_optimizer_state
from trainformer.distributed.tensor_parallel import TensorParallel, plan_layers

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    return on_ranks(partial(on_two, folder=str(folder)), 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(folder, two, tmp_path_factory):
    return on_ranks(partial(on_four, folder=str(folder)), 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone():
    results = {}
    for name in MAKE:
        task = fresh(name)
        losses = by_hand(task, optimizer_by_hand(task))
        results[name] = {"losses": losses, **all_weights(task)}
    return results


def difference(ranks, run, expected):
    """How far the ranks are from one process; what they found has to be the same on each, to the last bit."""
    first, *others = [named(found, f"{run}/") for found in ranks]
    alike = all(same(other, first) for other in others)
    return largest_difference(first, expected) if alike and first.keys() == expected.keys() else float("nan")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["untied/2", "qwen2/None", "qwen3/None", "by-hand/1"])
def test_two_ranks_match_one_process(run, alone, two):
    assert difference(two, run, alone[run.partition("/")[0]]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("run", ["tied/2", "by-hand/2", "by-hand/4"])
def test_four_ranks_match_one_process(run, alone, four):
    assert difference(four, run, alone[run.partition("/")[0]]) < TOLERANCE


def second_half(results):
    return {**results, "losses": results["losses"][HALF:]}


@pytest.mark.slow
def test_steps_can_be_undone_with_a_copy_of_the_state(alone, two):
    assert difference(two, "untied-again/2", second_half(alone["untied"])) < TOLERANCE


@pytest.mark.slow
def test_four_ranks_resume_from_two(alone, four):
    assert difference(four, "untied-resumed/4", second_half(alone["untied"])) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("run", ["untied-two", "tied-four"])
def test_one_process_resumes_from_several_ranks(run, alone, four, folder):
    name = run.partition("-")[0]
    task = fresh(name, seed=5)
    optimizer = optimizer_by_hand(task)
    task.model.load_state_dict(opened(folder / run, "model").unsharded())
    optimizer.load_state_dict(unsharded_optimizer_state(opened(folder / run, "optimizer")))
    losses = by_hand(task, optimizer, HALF, STEPS)
    assert largest_difference({"losses": losses, **all_weights(task)}, second_half(alone[name])) < TOLERANCE


@pytest.mark.slow
def test_the_full_model_matches_one_process(alone, two, folder):
    for rank in range(2):
        state = torch.load(folder / f"whole-{rank}.pt", weights_only=True)
        expected = {k.removeprefix("model."): v for k, v in alone["untied"].items() if k != "losses"}
        assert largest_difference(state, expected) < TOLERANCE


@pytest.mark.slow
def test_a_copy_is_independent_and_sharded(two, four):
    assert all(torch.equal(rank["copy"], rank["copied"]) for rank in (*two, *four))
    assert [rank["tied"].tolist() for rank in (two[0], four[0])] == [[False, False], [True, True]]
    norms = sum(p.numel() for name, p in fresh("untied").model.named_parameters() if "norm" in name)
    for rank in two:
        here, whole = rank["held"].tolist()
        assert here < 0.55 * whole
    assert sum(rank["held"][0] for rank in two) == two[0]["held"][1] + norms


@pytest.mark.slow
def test_requests_reach_all_ranks_and_rows_are_gathered_between_models_only(four):
    assert [rank["requests"].tolist() for rank in four] == [[False, True]] * 4
    assert [rank["rows"].tolist() for rank in four] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.slow
def test_a_replicated_layer_with_sharded_inputs_is_refused_if_missing_in_the_plan(two):
    assert all(rank["refused"] for rank in two)


@pytest.mark.slow
def test_the_trainer_gives_the_same_for_any_world_size(two, four, tmp_path):
    trainer = run_llama("single", run_dir=tmp_path, ema=0.9).fit()
    expected = {**found(trainer), **average_of(trainer)}
    for ranks in (two, four):
        assert difference(ranks, "trainer", expected) < TOLERANCE
        assert ranks[0]["trainer/counts"][1] == 2 * 14


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_the_trainer_resumes_in_one_process(four, folder, tmp_path, world):
    uninterrupted = run_llama("single", run_dir=tmp_path / "all", ema=0.9).fit()
    saved = folder / f"runs-{world}" / "checkpoints" / "step_00000004"
    resumed = run_llama("single", run_dir=tmp_path / "rest", resume=saved, ema=0.9).fit()
    weights = named(found(resumed), "weight ")
    assert len(weights) > 30
    assert largest_difference(weights, named(found(uninterrupted), "weight ")) < TOLERANCE
    assert largest_difference(average_of(resumed), average_of(uninterrupted)) < TOLERANCE


# -- plans; one process ------------------------------------------------------------------------------------


def test_one_process_behaves_like_the_single_strategy():
    task, strategy = MeanTask(), TensorParallel()
    strategy.setup_environment("cpu", 1.0)
    strategy.prepare(task, torch.device("cpu"))
    assert type(task.model[0]) is nn.Linear
    assert strategy.unsharded_model() is task.model
    assert not strategy.shards_state
    assert strategy.train_step() is None
    with pytest.raises(BadArgument, match="size to divide the number of processes"):
        TensorParallel(size=2).setup_environment("cpu", 1.0)


def names_of(model, plan, size=2):
    return {layer.name for layer in plan_layers(model, plan, size)}


def test_built_in_plans_are_found_and_tied_layers_follow():
    model = tied_llama().model
    divided = names_of(model, "auto")
    assert divided == {name for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Embedding))}
    del model._tp_plan["model.embed_tokens"]
    assert names_of(model, None) == divided
    model._tp_plan = None
    assert names_of(model, None) == divided - {"lm_head", "model.embed_tokens"}
    assert names_of(Divisible(), {"up.*": ColwiseParallel()}) == {"up.0", "up.1", "again"}
    assert names_of(Divisible(), {"up.0": "colwise", "down.*": "replicate"}) == {"up.0"}


@pytest.mark.parametrize(
    ("plan", "size", "words"),
    [
        ("auto", 2, "a tensor-parallel plan for the layers of Divisible, received 'a model without one"),
        ({"up.*": "colwise", "dwon.*": "rowwise"}, 2, "that match 'dwon.\\*' of the plan.*down.0"),
        ({"up.*": "columnwise"}, 2, "the style of up.\\* to be one of .* received 'columnwise'.*'colwise'"),
        ({"up.*": "moe_tp_experts"}, 2, "the style of up.\\* to be one of .* received 'moe_tp_experts'"),
        ({"between": "colwise"}, 2, "between to be a Linear or an Embedding, to shard it, received 'LayerNorm'"),
        ({"up.*": "colwise"}, 3, "up.0 to have a width that 3 divides, received 16. 2, 4, 8, 16 ranks"),
        ({"down.*": "rowwise"}, 5, "down.0 to have a width that 5 divides"),
        ({"up.1": "colwise", "again": "rowwise"}, 2, "up.1 and again, which share a weight, to be sharded alike"),
        ({"up.1": "colwise", "again": SequenceParallel()}, 2, "up.1 and again, which share a weight"),
    ],
)
def test_invalid_plans_are_refused_before_anything_is_sharded(plan, size, words):
    model = Divisible()
    with pytest.raises(BadArgument, match=words):
        plan_layers(model, plan, size)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_hugging_face_models_that_cannot_be_sharded_are_refused():
    with pytest.raises(
        BadArgument, match=r"k_proj to have a number of heads that 4 divides, received '2 heads'\. 2 ranks"
    ):
        plan_layers(tied_llama().model, "auto", 4)
    assert len(plan_layers(untied_llama().model, "auto", 4)) == 16
    gpt = GPT2LMHeadModel(gpt2())
    with pytest.raises(BadArgument, match="tensor-parallel plan for the layers of GPT2LMHeadModel"):
        plan_layers(gpt, "auto", 2)
    with pytest.raises(BadArgument, match="c_fc to be a Linear or an Embedding, to shard it, received 'Conv1D'"):
        plan_layers(gpt, {"transformer.h.*.mlp.c_fc": "colwise"}, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size to be a number of ranks"),
        ({"size": True}, "size to be a number of ranks"),
        ({"plan": "automatic"}, "plan to be 'auto' or a mapping"),
        ({"plan": {}}, "plan to be 'auto' or a mapping"),
        ({"plan": {"up": "colwse"}}, "the style of up to be one of .*'colwise'"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(BadArgument, match=words):
        TensorParallel(**options)
