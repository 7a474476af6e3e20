"""`TrainingArguments`: HF's fields with Forgather's additions, validated on construction.

`settings` translates them to the settings of a run. HF fields that are not supported are listed at the end, each with
what to do instead. A field passed with HF's own default is accepted, as it asks for nothing; any other value raises,
because ignoring it would train something else than was asked for.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any

import torch

from trainformer.backends.torch.memory import sdpa_backends
from trainformer.backends.torch.quantize import check_recipes
from trainformer.callbacks.compat.huggingface_types import IntervalStrategy
from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.secrets import mask
from trainformer.distributed import TorchProcessGroup
from trainformer.hf.distributed import read_accelerator_config, run_first, this_process


class ParallelMode(Enum):
    """Whether a run is distributed, for scripts that print it."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"


class _ArgumentsMeta(type):
    """Checks keyword arguments before the dataclass does, so that unsupported HF fields raise a helpful error."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        given = read_accelerator_config(kwargs, known)
        for name in [name for name in given if name not in known]:
            if name not in UNSUPPORTED_FIELDS:
                raise BadArgument(expected(f"fields of {cls.__name__}", name, did_you_mean(name, known)))
            default, instead = UNSUPPORTED_FIELDS[name]
            accepted = default if isinstance(default, tuple) else (default,)
            value = given.pop(name)
            if str(getattr(value, "value", value)) not in map(str, accepted):
                raise BadArgument(
                    f"trainformer.hf does not support the argument {name} of HF (received {name}={value!r}). {instead}"
                )
        return super().__call__(*args, **given)


@dataclass
class MinimalTrainingArguments(metaclass=_ArgumentsMeta):
    """The arguments with the names and meanings of HF."""

    output_dir: str = "trainer_output"
    _: KW_ONLY
    overwrite_output_dir: bool = False

    # Training
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1  # if positive, overrides num_train_epochs
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict | None = None
    warmup_steps: float = 0  # below 1: a fraction of all steps
    warmup_ratio: float = 0.0
    optim: str = "adamw_torch"
    optim_args: str | None = None  # "momentum=0.9,nesterov=True"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no clipping
    label_smoothing_factor: float = 0.0
    seed: int = 42
    full_determinism: bool = False

    # Device and precision
    device: str | None = None
    use_cpu: bool = False
    bf16: bool = False
    fp16: bool = False
    tf32: bool | None = None
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None

    # Data
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_drop_last: bool = False
    train_sampling_strategy: str = "random"  # random, sequential, group_by_length
    remove_unused_columns: bool = True
    label_names: list[str] | None = None

    # Logging
    logging_dir: str | None = None
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    disable_tqdm: bool = False
    # HfArgumentParser only understands unions in this order.
    report_to: None | str | list[str] = "none"  # noqa: RUF036
    run_name: str | None = None
    project: str = "huggingface"

    # Evaluation
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    prediction_loss_only: bool = False
    include_for_metrics: list[str] = dataclasses.field(default_factory=list)

    # Checkpoints
    save_strategy: str = "steps"  # no, steps, epoch, best
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    resume_from_checkpoint: str | None = None  # a path; True: the newest; "auto": the newest if there is one

    # Distributed training; see also `strategy_options`
    ddp_backend: str | None = None  # accepted for compatibility: CPUs use gloo, GPUs use NCCL
    ddp_timeout: int = 1800  # seconds that ranks wait for each other
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None  # True: BatchNorm statistics of rank 0, not of the global batch

    # Read by scripts only
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self.logging_strategy = _strategy("logging_strategy", self.logging_strategy)
        self.eval_strategy = _strategy("eval_strategy", self.eval_strategy)
        if str(self.save_strategy) != "best":
            self.save_strategy = _strategy("save_strategy", self.save_strategy, ", 'best'")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        self.lr_scheduler_type = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        self.optim = str(getattr(self.optim, "value", self.optim))
        self.lr_scheduler_kwargs = dict(self.lr_scheduler_kwargs or {})
        if self.bf16 and self.fp16:
            raise BadArgument("Expected bf16 or fp16, received both. Keep the one you mean.")
        if self.train_sampling_strategy not in ("random", "sequential", "group_by_length"):
            what = "train_sampling_strategy to be 'random', 'sequential' or 'group_by_length'"
            raise BadArgument(expected(what, self.train_sampling_strategy))
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None:
            self.torch_compile = True
        if self.dataloader_prefetch_factor is not None and self.dataloader_num_workers == 0:
            do = "Set dataloader_num_workers, or leave it out."
            raise BadArgument(expected("dataloader_prefetch_factor with workers", self.dataloader_prefetch_factor, do))
        if self.logging_dir is None:
            self.logging_dir = os.path.join(self.output_dir, "runs", f"{time.time_ns()}_{platform.node()}")
        self._resolve_best_metric()
        if self.ddp_backend not in (None, "gloo", "nccl"):
            what = "ddp_backend to be 'gloo' (used on CPUs), 'nccl' (used on GPUs) or None"
            raise BadArgument(expected(what, self.ddp_backend))
        _check("ddp_timeout", self.ddp_timeout, lambda v: v > 0, "a positive number of seconds")

    def _check_numbers(self) -> None:
        whole = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        for name in whole:
            _check(name, getattr(self, name), lambda v: v == int(v) and v >= 1, "a whole number of at least 1")
        for name in ("learning_rate", "logging_steps", "save_steps", "num_train_epochs"):
            _check(name, getattr(self, name), lambda v: v > 0, "a positive number")
        for name in ("weight_decay", "warmup_steps", "max_grad_norm", "adam_epsilon", "eval_delay"):
            _check(name, getattr(self, name), lambda v: v >= 0, "a number of at least 0")
        for name in ("warmup_ratio", "label_smoothing_factor", "adam_beta1", "adam_beta2"):
            _check(name, getattr(self, name), lambda v: 0 <= v <= 1, "a number from 0 to 1")
        if self.eval_steps is not None:
            _check("eval_steps", self.eval_steps, lambda v: v > 0, "a positive number, or None")
        if self.save_total_limit is not None:
            _check("save_total_limit", self.save_total_limit, lambda v: v >= 1, "a whole number of at least 1, or None")
        _check("max_steps", self.max_steps, lambda v: v == -1 or v >= 1, "a whole number of at least 1, or -1")
        if self.warmup_ratio and self.warmup_steps:
            raise BadArgument("Expected warmup_steps or warmup_ratio, received both. Keep the one you mean.")

    def _resolve_best_metric(self) -> None:
        needs_best = self.load_best_model_at_end or self.save_strategy == "best"
        if needs_best and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if needs_best and self.eval_strategy == "no":
            option = "load_best_model_at_end" if self.load_best_model_at_end else "save_strategy='best'"
            do = "The best model is chosen by its evaluation."
            raise BadArgument(expected(f"an eval_strategy with {option}", "no", do))
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = is_greater_better(self.metric_for_best_model)

    # -- properties and methods of HF ----------------------------------------------------------------------

    train_batch_size = property(lambda self: self.per_device_train_batch_size)
    eval_batch_size = property(lambda self: self.per_device_eval_batch_size)
    process_index = property(lambda self: this_process().rank)
    local_process_index = property(lambda self: this_process().local_rank)
    world_size = property(lambda self: this_process().world_size)
    n_gpu = property(lambda self: 1)  # per process
    should_save = should_log = property(lambda self: this_process().rank == 0)
    local_rank = property(lambda self: this_process().local_rank if this_process().world_size > 1 else -1)

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether several processes train together."""
        return ParallelMode.DISTRIBUTED if this_process().world_size > 1 else ParallelMode.NOT_PARALLEL

    def get_process_log_level(self) -> int:
        """The log level of trainformer."""
        return logging.getLogger("trainformer").getEffectiveLevel()

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Run a block on the main process of each machine (or of all machines) first, then on the others."""
        process_group = self.join()
        return run_first(process_group, is_first=process_group.local_rank == 0 if local else process_group.is_main)

    def join(self) -> TorchProcessGroup:
        """Join the process group."""
        return TorchProcessGroup.join("cpu" if self.use_cpu else self.device, self.ddp_timeout)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Warm-up steps of a run with `num_training_steps` steps."""
        ratio = self.warmup_ratio or (self.warmup_steps if self.warmup_steps < 1 else 0.0)
        return -int(-num_training_steps * ratio // 1) if ratio else int(self.warmup_steps)

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-serialisable."""
        return {f.name: jsonable(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All fields as numbers and strings, for loggers. Secrets are masked."""
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in mask(self.to_dict()).items()}

    def to_json_string(self) -> str:
        """All fields as JSON. Secrets are masked."""
        return json.dumps(mask(self.to_dict()), indent=2)


@dataclass(kw_only=True)
class BaseTrainingArguments(MinimalTrainingArguments):
    """Forgather's additions: which checkpoints are kept, and how torch computes.

    Checkpoints always hold the full state of a run: model, optimizer, scheduler, data position and random state.
    """

    default_dtype: str | None = None  # for `model_init`
    max_eval_steps: int = -1  # batches; -1: the whole dataset
    preserve_best_model: bool = False
    best_model_metric: str = "loss"
    best_model_greater_is_better: bool | None = None  # None: inferred from the name
    preserve_n_best: int = 1
    eval_on_save: bool = False
    enable_activation_offloading: bool = False
    detect_anomaly: bool = False
    sdpa_backend: None | str | list[str] = None  # noqa: RUF036  math, flash, efficient, cudnn, an enum, or several
    sdpa_set_priority: bool = False
    float32_matmul_precision: str | None = None
    dynamo_recompile_limit: int | None = None
    mixed_precision: str | None = None
    fp8_recipe: str | None = None
    fp8_dim_alignment: int = 16
    qat_recipe: str | None = None
    dispatch_batches: bool = False  # rank 0 reads the data and sends each rank its part
    strategy_options: dict | None = None  # options of the strategy of DDPTrainer, FSDPTrainer, ...

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolve_precision()
        if self.strategy_options is not None and not isinstance(self.strategy_options, Mapping):
            what = "strategy_options to be a mapping, such as {'cpu_offload': True}"
            raise BadArgument(expected(what, self.strategy_options))
        check_recipes("no", self.fp8_recipe, self.qat_recipe)
        sdpa_backends(self.sdpa_backend)
        if self.default_dtype is not None and not isinstance(getattr(torch, self.default_dtype, None), torch.dtype):
            raise BadArgument(expected("default_dtype to be a torch dtype, such as 'bfloat16'", self.default_dtype))
        if self.float32_matmul_precision not in (None, "highest", "high", "medium"):
            what = "float32_matmul_precision to be 'highest', 'high', 'medium' or None"
            raise BadArgument(expected(what, self.float32_matmul_precision))
        if self.tf32 is not None and self.float32_matmul_precision is not None:
            raise BadArgument("Expected tf32 or float32_matmul_precision, received both. Keep the one you mean.")
        _check("preserve_n_best", self.preserve_n_best, lambda v: v >= 1, "a whole number of at least 1")
        _check("fp8_dim_alignment", self.fp8_dim_alignment, lambda v: v >= 1, "a whole number of at least 1")
        what = "a whole number of at least 1, or -1 for all"
        _check("max_eval_steps", self.max_eval_steps, lambda v: v == -1 or v >= 1, what)

    def _resolve_precision(self) -> None:
        if self.mixed_precision == "no":
            self.mixed_precision = None
        if self.mixed_precision not in (None, "bf16", "fp16"):
            raise BadArgument(expected("mixed_precision to be None, 'no', 'bf16' or 'fp16'", self.mixed_precision))
        flagged = "bf16" if self.bf16 else "fp16" if self.fp16 else None
        if flagged and self.mixed_precision and flagged != self.mixed_precision:
            raise BadArgument(
                f"Expected one precision, received {flagged}=True and mixed_precision={self.mixed_precision!r}. "
                "Keep the one you mean."
            )
        self.mixed_precision = self.mixed_precision or flagged


@dataclass(kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """All arguments of `trainformer.hf.Trainer`.

    >>> args = TrainingArguments("out", num_train_epochs=1, eval_strategy="epoch", bf16=True)
    >>> args.mixed_precision, str(args.eval_strategy)
    ('bf16', 'epoch')
    """


def is_greater_better(metric: str) -> bool:
    """Whether a higher value of a metric is better, inferred from its name.

    >>> is_greater_better("eval_loss"), is_greater_better("perplexity"), is_greater_better("accuracy")
    (False, False, True)
    """
    return not any(word in metric for word in ("loss", "perplexity", "error"))


def _strategy(name: str, value: Any, more: str = "") -> IntervalStrategy:
    if isinstance(value, bool) or value is None:
        value = "no"
    try:
        return IntervalStrategy(str(getattr(value, "value", value)))
    except ValueError:
        raise BadArgument(expected(f"{name} to be 'no', 'steps', 'epoch'{more}", value)) from None


def _check(name: str, value: Any, is_valid: Callable[[Any], bool], what: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_valid(value):
        raise BadArgument(expected(f"{name} to be {what}", value))


_FSDP = "Use trainformer.hf.FSDPTrainer, with strategy_options such as {'cpu_offload': True, 'replicas': 2}."
_HUB = "Nothing here talks to the hub. After training: model.push_to_hub(...), or `huggingface-cli upload`."
_CALLBACK = "Pass the callback of transformers for it in `callbacks`; it works unchanged."

_NON_REENTRANT: tuple[Any, ...] = (None, {}, {"use_reentrant": False})  # equivalent to what we do anyway

# Unsupported fields of HF: (default, or a tuple of accepted values; what to do instead)
UNSUPPORTED_FIELDS: dict[str, tuple[Any, str]] = {
    "accelerator_config": (None, "Of its options, only dispatch_batches is supported."),
    "auto_find_batch_size": (
        False,
        "Not needed: a micro-batch that does not fit into memory is split, with the same loss.",
    ),
    "average_tokens_across_devices": (True, "Losses are always averaged over the tokens of all ranks."),
    "batch_eval_metrics": (False, "Use preprocess_logits_for_metrics to keep less of each batch."),
    "bf16_full_eval": (False, "Evaluation uses the precision of training: bf16=True."),
    "fp16_full_eval": (False, "Evaluation uses the precision of training: fp16=True."),
    "data_seed": (None, "`seed` determines the order of the data."),
    "dataloader_in_order": (True, "Batches always arrive in order; exact resuming needs it."),
    "dataloader_multiprocessing_context": (None, "Call torch.multiprocessing.set_start_method(...) instead."),
    "ddp_static_graph": ((None, False), "Pass strategy_options={'static_graph': True} to DDPTrainer."),
    "debug": ("", "Use detect_anomaly=True to find NaNs, and Trainer.check() before a run."),
    "deepspeed": (None, "Use AccelTrainer with DeepSpeed, or FSDPTrainer, which shards like ZeRO."),
    "enable_jit_checkpoint": (False, "A run always saves a checkpoint on SIGTERM."),
    "eval_accumulation_steps": (None, "Predictions are always moved to the CPU after each batch."),
    "eval_do_concat_batches": (True, "compute_metrics always receives the whole evaluation at once."),
    "eval_use_gather_object": ((False, True), "Predictions of all ranks are always gathered."),
    "fsdp": ((None, "", [], False), _FSDP),
    "fsdp_config": ((None, {}), _FSDP),
    "gradient_checkpointing_kwargs": (_NON_REENTRANT, "Gradient checkpointing is always non-reentrant."),
    "hub_always_push": (False, _HUB),
    "hub_model_id": (None, _HUB),
    "hub_private_repo": (None, _HUB),
    "hub_revision": (None, _HUB),
    "hub_strategy": ("every_save", _HUB),
    "hub_token": (None, _HUB),
    "push_to_hub": (False, _HUB),
    "ignore_data_skip": (False, "Resuming jumps to its position in the data; there is nothing to skip."),
    "include_num_input_tokens_seen": ("no", "They are always counted: state.num_input_tokens_seen."),
    "length_column_name": ("length", "Lengths are taken from input_ids."),
    "liger_kernel_config": (None, "Apply Liger's kernels to the model before you pass it."),
    "use_liger_kernel": (False, "Apply Liger's kernels to the model before you pass it."),
    "local_rank": (-1, "Remove it: the launcher sets the rank."),
    "log_level": ("passive", "Use logging.getLogger('trainformer').setLevel(...)."),
    "log_level_replica": ("warning", "Use logging.getLogger('trainformer').setLevel(...)."),
    "log_on_each_node": (True, "Only rank 0 of the first node logs."),
    "logging_nan_inf_filter": (True, "A non-finite loss is an error here, and never hidden."),
    "neftune_noise_alpha": (None, "Add the noise in a forward hook on the embeddings."),
    "optim_target_modules": (None, "Pass an optimizer in `optimizers`."),
    "parallelism_config": (None, "Use FSDPTrainer, TPTrainer or PipelineTrainer, with strategy_options."),
    "restore_callback_states_from_checkpoint": (False, "The states of callbacks are always restored."),
    "save_on_each_node": (False, "Checkpoints are written once, to a file system that all nodes share."),
    "save_only_model": (False, "Checkpoints can always be resumed from. Use save_model() to write weights alone."),
    "skip_memory_metrics": (True, "Pass the callback trainformer.hf.PeakMemory()."),
    "torch_empty_cache_steps": (None, "Call torch.cuda.empty_cache() in a callback's on_step_end."),
    "trackio_bucket_id": (None, _CALLBACK),
    "trackio_space_id": (None, _CALLBACK),
    "trackio_static_space_id": (None, _CALLBACK),
    "use_cache": (False, "Set model.config.use_cache."),
}
