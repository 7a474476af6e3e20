"""Runs by an `Accelerator` on real ranks, beside the same runs without one."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DeepSpeedPlugin, DistributedDataParallelKwargs
from torch import Tensor
from torch.utils.data import TensorDataset
from training_runs import QUIET, found, run_mlp

from toys import TokenTask, mlp, tokens
from trainformer import Trainer
from trainformer.run import run_of
from trainformer.run.torch.dry_run import DryRun


def accelerated(rank: int, world: int) -> dict[str, Tensor]:
    """An Accelerator that is made for the run, one that is made by the user, and none."""
    tell_ranks(rank, world)
    twice = {"accumulation_steps": 2}
    made = run_mlp("accelerate", run_dir="made", **twice).fit()
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    given = run_mlp(Accelerator(cpu=True, kwargs_handlers=[unused]), run_dir="given", **twice).fit()
    AcceleratorState._reset_state()
    short = Accelerator(cpu=True, mixed_precision="bf16")
    trained = [run_mlp(choice, run_dir=name, precision="bf16").fit() for choice, name in ((short, "b"), ("ddp", "d"))]
    AcceleratorState._reset_state()
    rounded = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    options = {"name": "accelerate", "kwargs_handlers": [rounded]}
    plain = run_mlp("ddp", run_dir="ddp", save_every=6, save_last=9, **twice).fit()
    resumed = run_mlp("accelerate", run_dir="resumed", resume="ddp/checkpoints/step_00000006", **twice).fit()
    results = {"made": made, "given": given, "ddp": plain, "resumed": resumed}
    results |= {"short": trained[0], "likewise": trained[1], "rounded": run_mlp(options, run_dir="r", **twice).fit()}
    assert dist.get_world_size() == world
    named = {f"{way} {key}": value for way, trainer in results.items() for key, value in found(trainer).items()}
    wrappers = [type(_strategy(trainer)._wrapped).__name__ for trainer in (made, given)]
    knows = [len(_strategy(trainer).accelerator._optimizers) > 0 for trainer in (made, given)]
    return named | {"wrapped": wrappers, "knows": torch.tensor(knows)}  # type: ignore[dict-item]


def tell_ranks(rank: int, world: int) -> None:
    """Set what a launcher sets: accelerate looks nowhere else."""
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in told.items()})


def _strategy(trainer: Trainer):
    return run_of(trainer).backend.strategy


def run_tokens(strategy: Any, run_dir: str, bad: bool = False, **options: Any) -> Trainer:
    """37 rows of unequal weight in windows of two batches of 8; in float32, as DeepSpeed keeps weights.

    A bad row, if there is one, makes the loss of its window NaN.
    """
    settings = {"epochs": 2, "batch_size": 8, "lr": 0.02, "log_every": 1, "gradient_clip": 0.5, "accumulation_steps": 2}
    x, y = tokens(37, dtype=torch.float32)
    val = TensorDataset(x.clone(), y)
    x[5] = torch.nan if bad else x[5]
    task = TokenTask(mlp(dtype=torch.float32))
    return Trainer(
        task, TensorDataset(x, y), val, strategy=strategy, run_dir=run_dir, **{**QUIET, **settings, **options}
    )


def zero_options(stage: int, **further: Any) -> dict[str, Any]:
    """The strategy of an Accelerator with DeepSpeed. Each is the first of its process, for all that it can see."""
    AcceleratorState._reset_state()
    config = {"zero_optimization": {"stage": stage}, **further}
    return {"name": "accelerate", "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}


def divided(rank: int, world: int) -> dict[str, Tensor]:
    """DeepSpeed in both stages, from the beginning and from checkpoints of one another."""
    prepare_deepspeed(rank, world)
    runs: dict[str, Trainer] = {"ddp": run_tokens("ddp", "ddp", save_every=2, save_last=9).fit()}
    for stage in (1, 2):
        runs[f"zero{stage}"] = run_tokens(zero_options(stage), f"zero{stage}", save_every=2, save_last=9).fit()
    runs["from ddp"] = run_tokens(zero_options(2), "from_ddp", resume="ddp/checkpoints/step_00000002").fit()
    runs["from zero"] = run_tokens("ddp", "from_zero", resume="zero1/checkpoints/step_00000002").fit()
    runs["again"] = run_tokens(zero_options(1), "again", resume="zero1/checkpoints/step_00000002").fit()
    runs["bf16"] = run_tokens("ddp", "bf16", precision="bf16").fit()
    runs["zero in bf16"] = run_tokens(zero_options(2), "zero_bf16", precision="bf16").fit()
    runs["skipped"] = run_tokens("ddp", "skipped", bad=True, nonfinite="skip").fit()
    runs["zero skipped"] = run_tokens(zero_options(2), "zero_skipped", bad=True, nonfinite="skip").fit()
    results = {f"{way} {key}": value for way, trainer in runs.items() for key, value in found(trainer).items()}
    results |= {f"ddp's {name}": value for name, value in gradients(run_tokens("ddp", "a")).items()}
    return results | {f"zero's {name}": value for name, value in gradients(run_tokens(zero_options(2), "b")).items()}


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Gradients of the second micro-batch, had it been a whole step, after a step that was given up half-way."""
    backend = run_of(trainer).backend
    probe = DryRun(run_of(trainer))
    batches = probe.batches()
    backend.begin_training()
    backend.accumulate(next(batches)._replace(more=True))
    backend.drop_step()
    probe.gradients(next(batches))
    strategy = backend.strategy
    look = getattr(strategy, "full_gradient", lambda parameter: parameter.grad.clone())
    return {name: look(p) for name, p in trainer.task.model.named_parameters()}


def prepare_deepspeed(rank: int, world: int) -> None:
    """Let DeepSpeed know the ranks, and keep it from compiling an exchange of its own, which takes minutes."""
    import deepspeed

    tell_ranks(rank, world)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
