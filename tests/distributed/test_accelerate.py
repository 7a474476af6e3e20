"""`strategy="accelerate"`: an Accelerator wraps and differentiates, and everything else is as without it."""

import os
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate_runs import accelerated, divided, run_tokens
from training_runs import found, run_mlp

from ranks import on_ranks
from trainformer.core.errors import BadArgument
from trainformer.distributed import make_strategy
from trainformer.distributed.accelerate import strategy_from_environment
from trainformer.distributed.deepspeed import check_config


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate remembers for the whole process how its first Accelerator was made."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def of(results, way):
    return {key.removeprefix(f"{way} "): value for key, value in results.items() if key.startswith(f"{way} ")}


def weights_of(results):
    return {key: value for key, value in results.items() if key.startswith("weight")}


def difference(results, others):
    assert results.keys() == others.keys()
    assert len(results) > 3
    return max((results[key] - others[key]).abs().max().item() for key in results)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_matches_ddp_and_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = found(run_mlp("single", accumulation_steps=2).fit())
    for rank in on_ranks(accelerated, 2, tmp_path):
        for way in ("made", "given", "ddp"):
            assert difference(of(rank, way), alone) < 1e-8, way
        assert difference(weights_of(of(rank, "resumed")), weights_of(alone)) < 1e-8
        assert difference(of(rank, "short"), of(rank, "likewise")) == 0
        # Gradients that are rounded on their way change the weights a little, and what is said of a step not at all.
        rounded = of(rank, "rounded")
        assert rounded["train/loss"][0] == pytest.approx(alone["train/loss"][0].item(), abs=1e-12)
        assert torch.equal(rounded["counts"], alone["counts"])
        assert 1e-8 < difference(rounded, alone) < 1.0
        assert rank["wrapped"] == ["DistributedDataParallel"] * 2
        assert rank["knows"].all()


def test_one_process_needs_no_wrapper(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run_mlp("accelerate", epochs=1, run_dir="a").fit()
    given = run_mlp(Accelerator(cpu=True), epochs=1, run_dir="b").fit()
    alone = found(run_mlp("single", epochs=1, run_dir="c").fit())
    assert difference(found(made), alone) == difference(found(given), alone) == 0


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ({"gradient_accumulation_steps": 4}, {}, "accumulation_steps=4"),
        ({"mixed_precision": "bf16"}, {}, "precision='bf16' to the trainer"),
        ({"mixed_precision": "bf16"}, {"precision": "fp16"}, "precision of the run"),
        ({"mixed_precision": "fp16"}, {"precision": "fp16"}, "does the loss scaling"),
    ],
)
def test_unsupported_accelerator_settings_are_refused(arguments, settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadArgument, match=said):
        run_mlp({"name": "accelerate", **arguments}, **settings)
    if "fp16" not in arguments.values():  # which accelerate refuses on a CPU
        with pytest.raises(BadArgument, match=said):
            run_mlp(Accelerator(cpu=True, **arguments), **settings)


def test_options_and_devices_are_checked():
    with pytest.raises(BadArgument, match="Did you mean 'kwargs_handlers'"):
        make_strategy({"name": "accelerate", "kwarg_handlers": []})
    with pytest.raises(BadArgument, match="no options"):
        make_strategy({"name": "accelerate", "accelerator": Accelerator(cpu=True), "cpu": True})
    with pytest.raises(BadArgument, match="device to be that of the Accelerator"):
        make_strategy(Accelerator(cpu=True)).setup_environment("cuda", 10.0)


@pytest.mark.parametrize(("kind", "instead"), [("FSDP", "strategy='fsdp'"), ("MEGATRON_LM", "strategy='tp'")])
def test_backends_that_own_the_parameters_are_refused(kind, instead):
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = type(accelerator.distributed_type)[kind]
    with pytest.raises(BadArgument, match=instead):
        make_strategy(accelerator)


# -- accelerate launch -----------------------------------------------------------------------------------------

PROGRAM = """
import os, torch
from accelerate_runs import run_tokens
from training_runs import found
from trainformer.run import run_of

trainer = run_tokens("auto", "out").fit()
kind = {"ddp": 0, "fsdp": 1}[run_of(trainer).backend.strategy.name]
torch.save({**found(trainer), "kind": torch.tensor(kind)}, os.environ["RANK"] + ".pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("words", "kind"),
    [(["--multi_gpu"], 0), (["--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params", "true"], 1)],
)
def test_accelerate_launch_selects_the_strategy(words, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "accelerate.commands.launch", *words, "--num_processes", "2"]
    command += ["--main_process_port", "0", "program.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    alone = found(run_tokens("single", "alone").fit())
    for rank in (0, 1):
        here = torch.load(f"{rank}.pt", weights_only=True)
        assert here.pop("kind") == kind
        assert difference(here, alone) < 1e-5


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, {}),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, {}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"name": "accelerate"}),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {"name": "accelerate"}),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_VERSION": "2"},
            {"name": "fsdp", "reshard_after_forward": False, "cpu_offload": False},
        ),
        (
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_OFFLOAD_PARAMS": "true",
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Layer",
            },
            {"name": "fsdp", "reshard_after_forward": True, "cpu_offload": True, "blocks": ["Block", "Layer"]},
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "strategy='tp'"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "strategy='tp' or 'fsdp'"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "compile=True"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "'replicas'"),
        ({"ACCELERATE_USE_FSDP": "1", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "gradient_checkpointing=True"),
    ],
)
def test_launcher_settings_are_used_or_refused(environment, asked, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(asked, str):
        with pytest.raises(BadArgument, match=asked):
            strategy_from_environment()
    else:
        assert strategy_from_environment() == asked
        assert make_strategy(asked or "ddp").name == asked.get("name", "ddp")
    if "ACCELERATE_USE_FSDP" in environment:
        with pytest.raises(BadArgument):
            make_strategy("accelerate")


# -- DeepSpeed -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_deepspeed_matches_ddp_and_shares_its_checkpoints(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    for rank in on_ranks(divided, 2, tmp_path):
        plain = of(rank, "ddp")
        for way in ("zero1", "zero2"):
            assert difference(of(rank, way), plain) < 1e-5, way
        for way in ("from ddp", "from zero"):
            assert difference(weights_of(of(rank, way)), weights_of(plain)) < 1e-5, way
        assert difference(weights_of(of(rank, "again")), weights_of(of(rank, "zero1"))) == 0
        # The run's precision reaches the model, though DeepSpeed has one of its own.
        assert difference(of(rank, "zero in bf16"), of(rank, "bf16")) < 1e-5 < difference(of(rank, "bf16"), plain)
        assert difference(of(rank, "zero's"), of(rank, "ddp's")) < 1e-6
        # A step that is left out leaves nothing behind.
        assert difference(weights_of(of(rank, "zero skipped")), weights_of(of(rank, "skipped"))) < 1e-5
        assert difference(weights_of(of(rank, "skipped")), weights_of(plain)) > 1e-3
    alone = run_tokens("single", "alone", resume="zero2/checkpoints/step_00000002").fit()
    assert difference(weights_of(found(alone)), weights_of(plain)) < 1e-5
    assert not list((tmp_path / "zero2").rglob("*zero_pp_rank*"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 0}}, "strategy='ddp'"),
        ({"zero_optimization": {"stage": 3}}, "strategy='fsdp'"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "'cpu_offload': True"),
        ({"optimizer": {"type": "AdamW"}}, "received 'AdamW'. Remove it, and pass optimizer="),
        ({"bf16": {"enabled": True}}, "pass precision='bf16'"),
        ({"gradient_clipping": 0.5}, "pass gradient_clip=0.5"),
    ],
)
def test_deepspeed_settings_of_the_run_are_refused(config, said):
    with pytest.raises(BadArgument, match=said):
        check_config({"zero_optimization": {"stage": 2}, **config})
    harmless = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "fp16": {"enabled": False}}
    assert check_config({"zero_optimization": {"stage": 1, "offload_param": {"device": "none"}}, **harmless}) is None
