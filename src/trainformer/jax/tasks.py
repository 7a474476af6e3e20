"""Tasks by name on JAX: what a task and the settings of a `Trainer` on torch amount to for a trainer on JAX.

The only place of this mapping. Each option has the name, the default and the meaning that it has on torch; one that
cannot be mapped is refused by name. Plain values go in and come out, so neither jax nor torch is imported here: the
command line describes a trainer with the result, and `make_trainer` builds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.engine.cadence import Cadence

_PACKAGE = "trainformer.jax"
_ON_TORCH = "It exists on torch only."
_IN_CONFIG = "Pass it to SFTConfig or DPOConfig of trainformer.jax."


@dataclass(kw_only=True)
class CausalLM:
    """Train a causal language model on texts, prompts with completions, or conversations."""

    model_name: Any  # the folder or hub name of a model in HuggingFace format
    max_length: int = 2048  # tokens of a sequence at most; fewer, if the model has fewer positions
    dtype: str | None = None  # of the weights: fp32 (default) or bf16
    tokenizer: str | None = None  # its folder or hub name; default: that of the model
    cache_dir: str | None = None  # for tokenised data
    train_on: str = "auto"  # supervised tokens: all, completion, assistant; auto: what suits the records
    truncation: str = "auto"  # of records that are too long: split, truncate, drop
    packing: bool = False  # several records per sequence, which do not attend to each other
    prompt_template: str | None = None  # a format string over the fields of a record
    chunk_tokens: int | None = None  # tokens with logits in memory at once
    z_loss: float = 0.0
    label_smoothing: float = 0.0


@dataclass(kw_only=True)
class DPO:
    """Train a causal language model to prefer the chosen of two answers."""

    model_name: Any  # the folder or hub name of a model in HuggingFace format
    max_length: int = 1024  # tokens of a prompt with its answer at most
    dtype: str | None = None  # of the weights: fp32 (default) or bf16
    tokenizer: str | None = None  # its folder or hub name; default: that of the model
    cache_dir: str | None = None  # for tokenised data
    truncation: str = "auto"  # of records that are too long: truncate, drop
    prompt_template: str | None = None  # a format string over the fields of a record
    chunk_tokens: int | None = None  # tokens with logits in memory at once
    loss: str = "sigmoid"  # ipo, hinge, robust, ...: see loss_type of DPOConfig; without a reference orpo, simpo
    beta: float | None = None  # 0.1, for simpo 2
    gamma: float = 1.0  # the target margin of simpo
    label_smoothing: float = 0.0
    reference: str = "start"  # start: the model before this training; or its folder or hub name


@dataclass(kw_only=True)
class ImageClassification:
    """Train an image classifier: a Vision Transformer, ResNet or ConvNeXt."""

    backbone: str | None  # the folder or hub name of a model in HuggingFace format; None: a small ViT
    num_classes: int | None = None  # None: as many as the data have
    image_size: int | None = None  # images of files are resized to it
    loss: str = "ce"  # cross entropy
    label_smoothing: float = 0.0
    augment: str | None = "basic"  # none: there is no augmentation on JAX


@dataclass(kw_only=True)
class LoRA:
    """Train low-rank matrices on frozen linear layers."""

    r: int = 8  # rank
    alpha: float = 16  # scale of the update, divided by r
    dropout: float = 0.1  # on the input of the adapter
    target_modules: Any = None  # names of layers, all-linear, or a regular expression; None: queries and values
    modules_to_save: list[str] | None = None  # layers to train in full


@dataclass(kw_only=True)
class Settings:
    """The settings of a run. Their names, defaults and meanings are those of `trainformer.Trainer`."""

    # What to train on
    data: Any  # training data
    val_data: Any = None  # validation data, or several sets by name
    callbacks: list[Any] | None = None

    # Length and batches
    epochs: int = 100
    max_steps: int | None = None  # overrides epochs
    batch_size: int = 32  # rows on all devices together
    eval_batch_size: int | None = None  # None: as batch_size
    accumulation_steps: int = 1  # batches of an optimizer step
    seed: int = 42

    # Logging
    log: Any = "console"  # console, wandb, tensorboard, mlflow, none, a logger, or several
    log_every: int | str = 100
    project: str = "trainformer"
    name: str | None = None  # None: the name of the task
    run_dir: str | None = None  # None: runs/<name>

    # Checkpoints
    save_every: int | str | None = "10min"  # None: only the best and the last
    save_strategy: str = "steps"  # the unit of a bare number in save_every: steps, epochs or seconds
    save_best: int = 3
    save_last: int = 1
    save_async: bool = False  # copy the state, write it in the background
    monitor_metric: str = "val/loss"
    monitor_mode: str = "min"
    resume: str | None = "auto"  # auto, a path, or None to start from scratch

    # Evaluation
    eval_every: int | str | None = 1  # epochs, or 500steps, 10min

    # Optimization
    lr: float = 1e-4
    weight_decay: float = 0.01
    warmup_ratio: float = 0.1
    gradient_clip: float | None = 1.0
    optimizer: Any = "adamw"  # name, or {"name": ..., options}
    scheduler: Any = "onecycle"  # constant, linear, cosine, onecycle, wsd; None: constant without warmup
    ema: float | None = None  # decay of an EMA of the weights, used for evaluation and export (the callback EMA)
    nonfinite: str = "raise"  # raise, skip
    drop_last: bool = False  # drop the last batch of an epoch if it is smaller

    # Devices and precision
    precision: str = "auto"  # auto, no, bf16
    gradient_checkpointing: bool = False
    num_workers: int | None = None  # threads that read samples; None: none
    sharding_array: list[int] = field(default_factory=lambda: [1, -1, 1, 1])  # of JAX alone: dp, fsdp[, ep], tp, sp


#: The tasks, adapters and settings by name.
TASKS = {kind.__name__: kind for kind in (CausalLM, DPO, ImageClassification)}
ADAPTERS = {"LoRA": LoRA}

#: Options on torch that are not mapped, and what to do instead.
REFUSED: dict[str, str] = {
    # of tasks for language models
    "attention": "Kernels are chosen for the device.",
    "model_kwargs": "Change the config.json of the model.",
    "rope_scaling": "Change rope_scaling in the config.json of the model.",
    "rope_factor": "Change rope_scaling in the config.json of the model.",
    "on_adapter": "Pass the folder of a model, or lora='folder' to a trainer of trainformer.jax.",
    "base": "Pass the folder of a model, or lora='folder' to a trainer of trainformer.jax.",
    **dict.fromkeys(("neftune_noise_alpha", "ld_alpha"), _ON_TORCH),
    **dict.fromkeys(("router_aux_loss_coef", "router_z_loss_coef", "router_loss"), _IN_CONFIG),
    **dict.fromkeys(("loss_weights", "discopop_tau"), _IN_CONFIG),
    "f_divergence": "Pass f_divergence_type to DPOConfig of trainformer.jax.",
    "f_alpha": "Pass f_alpha_divergence_coef to DPOConfig of trainformer.jax.",
    # of image classification
    "pretrained": "A folder or hub name has its weights; for new ones train a module with ImageClassificationTrainer.",
    "in_chans": "It is that of the images.",
    "checkpoint": "Pass the folder of a model as backbone.",
    "freeze_backbone": "Pass frozen_parameters to trainformer.jax.TrainingArguments.",
    "topk": "The metrics on JAX are loss and accuracy.",
    **dict.fromkeys(("drop_path_rate", "drop_rate", "recipe", "bce_target_threshold", "bce_sum"), _ON_TORCH),
    **dict.fromkeys(("class_weights", "mixup", "cutmix", "mixup_prob", "mixup_off_epoch", "mixup_off_last"), _ON_TORCH),
    **dict.fromkeys(("random_erasing", "tta"), _ON_TORCH),
    # of LoRA
    **dict.fromkeys(("use_dora", "use_rslora", "bias", "trainable_token_indices", "init"), _ON_TORCH),
    "target_parameters": _ON_TORCH,
    # settings of a run
    "val_split": "Name validation data: val_data.",
    "rank_timeout": "jax.distributed has a timeout of its own.",
    "save_dir": "Checkpoints are in the run folder.",
    "keep_every": "Use save_last, or `trainformer ckpt protect` to keep a checkpoint.",
    "eval_on_save": "Use eval_every with the cadence of save_every.",
    "load_components": "A run on JAX resumes completely.",
    "exit_on_signal": "A run on JAX saves and exits on a signal.",
    "weight_decay_end": _ON_TORCH,
    "layer_decay": _ON_TORCH,
    "oom": "Use a smaller batch_size with accumulation_steps.",
    "bad_samples": "Remove them from the data.",
    "sampler": "Every sample is seen once per epoch; a Mixture weighs sources.",
    "device": "Set JAX_PLATFORMS before the program starts.",
    "fp8_recipe": _ON_TORCH,
    "fp8_dim_alignment": _ON_TORCH,
    "qat_recipe": _ON_TORCH,
    "compile": "Steps on JAX are always compiled.",
    "channels_last": "Images on JAX always have their channels last.",
    "activation_offload": "Use gradient_checkpointing.",
    "sdpa_backend": "Kernels are chosen for the device.",
    "matmul_precision": "Set JAX_DEFAULT_MATMUL_PRECISION.",
    "prefetch_factor": "Batches are read ahead.",
    "worker_context": "num_workers are threads.",
    "pin_memory": "Batches are copied while the step before runs.",
    "strategy": "Use sharding_array: dp, fsdp, tp, sp or dp, fsdp, ep, tp, sp.",
    "dispatch_batches": "Every process reads the rows of its devices.",
}


@dataclass(frozen=True)
class Plan:
    """A trainer on JAX: its class, its arguments with their class, and its other keywords, all as plain values.

    `ema` is the decay of a callback EMA that it gets.
    """

    trainer: str
    arguments_type: str
    arguments: dict[str, Any]
    keywords: dict[str, Any]
    ema: float | None = None


def plan(
    task: str, options: Mapping[str, Any], settings: Mapping[str, Any], adapter: Mapping[str, Any] | None = None
) -> Plan:
    """What trainer a task with these options and settings means on JAX. `adapter` are the options of LoRA.

    >>> made = plan("CausalLM", {"model_name": "gpt2"}, {"data": "a.jsonl", "lr": 3e-4})
    >>> made.trainer, made.arguments["learning_rate"], made.keywords["model"]
    ('SFTTrainer', 0.0003, 'gpt2')
    """
    if task not in TASKS:
        hint = f"On JAX there is {', '.join(TASKS)}."
        raise BadArgument(expected("a task that exists on JAX", task, hint))
    chosen, common = _checked(TASKS[task], options, task), _checked(Settings, settings, "the settings of a run")
    arguments, keywords = _run_arguments(common, task), {"train_dataset": common.data, "eval_dataset": common.val_data}
    if common.callbacks:
        keywords["callbacks"] = common.callbacks
    trainer, kind, own, named = _PLANNERS[task](chosen, "max_length" in options)
    if adapter is not None:
        named["lora"] = _lora(_checked(LoRA, adapter, "LoRA"), trainer)
    return Plan(trainer, kind, {**arguments, **own}, {**named, **keywords}, common.ema)


def make_trainer(
    task: str,
    data: Any,
    val_data: Any = None,
    *,
    adapter: Mapping[str, Any] | bool | None = None,
    callbacks: list[Any] | None = None,
    **options: Any,
) -> Any:
    """The trainer on JAX for a task of the main entry point, by its name: CausalLM, DPO or ImageClassification.

    `options` are those of the task and the settings of `trainformer.Trainer`, with their names, defaults and meanings;
    `adapter` are the options of LoRA (True: all at their defaults). Each is mapped to the arguments of the trainer, or
    refused by name.

    >>> from trainformer.jax import make_trainer
    >>> trainer = make_trainer(
    ...     "ImageClassification", "digits", backbone=None, augment="none", max_steps=2, batch_size=16, log="none"
    ... )
    >>> type(trainer).__name__, trainer.train().step.item()
    ('ImageClassificationTrainer', 2)
    """
    if task not in TASKS:
        plan(task, {}, {})
    own = {each.name for each in fields(TASKS[task])}
    of_task = {name: value for name, value in options.items() if name in own}
    rest = {name: value for name, value in options.items() if name not in own}
    settings = {"data": data, "val_data": val_data, "callbacks": callbacks, **rest}
    made = plan(task, of_task, settings, {} if adapter is True else adapter or None)
    package = importlib.import_module(_PACKAGE)
    arguments = getattr(package, made.arguments_type)(**made.arguments)
    keywords = dict(made.keywords)
    if made.ema is not None:
        from trainformer.callbacks import EMA

        given = list(keywords.get("callbacks") or ())
        has_own = any(isinstance(callback, EMA) for callback in given)
        keywords["callbacks"] = given if has_own else [*given, EMA(decay=made.ema)]
    return getattr(package, made.trainer)(arguments, **keywords)


def refuse(name: str, owner: str) -> BadArgument | None:
    """The error for an option that exists on torch alone; None if there is no such option there, either."""
    return BadArgument(f"There is no {name} for {owner} on JAX. {REFUSED[name]}") if name in REFUSED else None


def _checked(kind: type, given: Mapping[str, Any], owner: str) -> Any:
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise refuse(name, owner) or BadArgument(expected(f"options of {owner}", name, did_you_mean(name, known)))
    try:
        return kind(**given)
    except TypeError as error:
        missing = [each.name for each in fields(kind) if each.name not in given and each.name in str(error)]  # type: ignore[arg-type]
        raise BadArgument(expected(f"{' and '.join(missing)} for {owner}", "none")) from error


def _run_arguments(common: Settings, task: str) -> dict[str, Any]:
    """Arguments of the run. Cadences are strings, which name their unit."""
    if common.log_every is None:
        raise BadArgument(expected("log_every to be a cadence on JAX", None, "Metrics are always in metrics.jsonl."))
    if common.save_last < 1:
        raise BadArgument(expected("save_last of at least 1 on JAX", common.save_last))
    if isinstance(common.eval_every, Mapping):
        raise BadArgument(expected("one eval_every for all validation sets on JAX", dict(common.eval_every)))
    units: dict[str, Any] = {"log_every": "steps", "save_every": common.save_strategy, "eval_every": "epochs"}
    for name, unit in units.items():
        Cadence.parse(getattr(common, name), unit, name)
    evaluates = common.val_data is not None and common.eval_every is not None
    optimizer, options = _named(common.optimizer, "optimizer")
    scheduler, of_scheduler = _named(common.scheduler, "scheduler")
    monitored = common.monitor_metric.removeprefix("val/")
    best = {"metric_for_best_model": monitored, "greater_is_better": common.monitor_mode == "max"}
    return {
        "model_name": common.name or task,
        "output_dir": common.run_dir,
        "num_train_epochs": common.epochs,
        "max_steps": -1 if common.max_steps is None else common.max_steps,
        "total_batch_size": common.batch_size * common.accumulation_steps,
        "gradient_accumulation_steps": common.accumulation_steps,
        "eval_batch_size": common.eval_batch_size or common.batch_size,
        "seed": common.seed,
        "log": common.log,
        "logging_steps": common.log_every,
        "project": common.project,
        "save_strategy": "no" if common.save_every is None else "steps",
        "save_steps": _cadence(common.save_every, common.save_strategy),
        "save_best": common.save_best if evaluates else 0,
        "save_total_limit": common.save_last,
        "save_async": common.save_async,
        **(best if evaluates else {}),
        "resume": common.resume,
        "evaluation_strategy": "steps" if evaluates else "no",
        "eval_steps": _cadence(common.eval_every, "epochs") if evaluates else None,
        "learning_rate": common.lr,
        "weight_decay": common.weight_decay,
        "warmup_ratio": 0.0 if scheduler is None else common.warmup_ratio,
        "max_grad_norm": common.gradient_clip,
        "optimizer": optimizer,
        "optimizer_kwargs": options,
        "scheduler": scheduler or "constant",
        "scheduler_kwargs": of_scheduler,
        "nonfinite": common.nonfinite,
        "drop_last": common.drop_last,
        "dtype": {"no": "fp32", "auto": "auto"}.get(common.precision, common.precision),
        "gradient_checkpointing": "nothing_saveable" if common.gradient_checkpointing else None,
        "dataloader_num_workers": common.num_workers or 0,
        "sharding_array": list(common.sharding_array),
    }


def _named(given: Any, what: str) -> tuple[Any, dict[str, Any]]:
    """A name and its options, from a name or a mapping with the key `name`."""
    if not isinstance(given, Mapping):
        return given, {}
    if set(given) & {"type", "interval", "frequency"} or "name" not in given:
        raise BadArgument(expected(f"{what} to be a name or a mapping with a name on JAX", dict(given)))
    return given["name"], {name: value for name, value in given.items() if name != "name"}


def _cadence(every: int | str | None, unit: str) -> str | None:
    return f"{every}{unit}" if isinstance(every, int) else every


def _text(chosen: CausalLM | DPO, asks_length: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and keywords that all trainers of language models share."""
    arguments = {
        # A length that was not asked for does not have to fit the model.
        "max_sequence_length": chosen.max_length if asks_length else None,
        "param_dtype": chosen.dtype or "fp32",
        "cache_dir": None if chosen.cache_dir is None else str(chosen.cache_dir),
        "truncation": chosen.truncation,
        "prompt_template": chosen.prompt_template,
        "chunk_tokens": chosen.chunk_tokens,
        "label_smoothing": chosen.label_smoothing,
    }
    model = str(chosen.model_name) if isinstance(chosen.model_name, Path) else chosen.model_name
    return arguments, {"model": model, "processing_class": chosen.tokenizer}


_Planned = tuple[str, str, dict[str, Any], dict[str, Any]]


def _causal_lm(chosen: CausalLM, asks_length: bool) -> _Planned:
    supervised: dict[str, dict[str, Any]] = {
        "auto": {},
        "all": {"train_on_inputs": True},
        "completion": {"completion_only_loss": True},
        "assistant": {"assistant_only_loss": True},
    }
    if chosen.train_on not in supervised:
        hint = did_you_mean(str(chosen.train_on), supervised)
        raise BadArgument(expected(f"train_on to be one of {', '.join(supervised)}", chosen.train_on, hint))
    arguments, keywords = _text(chosen, asks_length)
    arguments |= {"packing": chosen.packing, "z_loss": chosen.z_loss, **supervised[chosen.train_on]}
    return "SFTTrainer", "SFTConfig", arguments, keywords


def _dpo(chosen: DPO, asks_length: bool) -> _Planned:
    arguments, keywords = _text(chosen, asks_length)
    arguments |= {"max_sequence_length": arguments["max_sequence_length"] or chosen.max_length}
    arguments |= {"loss_type": chosen.loss, "beta": chosen.beta, "gamma": chosen.gamma}
    # Of a new adapter, the model without it is the model before this training.
    named = {} if chosen.reference in ("start", "base") else {"reference_model": chosen.reference}
    return "DPOTrainer", "DPOConfig", arguments, {**keywords, **named}


def _image_classification(chosen: ImageClassification, asks_length: bool) -> _Planned:
    if chosen.augment not in (None, "none"):
        do = "There is no augmentation on JAX: pass augment='none'."
        raise BadArgument(expected("no augment for ImageClassification on JAX", chosen.augment, do))
    if chosen.loss != "ce":
        raise BadArgument(
            expected("loss='ce' for ImageClassification on JAX", chosen.loss, "'bce' exists on torch only.")
        )
    backbone = chosen.backbone
    if backbone is not None and "/" not in str(backbone) and not Path(backbone).is_dir():
        do = "Models of timm exist on torch only; None is a small ViT."
        what = "backbone to be the folder or hub name (owner/name) of a ViT, ResNet or ConvNeXt on JAX"
        raise BadArgument(expected(what, backbone, do))
    names = ("num_classes", "image_size", "label_smoothing")
    keywords = {"model": backbone, **{name: getattr(chosen, name) for name in names}}
    return "ImageClassificationTrainer", "TrainingArguments", {}, keywords


_PLANNERS: dict[str, Callable[[Any, bool], _Planned]] = {
    "CausalLM": _causal_lm,
    "DPO": _dpo,
    "ImageClassification": _image_classification,
}


def _lora(chosen: LoRA, trainer: str) -> dict[str, Any]:
    if trainer == "ImageClassificationTrainer":
        raise BadArgument(expected("no adapter for ImageClassification on JAX", "LoRA", _ON_TORCH))
    names = {"r": chosen.r, "alpha": chosen.alpha, "dropout": chosen.dropout, "targets": chosen.target_modules}
    return {**names, "modules_to_save": list(chosen.modules_to_save or ())}
