"""`TrainingArguments` and `Seq2SeqTrainingArguments`: every field of HF, and Forgather's additions.

Names, defaults and meanings are those of HF. `argument_checks` normalises and validates values on construction,
`argument_methods` has the properties and methods, and `settings` translates arguments to the settings of a run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.synonyms import suggest_synonym
from trainformer.hf.argument_checks import (
    check_forgather,
    check_forgather_trainer,
    check_supported,
    normalise,
    validate,
)
from trainformer.hf.argument_methods import ArgumentMethods

#: Names of older versions of transformers.
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu=True",
    "use_ipex": "nothing: it is gone from transformers, too",
    "group_by_length": "train_sampling_strategy='group_by_length'",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "fp16_backend": "fp16=True",
    "half_precision_backend": "fp16=True",
    "include_inputs_for_metrics": "include_for_metrics=['inputs']",
    "torchdynamo": "torch_compile_backend",
}


class _ArgumentsMeta(type):
    """Checks keyword arguments before the dataclass does, so that a wrong name raises a helpful error."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                hint = f"Use {_RENAMED[name]}." if name in _RENAMED else suggest_synonym(name, known)
                raise BadArgument(expected(f"fields of {cls.__name__}", name, hint))
        return super().__call__(*args, **kwargs)


@dataclass(repr=False)
class MinimalTrainingArguments(ArgumentMethods, metaclass=_ArgumentsMeta):
    """The arguments with the names and meanings of HF."""

    output_dir: str | None = None  # None: "trainer_output"
    _: KW_ONLY
    overwrite_output_dir: bool = False  # accepted for compatibility: nothing is deleted

    # Training
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1  # if positive, overrides num_train_epochs
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict | str | None = None
    warmup_steps: float = 0  # below 1: a fraction of all steps
    warmup_ratio: float = 0.0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None  # "momentum=0.9,nesterov=True"
    # HfArgumentParser only understands unions in this order.
    optim_target_modules: None | str | list[str] = None  # noqa: RUF036
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no clipping
    label_smoothing_factor: float = 0.0
    average_tokens_across_devices: bool = True
    neftune_noise_alpha: float | None = None
    auto_find_batch_size: bool = False  # batches that do not fit into memory are split anyway
    seed: int = 42
    data_seed: int | None = None  # of the data order; None: as seed
    full_determinism: bool = False

    # Device and precision
    device: str | None = None  # reads as a torch.device
    use_cpu: bool = False
    bf16: bool = False
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict | str | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    torch_empty_cache_steps: int | None = None
    use_cache: bool = False
    use_liger_kernel: bool = False
    liger_kernel_config: dict | str | None = None

    # Data
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    dataloader_drop_last: bool = False
    train_sampling_strategy: str = "random"  # random, sequential, group_by_length
    length_column_name: str = "length"
    ignore_data_skip: bool = False
    remove_unused_columns: bool = True
    label_names: list[str] | None = None

    # Logging
    logging_dir: str | None = None  # where trainformer's own records go; None: none are written
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_nan_inf_filter: bool = True
    log_level: str = "passive"
    log_level_replica: str = "warning"
    log_on_each_node: bool = True
    disable_tqdm: bool | None = None
    report_to: None | str | list[str] = "none"  # noqa: RUF036
    run_name: str | None = None
    project: str = "huggingface"
    trackio_space_id: str | None = None
    trackio_bucket_id: str | None = None
    trackio_static_space_id: str | None = None
    include_num_input_tokens_seen: str | bool = "no"  # no, all, non_padding
    debug: str | list[str] = ""
    skip_memory_metrics: bool = True

    # Evaluation
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    eval_accumulation_steps: int | None = None  # predictions are always moved to the CPU, batch by batch
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False  # predictions of all ranks are always gathered
    prediction_loss_only: bool = False
    batch_eval_metrics: bool = False
    include_for_metrics: list[str] = dataclasses.field(default_factory=list)

    # Checkpoints
    save_strategy: str = "steps"  # no, steps, epoch, best
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    save_on_each_node: bool = False
    enable_jit_checkpoint: bool = False  # a run saves on SIGTERM anyway
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    restore_callback_states_from_checkpoint: bool = False  # they are restored anyway
    resume_from_checkpoint: str | None = None  # a path; True: the newest; "auto": the newest if there is one

    # Hub
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"  # end, every_save, checkpoint, all_checkpoints
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_always_push: bool = False
    hub_revision: str | None = None

    # Distributed training; see also `strategy_options`
    ddp_backend: str | None = None  # accepted for compatibility: CPUs use gloo, GPUs use NCCL
    ddp_timeout: int = 1800  # seconds that ranks wait for each other
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None  # True: BatchNorm statistics of rank 0, not of the global batch
    ddp_static_graph: bool | None = None
    accelerator_config: dict | str | None = None
    parallelism_config: Any = None
    fsdp: str | None = None
    fsdp_config: dict | str | None = None
    deepspeed: dict | str | None = None
    local_rank: int = -1  # set by the launcher

    # Read by scripts only
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False

    def __post_init__(self) -> None:
        normalise(self)
        validate(self)


@dataclass(kw_only=True, repr=False)
class BaseTrainingArguments(MinimalTrainingArguments):
    """Forgather's additions: which checkpoints are kept, and how torch computes."""

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
    save_optimizer_state: bool = True  # False: not part of checkpoints, like the next three
    save_scheduler_state: bool = True
    save_dataset_state: bool = True  # the position in the data, and the progress of the run
    save_rng_state: bool = True
    restore_optimizer_state: bool = True  # False: not loaded from checkpoints, like the next three
    restore_scheduler_state: bool = True
    restore_dataset_state: bool = True
    restore_rng_state: bool = True
    dispatch_batches: bool = False  # rank 0 reads the data and sends each rank its part
    strategy_options: dict | str | None = None  # options of the strategy of DDPTrainer, FSDPTrainer, ...

    def __post_init__(self) -> None:
        super().__post_init__()
        check_forgather(self)


@dataclass(kw_only=True, repr=False)
class TrainingArguments(BaseTrainingArguments):
    """All arguments of `trainformer.hf.Trainer`.

    >>> args = TrainingArguments("out", num_train_epochs=1, eval_strategy="epoch", bf16=True)
    >>> args.mixed_precision, str(args.eval_strategy), args.do_eval
    ('bf16', 'epoch', True)
    """

    # Of Forgather's Trainer
    save_safetensors: bool = True  # False has no effect: weights are always safetensors, and tied ones are no problem
    torch_compile_dynamic: bool | None = None
    torch_compile_full_graph: bool = False
    activation_memory_budget: float | None = None  # how much of the activations torch.compile keeps, from 0 to 1
    epoch_train_steps: int = 100_000  # accepted at its default, like those below
    gc_threshold: float = 0.5
    construct_model_on: str = "default"
    fuse_optim_with_backward: bool = False
    speed_metrics_start_step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_forgather_trainer(self)


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """All arguments of `trainformer.hf.Seq2SeqTrainer`.

    >>> Seq2SeqTrainingArguments("out", predict_with_generate=True, generation_num_beams=2).generation_num_beams
    2
    """

    sortish_sampler: bool = False
    predict_with_generate: bool = False
    generation_max_length: int | None = None
    generation_num_beams: int | None = None
    generation_config: str | None = None  # a GenerationConfig, a path or a model ID

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-serialisable."""
        config: Any = self.generation_config
        return {**super().to_dict(), "generation_config": config.to_dict() if hasattr(config, "to_dict") else config}


def arguments_from(args: Any) -> Any:
    """Arguments for a trainer: our own, also as a dict, None for the defaults, or an instance of transformers' classes.

    The latter is used itself, with Forgather's additions at their defaults.
    """
    if args is None or isinstance(args, dict):
        args = TrainingArguments(**(args or {}))
    if isinstance(args, MinimalTrainingArguments) and not isinstance(args, BaseTrainingArguments):
        args = TrainingArguments(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)})
    if not isinstance(args, BaseTrainingArguments):
        if not any(c.__module__.startswith("transformers.") for c in type(args).__mro__):
            raise BadArgument(expected("args to be TrainingArguments", type(args).__name__))
        _complete(args)
    check_supported(args)
    return args


def _complete(args: Any) -> None:
    """Add the fields that only our classes have to arguments of transformers."""
    for field in dataclasses.fields(TrainingArguments):
        if not hasattr(args, field.name):
            has_default = field.default is not dataclasses.MISSING
            make: Any = field.default_factory
            setattr(args, field.name, field.default if has_default else make())
    config = args.accelerator_config
    args.dispatch_batches = bool(getattr(config, "dispatch_batches", None))
