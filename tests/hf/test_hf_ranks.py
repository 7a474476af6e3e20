"""`trainformer.hf` on two ranks: the results of one process, HF's semantics, and only rank 0 writes."""

import json

import pytest
import torch
from hf_ranks import TESTED, WIDE, curve, data_parallel, model_parallel, small, written
from hf_toys import examples
from safetensors.torch import load_file

from ranks import on_ranks
from trainformer import hf
from trainformer.core.errors import BadArgument
from trainformer.run import run_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def started(runs, folder):
    return folder, on_ranks(runs, 2, folder)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return started(data_parallel, tmp_path_factory.mktemp("replicated"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return started(model_parallel, tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process with twice the batch size."""
    trainer = small(tmp_path_factory.mktemp("alone"), 8)
    return curve(trainer) | {"predicted": torch.from_numpy(trainer.predict(examples(TESTED, 6, WIDE)).predictions)}


def distance(found, wanted):
    """The largest difference between two curves."""
    assert found["steps"] == wanted["steps"]
    assert [len(found[n]) for n in ("losses", "evaluated")] == [len(wanted[n]) for n in ("losses", "evaluated")]
    names = "losses", "norms", "rates", "evaluated"
    numbers = [abs(a - b) for n in names for a, b in zip(found[n], wanted[n], strict=True)]
    return max(*numbers, abs(found["mean"] - wanted["mean"]), max_difference(found["weights"], wanted["weights"]))


def max_difference(weights, others):
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


@pytest.mark.parametrize("way", [None, "by_itself", "accelerated"])
def test_two_ranks_train_like_one_with_twice_the_batch(replicated, alone, way):
    for rank in replicated[1]:
        assert distance(rank if way is None else rank[way], alone) < 1e-8


def test_losses_average_over_the_tokens_of_all_ranks(replicated, tmp_path):
    wanted = curve(written(tmp_path, 6))
    for rank in replicated[1]:
        assert distance(rank["llama"], wanted) < 1e-5  # Llama computes its loss in float32


def test_losses_and_steps_match_transformers_with_even_batches(replicated):
    ours, theirs = (replicated[1][0][name] for name in ("ours", "theirs"))
    assert ours["steps"] == theirs["steps"] == [6, 6, 2.0]
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)  # transformers accumulates in float32
    assert ours["mean"] == pytest.approx(theirs["mean"], abs=1e-6)
    assert max_difference(ours["weights"], theirs["weights"]) < 1e-8


def test_every_process_knows_its_rank(replicated):
    first, second = replicated[1]
    assert first["facts"] == [2, 0, 0, 0, True]
    assert second["facts"] == [2, 1, 1, 1, False]
    assert first["words"] == second["words"] == ["distributed", "Classifier", "world"]
    assert first["rank_info"][:4] == [True, True, True, 2]
    assert second["rank_info"][:4] == [False, False, False, 2]
    assert first["rank_info"][4] == second["rank_info"][4]  # the folder of the run
    assert (first["order"], second["order"]) == (False, True)  # rank 1 found the file that rank 0 had written


def test_only_rank_0_prints_and_writes(replicated):
    folder, (first, second) = replicated
    assert "16 samples per step: 4 per device x 2 accumulated x 2 processes" in " ".join(first["shown"].split())
    assert "***** eval metrics *****" in first["shown"]
    assert second["shown"] == ""
    records = [json.loads(line) for line in (folder / "ddp/log.jsonl").read_text().splitlines()]
    assert [r["global_step"] for r in records if r["event"] == "on_log"] == [
        1,
        2,
        3,
        4,
        5,
        6,
        6,
    ]  # the last one is the summary
    assert {len(list((folder / "ddp" / name).glob("events.*"))) for name in ("board", "peaks", "grads")} == {1}
    assert json.loads((folder / "ddp/eval_results.json").read_text())["eval_right"] == first["metrics"]["eval_right"]
    assert json.loads((folder / "ddp/trainer_state.json").read_text())["global_step"] == 6
    assert not (folder / "ddp/runs").exists()  # no logging_dir, no records


def test_every_rank_has_the_metrics_and_predictions_of_all(replicated, alone):
    first, second = replicated[1]
    assert first["metrics"] == second["metrics"]
    assert first["best"] == second["best"] == "checkpoint-6"  # loaded on both ranks at the end
    for rank in (first, second):
        assert (rank["predicted"] - alone["predicted"]).abs().max() < 1e-8


def test_checkpoints_load_on_one_and_two_ranks(replicated):
    folder, (first, _) = replicated
    weights = load_file(folder / "ddp/final/model.safetensors")
    assert max_difference(weights, first["weights"]) == 0
    assert max_difference(first["loaded"], weights) == 0
    assert sorted(p.name for p in (folder / "ddp").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    loaded = small(folder / "alone", 8)
    loaded.load_checkpoint(folder / "ddp/by_hand")
    assert max_difference(loaded.model.state_dict(), weights) == 0


def test_a_resumed_run_matches_an_uninterrupted_one(replicated, tmp_path):
    first, second = (rank["resumed"] for rank in replicated[1])
    assert distance(first, second) == 0
    assert first["steps"][0] == 8
    wanted = small(tmp_path, 8, save_strategy="steps", save_steps=6)
    wanted.train()
    more = small(tmp_path, 8, resume_from_checkpoint=True, max_steps=8, num_train_epochs=3)
    assert distance(first, curve(more)) < 1e-8


def test_a_sharded_model_trains_like_an_unsharded_one(sharded, alone):
    folder, ranks = sharded
    for rank in ranks:
        assert distance(rank, alone) < 1e-8
        assert (rank["predicted"] - alone["predicted"]).abs().max() < 1e-8
        assert "cannot be sharded again" in rank["error"]
        assert (rank["resumed"], rank["generations"]) == (6, 2)
    assert max_difference(load_file(folder / "fsdp/final/model.safetensors"), alone["weights"]) < 1e-8
    assert ranks[0]["per_layer"] == ranks[1]["per_layer"]
    assert 0 < max(a / b for a, b in zip(ranks[0]["per_layer"], ranks[0]["norms"], strict=True)) <= 1
    assert len(list((folder / "fsdp/texts").glob("events.*"))) == 1


def test_a_pipeline_trains_like_one_process(sharded, tmp_path):
    wanted = curve(written(tmp_path, 6))
    assert distance(sharded[1][0]["pipeline"], wanted) < 1e-5


@pytest.mark.parametrize(
    ("trainer", "arguments", "message"),
    [
        (hf.FSDPTrainer, {"ddp_bucket_cap_mb": 5}, "no ddp_bucket_cap_mb with the strategy 'fsdp'"),
        (hf.FSDPTrainer, {"strategy_options": {"replica": 2}}, "Did you mean 'replicas'"),
        (hf.Trainer, {"ddp_backend": "mpi"}, "ddp_backend to be one of None, 'gloo'"),
        (hf.Trainer, {"ddp_timeout": 0}, "positive number of seconds"),
        (hf.Trainer, {"fsdp": "full_shard"}, "FSDPTrainer"),
        (hf.Trainer, {"accelerator_config": {"split_batch": True}}, "Did you mean 'split_batches'"),
        (hf.AccelTrainer, {"strategy_options": {"gradient_accumulation_steps": 2}}, "to the trainer"),
    ],
)
def test_invalid_distributed_arguments_are_errors(tmp_path, trainer, arguments, message):
    with pytest.raises(BadArgument, match=message):
        small(tmp_path, 4, trainer, **arguments).train()


def test_hf_fields_for_distributed_training(tmp_path):
    config = {"dispatch_batches": True, "even_batches": True}
    trainer = small(tmp_path, 8, hf.DDPTrainer, ddp_timeout=60, accelerator_config=config, ddp_broadcast_buffers=True)
    assert trainer.args.dispatch_batches
    trainer.train()
    settings = run_of(trainer).settings
    assert (settings.rank_timeout, settings.dispatch_batches, settings.strategy["sync_batchnorm"]) == (60, True, False)
