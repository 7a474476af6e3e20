"""`strategy="accelerate"`: an Accelerator wraps and differentiates, and everything else is as without it."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate_runs import accelerated
from training_runs import found, run_mlp

from ranks import on_ranks
from trainformer.backends.torch.distribution import make_strategy
from trainformer.core.errors import BadArgument


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate remembers for the whole process how its first Accelerator was made."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def of(results, way):
    return {key.removeprefix(f"{way} "): value for key, value in results.items() if key.startswith(f"{way} ")}


def apart(results, others):
    assert results.keys() == others.keys()
    assert len(results) > 6
    return max((results[key] - others[key]).abs().max().item() for key in results)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_trains_as_without_it_and_as_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = found(run_mlp("single", accumulation_steps=2).fit())
    for rank in on_ranks(accelerated, 2, tmp_path):
        for way in ("made", "given", "ddp"):
            assert apart(of(rank, way), alone) < 1e-8, way
        weights = {key: value for key, value in alone.items() if key.startswith("weight")}
        resumed = {key: value for key, value in of(rank, "resumed").items() if key.startswith("weight")}
        assert max((resumed[key] - weights[key]).abs().max().item() for key in weights) < 1e-8
        assert apart(of(rank, "short"), of(rank, "likewise")) == 0
        # Gradients that are rounded on their way change the weights a little, and what is said of a step not at all.
        rounded = of(rank, "rounded")
        assert rounded["train/loss"][0] == pytest.approx(alone["train/loss"][0].item(), abs=1e-12)
        assert torch.equal(rounded["counts"], alone["counts"])
        assert 1e-8 < apart(rounded, alone) < 1.0
        assert rank["wrapped"] == ["DistributedDataParallel"] * 2
        assert rank["knows"].all()


def test_one_process_needs_no_wrapper(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run_mlp("accelerate", epochs=1, run_dir="a").fit()
    given = run_mlp(Accelerator(cpu=True), epochs=1, run_dir="b").fit()
    alone = found(run_mlp("single", epochs=1, run_dir="c").fit())
    assert apart(found(made), alone) == apart(found(given), alone) == 0


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ({"gradient_accumulation_steps": 4}, {}, "accumulation_steps=4"),
        ({"mixed_precision": "bf16"}, {}, "precision='bf16' to the trainer"),
        ({"mixed_precision": "bf16"}, {"precision": "fp16"}, "precision of the run"),
        ({"mixed_precision": "fp16"}, {"precision": "fp16"}, "scales the losses itself"),
    ],
)
def test_what_an_accelerator_may_not_say_is_refused(arguments, settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadArgument, match=said):
        run_mlp({"name": "accelerate", **arguments}, **settings)
    if "fp16" not in arguments.values():  # which accelerate refuses on a CPU
        with pytest.raises(BadArgument, match=said):
            run_mlp(Accelerator(cpu=True, **arguments), **settings)


def test_options_and_devices_are_looked_at():
    with pytest.raises(BadArgument, match="Did you mean 'kwargs_handlers'"):
        make_strategy({"name": "accelerate", "kwarg_handlers": []})
    with pytest.raises(BadArgument, match="no options"):
        make_strategy({"name": "accelerate", "accelerator": Accelerator(cpu=True), "cpu": True})
    with pytest.raises(BadArgument, match="device to be that of the Accelerator"):
        make_strategy(Accelerator(cpu=True)).join("cuda", 10.0)


@pytest.mark.parametrize(("kind", "instead"), [("FSDP", "strategy='fsdp'"), ("DEEPSPEED", "strategy='fsdp'")])
def test_who_takes_the_step_out_of_our_hands_is_refused(kind, instead):
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = type(accelerator.distributed_type)[kind]
    with pytest.raises(BadArgument, match=instead):
        make_strategy(accelerator)
