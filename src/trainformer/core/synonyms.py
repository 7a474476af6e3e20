"""Names of arguments in other libraries, and what to write here instead: for suggestions in errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trainformer.core.errors import did_you_mean

#: What to write instead of arguments of HF's `TrainingArguments`, Lightning's `Trainer`, Keras' `fit` and timm.
SETTINGS: dict[str, str] = {
    **dict.fromkeys(("max_epochs", "n_epochs", "num_epochs", "num_train_epochs", "nb_epoch", "epoch"), "epochs"),
    **dict.fromkeys(("num_steps", "max_iters", "total_steps", "num_train_steps", "max_iter"), "max_steps"),
    **dict.fromkeys(("learning_rate", "lr_rate", "base_lr", "lr0", "max_lr"), "lr"),
    **dict.fromkeys(("batchsize", "bs", "per_device_train_batch_size", "train_batch_size"), "batch_size"),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "val_batch_size", "validation_batch_size", "test_batch_size"), "eval_batch_size"
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps", "accum_steps", "grad_accum"),
        "accumulation_steps",
    ),
    **dict.fromkeys(
        ("gradient_clip_val", "max_grad_norm", "clip_grad", "grad_clip", "clip_grad_norm", "max_norm", "clipnorm"),
        "gradient_clip",
    ),
    **dict.fromkeys(("optim", "opt", "optimizers", "configure_optimizers"), "optimizer"),
    **dict.fromkeys(("sched", "lr_scheduler", "lr_scheduler_type", "schedule", "lr_schedule"), "scheduler"),
    **dict.fromkeys(("warmup_steps", "warmup_epochs", "num_warmup_steps", "warmup"), "warmup_ratio"),
    **dict.fromkeys(("model_ema", "model_ema_decay", "ema_decay", "use_ema"), "ema"),
    **dict.fromkeys(("workers", "dataloader_num_workers", "n_workers"), "num_workers"),
    **dict.fromkeys(("dataloader_pin_memory", "pin_mem"), "pin_memory"),
    "dataloader_drop_last": "drop_last",
    "dataloader_prefetch_factor": "prefetch_factor",
    **dict.fromkeys(("fp16", "amp", "half"), "precision='fp16'"),
    "bf16": "precision='bf16'",
    **dict.fromkeys(("mixed_precision", "dtype", "torch_dtype"), "precision"),
    **dict.fromkeys(("accelerator", "gpu", "use_gpu", "no_cuda", "use_cpu", "cuda"), "device"),
    **dict.fromkeys(
        ("devices", "gpus", "num_gpus", "num_nodes", "num_processes"),
        "Start several processes with torchrun or 'trainformer launch --nproc N'.",
    ),
    **dict.fromkeys(("torch_compile", "jit_compile"), "compile"),
    "tf32": "matmul_precision='high'",
    **dict.fromkeys(("output_dir", "default_root_dir", "logdir", "log_dir", "out_dir", "save_path", "dir"), "run_dir"),
    **dict.fromkeys(("run_name", "experiment_name", "exp_name", "experiment"), "name"),
    **dict.fromkeys(("logger", "loggers", "report_to", "log_to", "log_wandb"), "log"),
    **dict.fromkeys(("logging_steps", "log_every_n_steps", "log_interval", "log_freq", "print_freq"), "log_every"),
    **dict.fromkeys(
        ("eval_steps", "eval_strategy", "evaluation_strategy", "check_val_every_n_epoch", "val_check_interval"),
        "eval_every",
    ),
    **dict.fromkeys(("save_steps", "checkpoint_every", "save_interval", "save_freq"), "save_every"),
    "save_total_limit": "Pass save_last and save_best.",
    **dict.fromkeys(("save_top_k", "checkpoint_hist"), "save_best"),
    **dict.fromkeys(("enable_checkpointing", "checkpointing"), "Pass save_every=None: only best and last."),
    **dict.fromkeys(("monitor", "metric_for_best_model", "eval_metric"), "monitor_metric"),
    **dict.fromkeys(("mode", "greater_is_better"), "monitor_mode"),
    "load_best_model_at_end": "The best checkpoints are kept (save_best); trainer.load(...) loads one.",
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path", "checkpoint", "initial_checkpoint"), "resume"),
    **dict.fromkeys(("seeds", "random_seed", "random_state", "data_seed", "seed_everything"), "seed"),
    **dict.fromkeys(("train_dataset", "train_data", "train_loader", "train_dataloader", "dataset", "x"), "data"),
    **dict.fromkeys(
        ("eval_dataset", "validation_data", "val_set", "valid_data", "val_loader", "val_dataset", "val_dataloader"),
        "val_data",
    ),
    **dict.fromkeys(("validation_split", "val_size", "test_size"), "val_split"),
    **dict.fromkeys(("model", "module", "net"), "Pass a task: an object with `model`, `train_step` and `eval_step`."),
    "callback": "callbacks",
    **dict.fromkeys(
        ("early_stopping", "patience", "early_stopping_patience"), "callbacks=[EarlyStopping(patience=...)]"
    ),
    **dict.fromkeys(
        ("verbose", "enable_progress_bar", "progress_bar", "disable_tqdm"), "Pass log='none' for no output."
    ),
    **dict.fromkeys(("fast_dev_run", "num_sanity_val_steps"), "Call trainer.check()."),
    "shuffle": "Leave it out: training data is shuffled, and a DataLoader keeps its own order.",
    "collate_fn": "Define collate_fn as a method of the task.",
    **dict.fromkeys(("compute_metrics", "metrics"), "Return metrics from eval_step of the task."),
    **dict.fromkeys(("loss", "loss_fn", "criterion"), "Return the loss from train_step of the task."),
    "gradient_checkpoint": "gradient_checkpointing",
    **dict.fromkeys(("llrd", "layerwise_lr_decay"), "layer_decay"),
}  # fmt: skip


def suggest_setting(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown setting; empty if nothing comes close.

    >>> suggest_setting("max_epochs", ["epochs", "lr"])
    "Write epochs instead of 'max_epochs'."
    >>> suggest_setting("lerning_rate", ["epochs", "lr"])
    "Write lr instead of 'learning_rate'."
    >>> suggest_setting("weight_decy", ["weight_decay", "lr"])
    "Did you mean 'weight_decay'?"
    """
    plain = name.lower().replace("-", "_")
    other = SETTINGS.get(plain, "")
    if other:
        return other if other.endswith(".") else f"Write {other} instead of {name!r}."
    known = list(known)
    close = difflib.get_close_matches(plain, [*known, *SETTINGS], n=1, cutoff=0.75)  # of a misspelled one, too
    return suggest_setting(close[0], known) if close and close[0] in SETTINGS else did_you_mean(plain, known, most=1)


def suggest_synonym(name: str, known: Iterable[str]) -> str:
    """The argument of another library that means the same, or is spelled alike; empty if nothing comes close.

    >>> suggest_synonym("lr", ["learning_rate", "num_train_epochs"])
    "Did you mean 'learning_rate'?"
    """
    known = list(known)
    same = [other for other in known if SETTINGS.get(other) == SETTINGS.get(name, name)]
    return f"Did you mean {same[0]!r}?" if same else did_you_mean(name, known)
