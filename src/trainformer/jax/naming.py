"""What settings and keywords of a trainer are called elsewhere: in other ways into the library, in other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected

#: Settings by the names that all runs share, and the arguments that decide them.
_OWN_NAMES = {
    "epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "batch_size": "total_batch_size",
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "warmup_ratio": "warmup_ratio",
    "gradient_clip": "max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "nonfinite": "nonfinite",
    "seed": "seed",
    "precision": "dtype",
    "gradient_checkpointing": "gradient_checkpointing",
    "log": "log",
    "log_every": "logging_steps",
    "name": "model_name",
    "run_dir": "output_dir",
    "save_every": "save_steps",
    "save_last": "save_total_limit",
    "eval_every": "eval_steps",
    "resume": "resume",
}

#: Keywords of trainers elsewhere, and what they are called here.
_ELSEWHERE = {
    "args": "arguments",
    "eval_data": "dataset_eval",
    "model_init": "model",
    "peft_config": "lora",
    "ref_model": "reference_model",
    "tokenizer": "processing_class",
    "train_data": "dataset_train",
}


def settings_passed(passed: Iterable[str], values: Mapping[str, Any]) -> frozenset[str]:
    """Which of a run's settings the user chose, by the arguments that were passed."""
    said = set(passed)
    return frozenset(name for name, own in _OWN_NAMES.items() if own in said and name in values)


def refuse_unknown(kind: type, unknown: Iterable[str]) -> None:
    """Raise if a trainer was given keywords that neither it nor a base of it has."""
    known = {name for base in kind.__mro__ if "__init__" in vars(base) for name in _keywords(base)}
    for name in unknown:
        own = _ELSEWHERE.get(name)
        do = f"It is called {own} here." if own in known else did_you_mean(name, sorted(known))
        raise BadArgument(expected(f"keywords of {kind.__name__}", name, do or "What a run does is said by arguments."))


def _keywords(kind: type) -> list[str]:
    own = vars(kind)["__init__"]
    if not inspect.isfunction(own):
        return []
    return [
        name
        for name, parameter in inspect.signature(own).parameters.items()
        if name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
