"""What a run can do beside training does not depend on the number of processes; what goes wrong is said on all."""

import pytest
import torch
from feature_data import trainer
from feature_runs import FAILING, SAME, features

from ranks import on_ranks
from trainformer.core.errors import BadArgument
from trainformer.distributed import Launch, make_strategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

#: What is computed in fp32 or less, where sums are rounded in another order: one place of what was rounded then, one
#: of 30 samples.
LOOSE = {"beside": 1.0, "losses": 1.0, "history of val/online_linear": 0.04, "history of val/online_knn": 0.04}
NARROW = ("simclr", "dino", "bf16", "fp16")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNS_FOLDER", str(folder))
        found = {}
        for world in (1, 2):
            (folder / str(world)).mkdir()
            found[world] = on_ranks(features, world, folder / str(world))
    return found


@pytest.mark.parametrize("case", SAME)
def test_two_ranks_match_one_process(results, case):
    alone = {key: value for key, value in results[1][0].items() if key.startswith(f"{case}: ")}
    assert alone
    for rank in results[2]:
        there = {key: value for key, value in rank.items() if key.startswith(f"{case}: ")}
        assert there.keys() == alone.keys()
        for key, value in alone.items():
            if isinstance(value, torch.Tensor):
                tolerance = LOOSE.get(key.removeprefix(f"{case}: "), 0.0) if case in NARROW else 1e-8
                relative = 1e-6 if "largest_parameter" in key else 0.0  # which is taken in fp32
                torch.testing.assert_close(there[key], value, rtol=relative, atol=tolerance, equal_nan=True, msg=key)
            else:
                assert there[key] == value, key


def test_every_case_ran_as_intended(results):
    alone = results[1][0]
    assert alone["asks, last: kept"] == [3, 4, 9]  # asked for, the best evaluation, the end
    assert alone["asks, last: history of val/loss"][:, 0].tolist() == [4]
    assert alone["asks, last: why"] == "enough"
    assert alone["asks, abort: kept"] == [2, 4]
    assert alone["asks, added: counts"][0] == 6
    assert alone["NaN, loss, skip: skipped"] == 3
    assert alone["left out, each reads: bad"] == 10
    assert alone["shuffled stream: seen"] == list(range(37))
    assert alone["callbacks, ddp: history of val/without_ema/loss"].shape[0] > 2
    for name in ("dropout: own masks", "dropout: the same again", "clock: signal obeyed", "clock: several"):
        assert alone[name] is True, name
        assert results[2][1][name] is True, name


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("NaN, loss, raise", ("NonFiniteError", "at step 1")),
        ("NaN, gradient, raise", ("NonFiniteError",)),
        ("NaN, loss, retry:1", ("NonFiniteError", "2 attempts")),
        ("unused", ("BadArgument", "spare.weight, spare.bias", "find_unused_parameters")),
        ("idle", ("BadArgument", "Return a loss of weight 0")),
        ("drift", ("ReplicasDiffer", "rank 1 (2.bias)")),
        ("blind", ("BadArgument", "rank 1 does not see", "run_dir")),
        ("dispatched twice", ("BadArgument", "DistributedSampler")),
        ("unreadable", ("sample 9 is broken",)),
    ],
)
def test_errors_are_raised_on_every_rank(results, case, words):
    assert case in FAILING
    for rank in results[2]:
        for word in words:
            assert word in rank[f"{case}!"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "received no RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "below WORLD_SIZE"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "integer"),
        ({"SLURM_STEP_NUM_TASKS": "2(x3)", "SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_inconsistent_launcher_variables_are_refused(environment, said):
    with pytest.raises(BadArgument, match=said):
        Launch.find(environment)


def test_slurm_counts_the_processes_of_the_step():
    srun = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "99"}
    assert Launch.find(srun) == Launch(rank=5, world_size=8, local_rank=1)
    assert Launch.find({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Launch(0, 1, 0)  # sbatch without srun


def test_unknown_ddp_options_are_refused_even_with_one_process():
    with pytest.raises(BadArgument, match="Did you mean 'bucket_cap_mb'"):
        make_strategy({"name": "ddp", "bucket_cap": 5})
    with pytest.raises(BadArgument, match="device_ids"):  # ours to choose
        make_strategy({"name": "ddp", "device_ids": [0]})
    assert make_strategy({"name": "ddp", "bucket_cap_mb": 5}).options == {"bucket_cap_mb": 5}


def test_single_is_refused_with_several_processes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = trainer("alone", 1, strategy="single")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadArgument, match="2 processes that were launched together, received 'single'"):
        run.fit()
    assert not list(tmp_path.iterdir())
