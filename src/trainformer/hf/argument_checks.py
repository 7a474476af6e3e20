"""Normalises and validates arguments, and refuses what cannot be done."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainformer.backends.torch.memory import sdpa_backends
from trainformer.backends.torch.quantize import check_recipes
from trainformer.callbacks.compat.huggingface_types import IntervalStrategy, Name, SaveStrategy
from trainformer.core.errors import BadArgument, expected
from trainformer.hf.distributed import AcceleratorConfig, this_process
from trainformer.utils.files import check_local

logger = logging.getLogger("trainformer")

LOG_LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "passive": -1,
}

#: Loggers of trainformer. Others that transformers knows are added as its callbacks.
LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}

_DICTS = (
    "accelerator_config", "fsdp_config", "deepspeed", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs",
    "liger_kernel_config", "strategy_options",
)  # fmt: skip
_HUB_STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")


def normalise(args: Any) -> None:
    """Convert every value to the type that the rest of the package reads, and derive what was not set."""
    for name in ("output_dir", "logging_dir", "resume_from_checkpoint"):
        check_local(name, getattr(args, name))
    args.output_dir = os.path.expanduser(args.output_dir if args.output_dir is not None else "trainer_output")
    for name in _DICTS:
        value = getattr(args, name, None)
        if isinstance(value, str) and value.startswith("{"):  # from a command line
            setattr(args, name, _parse_json(name, value))
    args.logging_strategy = _choice(IntervalStrategy, "logging_strategy", args.logging_strategy)
    args.eval_strategy = _choice(IntervalStrategy, "eval_strategy", args.eval_strategy)
    args.save_strategy = _choice(SaveStrategy, "save_strategy", args.save_strategy)
    for name in ("lr_scheduler_type", "optim", "hub_strategy"):
        value = getattr(args, name)
        setattr(args, name, Name(getattr(value, "value", value)))
    args.debug = _words(args.debug)
    args.disable_tqdm = bool(args.disable_tqdm)
    args.max_grad_norm = 0.0 if args.max_grad_norm is None else args.max_grad_norm
    if isinstance(args.include_num_input_tokens_seen, bool):
        args.include_num_input_tokens_seen = "all" if args.include_num_input_tokens_seen else "no"
    args.do_eval = args.do_eval or args.eval_strategy != "no"
    if args.eval_strategy == "steps" and not args.eval_steps:
        args.eval_steps = args.logging_steps
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.use_cpu:
        args.dataloader_pin_memory = False
    args.report_to = _reports(args.report_to)
    if args.logging_dir is None and set(args.report_to) & set(LOGGERS):
        args.logging_dir = os.path.join(args.output_dir, "runs", f"{time.time_ns()}_{platform.node()}")
    elif args.logging_dir is not None:
        args.logging_dir = os.path.expanduser(args.logging_dir)
    args.accelerator_config = AcceleratorConfig.read(args.accelerator_config)
    process = this_process()
    args.local_rank = process.local_rank if process.world_size > 1 else -1
    _resolve_best_metric(args)
    _resolve_device(args)


def _resolve_device(args: Any) -> None:
    """`device` reads as the device of this process. What the user chose is kept for the strategy."""
    args._chosen_device = None if args.device is None else str(args.device)
    if args.use_cpu:
        args.device = torch.device("cpu")
    elif args.device is not None:
        args.device = torch.device(args.device)
    elif torch.cuda.is_available():
        args.device = torch.device("cuda", this_process().local_rank % torch.cuda.device_count())
    else:
        args.device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _resolve_best_metric(args: Any) -> None:
    by_metric = args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    if (args.load_best_model_at_end or by_metric) and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = is_greater_better(args.metric_for_best_model)


def is_greater_better(metric: str) -> bool:
    """Whether a higher value of a metric is better, inferred from its name.

    >>> is_greater_better("eval_loss"), is_greater_better("perplexity"), is_greater_better("accuracy")
    (False, False, True)
    """
    return not any(word in metric for word in ("loss", "perplexity", "error"))


def validate(args: Any) -> None:
    """Raise if a value, or a combination of values, makes no sense."""
    _check_numbers(args)
    for first, second in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval"), ("warmup_steps", "warmup_ratio")):
        if getattr(args, first) and getattr(args, second):
            raise BadArgument(f"Expected {first} or {second}, received both. Keep the one you mean.")
    by_evaluation = {
        "load_best_model_at_end": args.load_best_model_at_end,
        "save_strategy='best'": args.save_strategy == "best",
        f"lr_scheduler_type={args.lr_scheduler_type!r}": args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
    }
    for option, is_set in by_evaluation.items():
        if is_set and args.eval_strategy == "no":
            raise BadArgument(expected(f"an eval_strategy with {option}", "no", "It depends on evaluations."))
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise BadArgument(
            "`args.metric_for_best_model` must be provided with save_strategy='best': the metric of evaluations, such "
            "as 'loss' or 'accuracy', that says which checkpoint is best."
        )
    choices = {
        "train_sampling_strategy": ("random", "sequential", "group_by_length"),
        "include_num_input_tokens_seen": ("no", "all", "non_padding"),
        "hub_strategy": _HUB_STRATEGIES,
        "log_level": tuple(LOG_LEVELS),
        "log_level_replica": tuple(LOG_LEVELS),
        "ddp_backend": (None, "gloo", "nccl"),  # CPUs use gloo, GPUs NCCL
    }
    for name, accepted in choices.items():
        if getattr(args, name) not in accepted:
            raise BadArgument(expected(f"{name} to be one of {', '.join(map(repr, accepted))}", getattr(args, name)))
    if args.dataloader_prefetch_factor is not None and args.dataloader_num_workers == 0:
        do = "Set dataloader_num_workers, or leave it out."
        raise BadArgument(expected("dataloader_prefetch_factor with workers", args.dataloader_prefetch_factor, do))


def _check_numbers(args: Any) -> None:
    whole = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    for name in whole:
        _check(args, name, lambda v: v == int(v) and v >= 1, "a whole number of at least 1")
    for name, strategy in (("logging_steps", args.logging_strategy), ("save_steps", args.save_strategy)):
        if strategy == "steps":
            _check(args, name, lambda v: v > 0 and (v < 1 or v == int(v)), "a whole number, or a fraction below 1")
    _check(args, "num_train_epochs", lambda v: v > 0, "a positive number")
    for name in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "adam_epsilon", "eval_delay"):
        _check(args, name, lambda v: v >= 0, "a number of at least 0")
    for name in ("warmup_ratio", "label_smoothing_factor", "adam_beta1", "adam_beta2"):
        _check(args, name, lambda v: 0 <= v <= 1, "a number from 0 to 1")
    if args.eval_strategy == "steps":
        _check(args, "eval_steps", lambda v: v > 0 and (v < 1 or v == int(v)), "a whole number, or a fraction below 1")
    for name in ("save_total_limit", "torch_empty_cache_steps", "eval_accumulation_steps"):
        if getattr(args, name) is not None:
            _check(args, name, lambda v: isinstance(v, int) and v >= 1, "a whole number of at least 1, or None")
    if args.neftune_noise_alpha is not None:
        _check(args, "neftune_noise_alpha", lambda v: v >= 0, "a number of at least 0, or None")
    _check(args, "max_steps", lambda v: v == -1 or v >= 1, "a whole number of at least 1, or -1")
    _check(args, "ddp_timeout", lambda v: v > 0, "a positive number of seconds")


def check_forgather(args: Any) -> None:
    """Normalise and validate the fields that HF does not have."""
    if args.accelerator_config.dispatch_batches is not None:
        args.dispatch_batches = args.accelerator_config.dispatch_batches
    _resolve_precision(args)
    if args.strategy_options is not None and not isinstance(args.strategy_options, Mapping):
        what = "strategy_options to be a mapping, such as {'cpu_offload': True}"
        raise BadArgument(expected(what, args.strategy_options))
    check_recipes("no", args.fp8_recipe, args.qat_recipe)
    sdpa_backends(args.sdpa_backend)
    if args.default_dtype is not None and not isinstance(getattr(torch, args.default_dtype, None), torch.dtype):
        raise BadArgument(expected("default_dtype to be a torch dtype, such as 'bfloat16'", args.default_dtype))
    if args.float32_matmul_precision not in (None, "highest", "high", "medium"):
        what = "float32_matmul_precision to be 'highest', 'high', 'medium' or None"
        raise BadArgument(expected(what, args.float32_matmul_precision))
    if args.tf32 is not None and args.float32_matmul_precision is not None:
        raise BadArgument("Expected tf32 or float32_matmul_precision, received both. Keep the one you mean.")
    _check(args, "preserve_n_best", lambda v: v >= 1, "a whole number of at least 1")
    _check(args, "fp8_dim_alignment", lambda v: v >= 1, "a whole number of at least 1")
    _check(args, "max_eval_steps", lambda v: v == -1 or v >= 1, "a whole number of at least 1, or -1 for all")


#: Fields of Forgather's Trainer that have no other meaning here, with their defaults and what to do instead.
_FORGATHER_ONLY = {
    "epoch_train_steps": (100_000, "Set max_steps for data without a length."),
    "gc_threshold": (0.5, "Use torch_empty_cache_steps."),
    "construct_model_on": ("default", "Pass model_init; a strategy that shards the model builds it in parts."),
    "fuse_optim_with_backward": (False, "The gradients of a step are summed and checked before the optimizer runs."),
    "speed_metrics_start_step": (1, "Use trainformer.callbacks.Throughput, which leaves out the first steps."),
}


def check_forgather_trainer(args: Any) -> None:
    """Validate the fields of Forgather's `Trainer`."""
    for name, (default, instead) in _FORGATHER_ONLY.items():
        if getattr(args, name) != default:
            raise BadArgument(expected(f"{name} to be {default!r}", getattr(args, name), instead))
    if not args.save_safetensors:
        logger.info("save_safetensors=False has no effect: weights are written as safetensors, tied ones too")
    if args.activation_memory_budget is not None:
        _check(args, "activation_memory_budget", lambda v: 0 <= v <= 1, "a number from 0 to 1, or None")
        if not args.torch_compile:
            raise BadArgument(expected("torch_compile with activation_memory_budget", False, "Set torch_compile=True."))
    if args.seed == -1:  # any
        args.seed = int.from_bytes(os.urandom(4)) >> 1


def _resolve_precision(args: Any) -> None:
    if args.mixed_precision == "no":
        args.mixed_precision = None
    if args.mixed_precision not in (None, "bf16", "fp16"):
        raise BadArgument(expected("mixed_precision to be None, 'no', 'bf16' or 'fp16'", args.mixed_precision))
    flagged = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    if flagged and args.mixed_precision and flagged != args.mixed_precision:
        raise BadArgument(
            f"Expected one precision, received {flagged}=True and mixed_precision={args.mixed_precision!r}. "
            "Keep the one you mean."
        )
    args.mixed_precision = args.mixed_precision or flagged


_FSDP = "Use trainformer.hf.FSDPTrainer, with strategy_options such as {'cpu_offload': True, 'replicas': 2}."


def check_supported(args: Any) -> None:
    """Raise if arguments, perhaps of transformers' own class, ask for something that cannot be done here."""
    process = this_process()
    several_nodes = process.world_size > int(os.environ.get("LOCAL_WORLD_SIZE", process.world_size))
    refused = {
        "deepspeed": (args.deepspeed, "Use AccelTrainer with DeepSpeed, or FSDPTrainer, which shards like ZeRO."),
        "fsdp": (args.fsdp, _FSDP),
        "fsdp_config": (args.fsdp_config, _FSDP),
        "parallelism_config": (
            args.parallelism_config,
            "Use FSDPTrainer, TPTrainer or PipelineTrainer, with strategy_options.",
        ),
        "average_tokens_across_devices": (
            not args.average_tokens_across_devices and process.world_size > 1,
            "A step of several ranks is always the mean over all of their tokens.",
        ),
        "save_on_each_node": (
            args.save_on_each_node and several_nodes,
            "Checkpoints are written once, to a file system that all nodes share.",
        ),
        "debug": ("tpu_metrics_debug" in args.debug, "TPUs are not supported."),
    }
    for name, (is_asked_for, instead) in refused.items():
        if is_asked_for:
            raise BadArgument(
                f"trainformer.hf does not support the argument {name} of HF (received {getattr(args, name)!r}). "
                f"{instead}"
            )
    _apply_accumulation(args)


def _apply_accumulation(args: Any) -> None:
    """`num_steps` of the accelerator config is another way to set gradient_accumulation_steps."""
    options = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    steps = options.get("num_steps")
    if steps is None:
        return
    if args.gradient_accumulation_steps not in (1, steps):
        raise BadArgument(
            "The `AcceleratorConfig`'s `num_steps` is set but gradient_accumulation_steps is, too: received "
            f"{steps} and {args.gradient_accumulation_steps}. Keep the one you mean."
        )
    args.gradient_accumulation_steps = steps


def _choice(kind: Any, name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        value = "no"
    try:
        return kind(str(getattr(value, "value", value)))
    except ValueError:
        choices = ", ".join(repr(str(member)) for member in kind)
        raise BadArgument(expected(f"{name} to be {choices}", value)) from None


def _check(args: Any, name: str, is_valid: Callable[[Any], bool], what: str) -> None:
    value = getattr(args, name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_valid(value):
        raise BadArgument(expected(f"{name} to be {what}", value))


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadArgument(expected(f"{name} to be a JSON object", text, f"({error})")) from error


def _words(value: Any) -> list[str]:
    words = [] if value is None else value.split() if isinstance(value, str) else list(value)
    names = [str(getattr(word, "value", word)) for word in words]
    for name in names:
        if name not in ("underflow_overflow", "tpu_metrics_debug"):
            raise BadArgument(expected("debug to be 'underflow_overflow' or empty", name))
    return names


def _reports(value: Any) -> list[str]:
    names = [] if value is None else [value] if isinstance(value, str) else list(value)
    if "all" in names:
        names = [name for name, package in LOGGERS.items() if importlib.util.find_spec(package) is not None]
    names = [name for name in names if name != "none"]
    if os.environ.get("KUBEFLOW_TRAINER_SERVER_URL") and "kubeflow" not in names:  # as in transformers
        names.append("kubeflow")
    return names
