"""Our run and another library's, over the same records in the same order, from the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from text_toys import batches_of
from trainformer import Trainer
from trainformer.run import run_of

# Side effects of the other trainers to switch off.
QUIET: dict[str, Any] = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "gradient_checkpointing": False,
    "train_sampling_strategy": "sequential",
    "num_train_epochs": 1,
}


def order_of(trainer: Trainer, epochs: int) -> list[int]:
    """The numbers of the records in the order in which a run reads them, known by their tokens."""
    store = run_of(trainer).train_source.dataset  # type: ignore[union-attr]
    numbers = {tuple(store[i]["input_ids"].tolist()): i for i in range(len(store))}
    assert len(numbers) == len(store), "two records have the same tokens"
    found = []
    for epoch in range(epochs):
        for batch in batches_of(trainer, epoch):
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                found.append(numbers[tuple(row[mask == 1].tolist())])
    assert sorted(found) == sorted(list(range(len(store))) * epochs)
    return found


def settings(trainer: Trainer, folder: Path, **more: Any) -> dict[str, Any]:
    """The settings of our run, in the words of transformers."""
    return {
        **QUIET,
        "output_dir": str(folder),
        "per_device_train_batch_size": trainer.batch_size,
        "gradient_accumulation_steps": trainer.accumulation_steps,
        "learning_rate": trainer.lr,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.gradient_clip,
        **more,
    }


def twin(model: nn.Module) -> Any:
    """A copy to be trained by somebody else."""
    return copy.deepcopy(model)


def distance(model: nn.Module, other: nn.Module) -> float:
    """The largest difference between two weights."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


def moved(model: nn.Module, before: nn.Module) -> bool:
    """Whether training has changed every parameter."""
    return all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
