"""The tasks of the examples with several optimizers, small and in float64, and their runs on any number of ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from trainformer import Trainer
from trainformer.run import run_of
from trainformer.utils.distributed import is_dtensor

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILES = {"gan": "wgan_gp", "ppo": "ppo_cartpole", "distillation": "distillation"}
QUIET = {"log": "none", "device": "cpu", "precision": "no", "resume": None, "save_every": None, "num_workers": 0}


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{FILES[name]}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def several_optimizers(name: str) -> tuple[Any, Dataset[Any]]:
    """The task of an example and data for it, small and in float64."""
    module = example(name)
    torch.manual_seed(3)
    wide = torch.float64
    if name == "gan":
        task, data = module.WGAN(every=2, hidden=8), Subset(module.NoisyDigits(wide), range(48))
        task.critic.double()
    elif name == "ppo":
        module.LENGTH = 12
        task, data = module.PPO(passes=2), module.Episodes(24, wide)
        task.value.double()
    else:
        task, data = module.Distillation(student=4, teacher=8), Subset(module.digits(wide), range(48))
        task.teacher.double()
    task.model.double()
    return task, data


def make_trainer(name: str, **settings: Any) -> Trainer:
    task, data = several_optimizers(name)
    settings = {"epochs": 2, "batch_size": 8, "lr": 0.02, "log_every": 1, "gradient_clip": 0.5} | settings
    return Trainer(task, data, **{**QUIET, **settings})


def found(trainer: Trainer) -> dict[str, Tensor]:
    """All trained weights, and the records of losses and gradient norms."""
    backend = run_of(trainer).backend
    weights = {
        f"weight {backend.names[id(p)]}": (p.detach().full_tensor() if is_dtensor(p) else p.detach()).clone()
        for p in backend.parameters
    }
    names = {name for record in trainer.state.log_history for name in record if name.endswith(("loss", "grad_norm"))}
    series = {name: [record[name] for record in trainer.state.log_history if name in record] for name in names}
    return weights | {name: torch.tensor(values, dtype=torch.float64) for name, values in series.items()}


def on_rank(rank: int, world: int, strategies: tuple[str, ...] = ("ddp", "fsdp")) -> dict[str, Tensor]:
    """All examples with these strategies, with and without accumulation."""
    results: dict[str, Tensor] = {}
    for strategy in strategies:
        for name in FILES:
            for accumulation in (1, 2):
                trainer = make_trainer(name, strategy=strategy, accumulation_steps=accumulation)
                trainer.fit()
                key = f"{name},{strategy},{accumulation}"
                results |= {f"{key} {what}": value for what, value in found(trainer).items()}
    return results
