"""What tests of the text trainers share: a folder with a small Llama and its tokenizer, and quiet trainers of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax_model_toys import save_random
from transformers import AutoModelForCausalLM

import text_toys
from trainformer.backends.jax.sharding import make_mesh
from trainformer.run import run_of

QUIET = {"log": "none", "save_strategy": "no", "resume": None, "weight_decay": 0.0, "scheduler": "constant"}


def make_folder(folder: Path) -> Path:
    save_random(text_toys.llama(), folder)
    text_toys.chat_tokenizer().save_pretrained(folder)
    return folder


def save_changed(folder: Path, target: Path) -> Path:
    """Another model of the same shape, with slightly different weights."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    model.save_pretrained(target)
    text_toys.chat_tokenizer().save_pretrained(target)
    return target


def pairs() -> list[dict[str, str]]:
    """Prompts and their completions."""
    return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in text_toys.preferences()]


def devices(dims: tuple[int, ...] = (1, 1, 1, 1)) -> Any:
    return make_mesh(dims, jax.devices()[: int(np.prod(dims))])


def trainer_of(
    kind: Any, arguments: Any, model: Any, data: Any, where: Path, *, options: Any = None, **fields: Any
) -> Any:
    """A trainer on one device; all data are one batch, unless the fields say otherwise."""
    sizes = {"total_batch_size": len(data), "max_steps": 2, "learning_rate": 0.1, "max_sequence_length": 32}
    folders = {"cache_dir": str(where / "tokens"), "output_dir": str(where / "run")}
    made = arguments(**{**QUIET, **sizes, **folders, **fields})
    return kind(made, model, **{"train_dataset": data, "mesh": devices(), **(options or {})})


def torch_run(task: Any, data: Any, where: Path, **options: Any) -> Any:
    """The same on torch; its trainer, after two steps."""
    settings = {"batch_size": len(data), "max_steps": 2, "lr": 0.1, "optimizer": "sgd", "scheduler": None}
    rest = {"weight_decay": 0.0, "run_dir": str(where), "val_data": list(data)}
    return text_toys.trainer_for(task, data, **{**settings, **rest, **options}).fit()


def furthest_weight(folder: Path | str, model: Any) -> float:
    """The largest difference of the weights in a folder, as transformers opens it, from those of its model."""
    mine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    theirs = model.state_dict()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def batch_of(trainer: Any) -> dict[str, np.ndarray]:
    """The first batch that a trainer trains on."""
    return next(iter(run_of(trainer).train_source.batches(0))).data
