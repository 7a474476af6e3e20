"""Distillation runs that other processes repeat: on several ranks, or killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import text_toys as toys
from toys import weights
from trainformer import Trainer
from trainformer.tasks import Distillation
from trainformer.tasks.language.teacher_logits import save_teacher_logits

CHATS = [*toys.conversations()[:10], *toys.conversations(turns=2)[10:18]]


def model(seed: int = 0, factor: float = 4.0, **options: Any) -> Any:
    """In float64, with logits that are not flat."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(toys.llama(**options)).double()
    with torch.no_grad():
        made.lm_head.weight.mul_(factor)
    return made


def teacher(**options: Any) -> Any:
    return model(7, 8.0, **{"hidden_size": 48, **options})


def task(folder: Any = ".", **options: Any) -> Distillation:
    defaults = {"max_length": 48, "tokenizer": toys.chat_tokenizer(), "cache_dir": Path(folder) / "tokens"}
    generation = {"lmbda": 0.5, "max_new_tokens": 8}
    given = {"teacher": teacher(), "beta": 0.5, "alpha": 0.8, **defaults, **generation, **options}
    return Distillation(given.pop("model", None) or model(), **given)


def trainer(folder: Any = ".", data: Any = CHATS, **options: Any) -> Trainer:
    names = {"batch_size", "accumulation_steps", "max_steps", "run_dir", "save_every", "strategy", "val_data", "lr"}
    settings = {name: options.pop(name) for name in list(options) if name in names}
    fixed = {"optimizer": "sgd", "precision": "no", "device": "cpu", "batch_size": 8, "lr": 0.05}
    return toys.trainer_for(task(folder, **options), data, **{**fixed, **settings})


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Weights and metrics after a few steps, some of them on generated completions."""
    found: dict[str, Tensor] = {}
    for strategy in ("ddp", "fsdp") if world > 1 else ("ddp",):
        run = trainer(f"{strategy}-{rank}", max_steps=2, val_data=CHATS[:5], strategy=strategy).fit()
        for name, value in run.evaluate().items():
            found[f"{strategy}/metric/{name}"] = torch.tensor(value, dtype=torch.float64)
        from trainformer.backends.torch.state import gathered

        state = gathered(run.task.model.state_dict()) if strategy == "fsdp" else weights(run.task)
        found |= {f"{strategy}/weight/{name}": value.clone() for name, value in state.items()}
    return found


def victim(folder: str, calls: int) -> None:
    """Train, and die when the student generates for the n-th time."""
    os.chdir(folder)
    torch.set_num_threads(1)
    run = trainer(folder, max_steps=6, run_dir=Path(folder) / "run", save_every=2)
    generate, left = run.task.model.generate, [calls]

    def dying(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(*args, **kwargs)

    run.task.model.generate = dying
    run.fit()


def logits_victim(folder: str, calls: int) -> None:
    """Store logits in small parts, and die in the n-th forward pass."""
    from trainformer.data.text import logits_store

    os.chdir(folder)
    torch.set_num_threads(1)
    logits_store._PART_BYTES = 2_000
    made, left = teacher(), [calls]

    def dying(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    made.register_forward_pre_hook(dying)
    store_logits(folder, made)


def store_logits(folder: Any, made: Any = None, data: Any = CHATS, **options: Any) -> Any:
    settings = {"tokenizer": toys.chat_tokenizer(), "max_length": 48, "cache_dir": Path(folder) / "tokens", "k": 5}
    made = teacher() if made is None else made
    return save_teacher_logits(made, data, Path(folder) / "logits", batch_size=2, **{**settings, **options})
