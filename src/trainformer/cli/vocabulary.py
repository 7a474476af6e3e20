"""Names of options in other programs, and what to suggest for an option that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: The same option under other names: of HF, Lightning, timm and torchrun.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("num_train_epochs", "max_epochs", "num_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "total_steps", "steps", "max_iters"), "max_steps"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "batch", "bs"), "batch_size"),
    **dict.fromkeys(("per_device_eval_batch_size", "val_batch_size"), "eval_batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"), "accumulation_steps"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip_grad", "grad_clip"), "gradient_clip"),
    **dict.fromkeys(("logging_steps", "log_interval", "log_every_n_steps"), "log_every"),
    **dict.fromkeys(("eval_steps", "eval_interval", "check_val_every_n_epoch"), "eval_every"),
    **dict.fromkeys(("save_steps", "save_interval"), "save_every"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "sched"), "scheduler"),
    **dict.fromkeys(("warmup_steps", "warmup_epochs", "warmup"), "warmup_ratio"),
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    **dict.fromkeys(("wd", "l2"), "weight_decay"),
    **dict.fromkeys(("bf16", "fp16", "amp", "mixed_precision", "dtype"), "precision"),
    **dict.fromkeys(("workers", "dataloader_num_workers"), "num_workers"),
    **dict.fromkeys(("dataset", "train_data", "data_dir", "train_file"), "data"),
    **dict.fromkeys(("val", "eval_data", "validation_data", "validation_file"), "val_data"),
    **dict.fromkeys(("model_name", "model_name_or_path", "arch", "backbone"), "model"),
    **dict.fromkeys(("run_name", "experiment"), "name"),
    **dict.fromkeys(("report_to", "logger"), "log"),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path", "checkpoint"), "resume"),
    **dict.fromkeys(("nproc_per_node", "num_processes", "gpus", "devices", "n_gpus"), "nproc"),
    **dict.fromkeys(("output", "output_file", "o"), "out"),
    **dict.fromkeys(("trials", "num_trials"), "n_trials"),
    "max_seq_length": "max_length",
    "output_dir": "run_dir",
    "lora_r": "r",
    "lora_alpha": "alpha",
}  # fmt: skip


def suggest_option(name: str, known: Iterable[str]) -> str:
    """A sentence with the options that may be meant; empty if none is close. Names are without leading dashes.

    >>> suggest_option("lerning-rate", ["lr", "drop-rate"])
    'Did you mean --lr?'
    >>> suggest_option("num_train_epochs", ["epochs"]), suggest_option("epohs", ["epochs"])
    ('Here it is --epochs.', 'Did you mean --epochs?')
    """
    flags = {each.replace("-", "_"): f"--{each.replace('_', '-')}" for each in known}
    plain = name.lower().replace("-", "_")
    same = ELSEWHERE.get(plain)
    if same in flags:
        return f"Here it is {flags[same]}."
    names = dict(flags)
    names |= {other: flags[ours] for other, ours in ELSEWHERE.items() if ours in flags and other not in flags}
    close = difflib.get_close_matches(plain, names, cutoff=0.6)
    best = close[:1] if close and difflib.SequenceMatcher(None, plain, close[0]).ratio() > 0.85 else close
    meant = dict.fromkeys(names[each] for each in best)
    return f"Did you mean {' or '.join(meant)}?" if meant else ""
