"""What ranks that share one GPU find; they talk over gloo, since NCCL wants a GPU for each."""

from __future__ import annotations

import torch
from torch import Tensor
from training_runs import run_mlp

from trainformer.run import run_of

SPECS = {
    "ddp": ("ddp", {}),
    "ddp, accumulating": ("ddp", {"accumulation_steps": 3}),
    "ddp in bf16": ("ddp", {"precision": "bf16"}),
}


def trainings(rank: int, world: int, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Weights, losses and norms of a run per strategy."""
    found: dict[str, Tensor] = {}
    for name in names:
        strategy, options = SPECS[name]
        chosen = strategy if world > 1 else "single"
        trainer = run_mlp(chosen, device="cuda:0", run_dir=f"{name}-{world}", **options)
        trainer.fit()
        history = [record for record in trainer.state.log_history if "train/loss" in record]
        for key in ("train/loss", "train/grad_norm"):
            found[f"{name} {key}"] = torch.tensor([record[key] for record in history], dtype=torch.float64)
        model = run_of(trainer).unsharded_model()
        found |= {f"{name} {key}": value.detach().cpu() for key, value in model.state_dict().items()}
    return found
