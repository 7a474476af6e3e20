"""Translates `TrainingArguments` to the settings of a run."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainformer.checkpointing import Retention
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.data.text.collate import LengthGroupedSampler
from trainformer.hf.argument_checks import LOGGERS, is_greater_better
from trainformer.hf.arguments import BaseTrainingArguments
from trainformer.hf.distributed import chosen_device
from trainformer.hf.retention import TotalRetention
from trainformer.run import RunSettings
from trainformer.run.settings import FrontOptions

CHECKPOINT_NAME = "checkpoint-{}"
KEEP_ALL = 10**9  # checkpoints
_WITHOUT_TOTAL = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")


class HfSettings(RunSettings):
    """Settings of a run whose `save_last` counts all checkpoints, as `save_total_limit` does."""

    def retention(self) -> Retention:
        return TotalRetention(**vars(super().retention()))


def settings_of(
    args: BaseTrainingArguments, batches: int | None, resume: str | None, strategy: Any = "auto", replicas: int = 1
) -> RunSettings:
    """The settings of a run with `batches` batches per epoch, or an unknown number of them.

    The arguments give the batch size per device; it is multiplied by `replicas`, the number of data-parallel ranks.
    """
    steps = planned_steps(args, batches)
    data_seed = args.seed if args.data_seed is None else args.data_seed
    samplers = {
        "random": partial(RandomOrder, seed=data_seed),
        "sequential": SequentialSampler,
        "group_by_length": partial(_by_length, args=args, size=args.per_device_train_batch_size * replicas),
    }
    if getattr(args.accelerator_config, "split_batches", False):
        replicas = 1  # the batch sizes are those of all ranks together
    tf32 = None if args.tf32 is None else "high" if args.tf32 else "highest"
    ends_by_steps = args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs)
    return HfSettings(
        epochs=max(1, math.ceil(args.num_train_epochs)),
        max_steps=steps if ends_by_steps else None,
        batch_size=int(args.per_device_train_batch_size) * replicas,
        eval_batch_size=int(args.per_device_eval_batch_size) * replicas,
        accumulation_steps=int(args.gradient_accumulation_steps),
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        gradient_clip=args.max_grad_norm or None,
        seed=args.seed,
        sampler=samplers[args.train_sampling_strategy],
        drop_last=args.dataloader_drop_last,
        device=chosen_device(args),
        strategy=strategy,
        dispatch_batches=args.dispatch_batches,
        rank_timeout=float(args.ddp_timeout),
        precision=args.mixed_precision or "no",
        fp8_recipe=args.fp8_recipe,
        fp8_dim_alignment=args.fp8_dim_alignment,
        qat_recipe=args.qat_recipe,
        compile=_compile(args),
        # With options of its own it is enabled by `features.training_features`.
        gradient_checkpointing=args.gradient_checkpointing and not args.gradient_checkpointing_kwargs,
        activation_offload=args.enable_activation_offloading,
        matmul_precision=tf32 or args.float32_matmul_precision,
        num_workers=args.dataloader_num_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_context=args.dataloader_multiprocessing_context,
        pin_memory=None if args.dataloader_pin_memory else False,
        log=_loggers(args),
        project=args.project,
        name=args.run_name,
        run_dir=args.logging_dir,
        log_every=_cadence(args.logging_strategy, args.logging_steps, steps),
        eval_every=_cadence(args.eval_strategy, args.eval_steps, steps),
        save_every=_cadence(args.save_strategy, args.save_steps, steps),
        save_dir=str(Path(str(args.output_dir)).absolute()),
        save_best=num_best_kept(args),
        save_last=args.save_total_limit or KEEP_ALL,
        eval_on_save=args.eval_on_save,
        monitor_metric=monitored_metric(args)[0],
        monitor_mode="max" if monitored_metric(args)[1] else "min",
        resume=resume,
    )


def front_options(args: BaseTrainingArguments) -> FrontOptions:
    """HF's defaults where they differ from those of `trainformer.Trainer`: when to log, and the checkpoint names."""
    plan = {
        "log_first": args.logging_first_step,
        # A partial last epoch counts as an epoch; step-based evaluation and saving include the last step.
        "log_remaining": args.logging_strategy == "epoch",
        "eval_at_end": args.eval_strategy != "no",
        "save_at_end": args.save_strategy in ("steps", "epoch"),
        "eval_when_stopped": args.eval_strategy == "epoch",
    }
    return FrontOptions(
        plan=plan,
        checkpoint_name=CHECKPOINT_NAME,
        shows_messages=not args.disable_tqdm,
        keeps_records=False,
        marks_latest=False,
        records_task=False,
        checks_cadences=False,
        skips_deleted=True,
    )


def planned_steps(args: BaseTrainingArguments, batches: int | None) -> int | None:
    """Optimizer steps of the whole run, or None if unknown."""
    if args.max_steps > 0:
        return int(args.max_steps)
    if batches is None:
        return None
    return math.ceil(args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps))


def _cadence(strategy: str, every: float | None, total: int | None) -> int | str | None:
    """A cadence in steps or epochs; `every` below 1 is a fraction of all steps."""
    if strategy == "epoch":
        return "1epochs"
    if strategy != "steps" or every is None:
        return None
    if every < 1:
        if total is None:
            do = "Pass max_steps, or a whole number."
            raise BadArgument(expected("a number of steps for data without a length", every, do))
        every = math.ceil(total * every)
    return f"{int(every)}steps"


def monitored_metric(args: BaseTrainingArguments) -> tuple[str, bool]:
    """The metric that selects the best checkpoint, under our name, and whether higher is better."""
    if args.preserve_best_model and args.metric_for_best_model is None:
        name, greater = args.best_model_metric, args.best_model_greater_is_better
    else:
        name, greater = args.metric_for_best_model or "loss", args.greater_is_better
    return f"val/{name.removeprefix('eval_')}", is_greater_better(name) if greater is None else greater


def num_best_kept(args: BaseTrainingArguments) -> int:
    """How many of the best checkpoints are kept besides the last `save_total_limit`."""
    return args.preserve_n_best if args.preserve_best_model or args.metric_for_best_model is not None else 0


def parse_optim_args(args: Any) -> dict[str, Any]:
    """The options in `optim_args`, such as ``"momentum=0.9,nesterov=True"``."""
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in (args.optim_args or "").split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadArgument(expected("optim_args like 'momentum=0.9,nesterov=True'", args.optim_args))
        try:
            options[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[name.strip()] = value.strip()
    return options


def scheduler_factory(args: Any) -> Callable[[Any, Any], Any]:
    """Creates the scheduler of transformers for these arguments."""
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    optimization = require("transformers.optimization", "hf", "for lr_scheduler_type")
    known = [name.value for name in optimization.SchedulerType]
    if kind not in known:
        raise BadArgument(expected(f"lr_scheduler_type to be one of {', '.join(known)}", kind))

    def make(optimizer: Any, total: Any) -> Any:
        if total is None and kind not in _WITHOUT_TOTAL:
            raise BadArgument(
                f"The scheduler {kind!r} needs the number of steps, but the data has no length. Pass max_steps."
            )
        return optimization.get_scheduler(
            kind,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(total or 0),
            num_training_steps=total,
            scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
        )

    return make


def _by_length(dataset: Any, args: Any, size: int) -> Any:
    """A sampler that groups samples of similar lengths, which are those of `length_column_name` if there is one."""
    known = args.length_column_name in (getattr(dataset, "column_names", None) or ())
    lengths = [int(length) for length in dataset[args.length_column_name]] if known else dataset
    step = size * int(args.gradient_accumulation_steps)
    return LengthGroupedSampler(lengths, step, seed=args.seed, num_replicas=1, rank=0)


class RandomOrder:
    """The order in which HF shuffles the dataset: a permutation drawn with the seed plus the epoch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._length = len(dataset)
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Indices of an epoch."""
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._length, generator=generator).numpy()


class SequentialSampler:
    """Samples the dataset in order, in every epoch."""

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Indices of an epoch."""
        return np.arange(self._length)


def _compile(args: BaseTrainingArguments) -> Any:
    if not args.torch_compile:
        return False
    options = {
        "backend": args.torch_compile_backend,
        "mode": args.torch_compile_mode,
        "dynamic": getattr(args, "torch_compile_dynamic", None),
        "fullgraph": getattr(args, "torch_compile_full_graph", None) or None,
    }
    return {name: value for name, value in options.items() if value is not None} or True


def _loggers(args: BaseTrainingArguments) -> list[str] | str:
    return [name for name in args.report_to or () if name in LOGGERS] or "none"
