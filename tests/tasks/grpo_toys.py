"""Small runs of GRPO and Online DPO in float64, on any number of ranks, and one to be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

import text_toys as toys
from trainformer import Trainer
from trainformer.adapters import LoRA
from trainformer.data.order import sample_key, set_sample_key
from trainformer.tasks import GRPO, OnlineDPO
from trainformer.utils.distributed import is_dtensor

PROMPTS = [{"prompt": text, "bonus": float(i % 3)} for i, text in enumerate(toys.sentences())]
QUIET = {"log": "none", "device": "cpu", "precision": "no", "save_every": None, "num_workers": 0, "resume": None}


def length(completions: list[str], bonus: list[float]) -> list[float]:
    """Longer is better; how much better depends on a column."""
    return [len(text) * (1 + extra) for text, extra in zip(completions, bonus, strict=True)]


def model(dtype: torch.dtype = torch.float64) -> Any:
    """With many stop tokens, so that completions have unequal lengths. (The norms of Llama compute in float32.)"""
    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = GPT2LMHeadModel(toys.gpt2(initializer_range=0.2, **no_dropout)).to(dtype)
    made.generation_config.eos_token_id = [1, *range(100, 140)]
    return made


CASES: dict[str, dict[str, Any]] = {
    "dapo": {"beta": 0.1, "loss": "dapo", "temperature": 0.9},
    "several": {"loss": "grpo", "num_iterations": 2, "mini_batches": 2, "beta": 0.1},
    "dr_grpo": {"loss": "dr_grpo", "mask_truncated_completions": True, "skip_zero_variance": True},
    "batch": {"scale_rewards": "batch", "top_entropy_quantile": 0.7, "loss": "grpo"},
    "online": {"missing_eos_penalty": 1.0},
}


def make_task(case: str, trained: Any = None, **more: Any) -> Any:
    common = {"rewards": length, "max_completion_length": 8, "tokenizer": toys.chat_tokenizer(), "cache_dir": "tokens"}
    options: dict[str, Any] = {**common, **CASES[case], **more}
    kind = OnlineDPO if case == "online" else GRPO
    generations = {} if case == "online" else {"num_generations": 3}
    return kind(model() if trained is None else trained, **{**generations, **options})


def make_trainer(case: str, **settings: Any) -> Trainer:
    batch_size = 5 if case != "several" else 8
    settings = {"batch_size": batch_size, "max_steps": 3, "lr": 1e-2, "log_every": 1, "run_dir": "run"} | settings
    task = settings.pop("task", None) or make_task(case)
    return Trainer(task, PROMPTS, PROMPTS[:5], **{**QUIET, "eval_batch_size": 3, **settings})


def found(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, logged losses and rewards, and the metrics of an evaluation."""
    state = trainer.task.model.state_dict()
    weights = {f"weight {k}": (v.full_tensor() if is_dtensor(v) else v).detach().clone() for k, v in state.items()}
    series = {
        name: torch.tensor([record[name] for record in trainer.state.log_history if name in record])
        for name in ("train/loss", "train/reward", "train/completion_length")
    }
    evaluated = {name: torch.tensor(value) for name, value in trainer.evaluate().items()}
    return weights | series | evaluated


def results(rank: int, world: int) -> dict[str, Tensor]:
    """All cases with DDP, and two with FSDP."""
    made: dict[str, Tensor] = {}
    for strategy, cases in (("ddp", tuple(CASES)), ("fsdp", ("dapo", "several"))):
        for case in cases:
            trainer = make_trainer(case, strategy=strategy if world > 1 else "auto", run_dir=f"{case}-{strategy}").fit()
            made |= {f"{strategy} {case}/{name}": value for name, value in found(trainer).items()}
    return made


def batch_of(task: Any, records: Any = None, train: bool = True) -> Any:
    """All records as one batch, with the seeds of the first epoch."""
    task.configure(None)
    prepared = task.prepare_dataset(PROMPTS[:4] if records is None else records, train=train)
    samples = []
    for i in range(len(prepared)):
        set_sample_key(sample_key(0, 0, i))
        samples.append(prepared[i])
    return task.collate_fn(samples)


# -- a run that is killed ----------------------------------------------------------------------------------


class Deadly:
    """A reward function that kills its process, if the file is there, at the n-th call: while completions are made."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, completions: list[str], bonus: list[float]) -> list[float]:
        self.calls -= 1
        if self.calls == 0 and Path("deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return length(completions, bonus)


class DeadlyUpdate:
    """Kills the process between the updates of one step."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_after_optimizer_step(self, trainer: Any, step: int) -> None:
        self.updates -= 1
        if self.updates == 0 and Path("deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)


def victim(kind: str, run_dir: str, folder: str = ".") -> None:
    """Train with LoRA and several updates per step; die in a reward function (`generation`) or between updates."""
    os.chdir(folder)
    reward = Deadly(4 if kind == "generation" else -1)
    trained = model(torch.float32)
    task = make_task("several", trained, adapter=LoRA(r=2), rewards=reward, temperature=1.1)
    settings = {"run_dir": run_dir, "save_every": 1, "max_steps": 5, "resume": "auto"}
    callbacks = [DeadlyUpdate(9 if kind == "update" else -1)]
    trainer = make_trainer("several", task=task, callbacks=callbacks, **settings).fit()
    state = {name: value for name, value in trainer.task.model.state_dict().items() if "lora" in name}
    torch.save(state, f"{run_dir}.pt")
