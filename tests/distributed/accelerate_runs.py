"""Runs by an `Accelerator` on real ranks, beside the same runs without one."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor
from training_runs import found, run_mlp

from trainformer import Trainer


def accelerated(rank: int, world: int) -> dict[str, Tensor]:
    """An Accelerator that is made for the run, one that is made by the user, and none."""
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in told.items()})
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


def _strategy(trainer: Trainer):
    return trainer._session.backend.strategy
