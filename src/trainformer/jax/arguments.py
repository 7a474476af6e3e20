"""`TrainingArguments`: the arguments of a run on JAX, named as in EasyDeL and HuggingFace, checked on construction.

Other names of the arguments are in `aliases`, JSON is in `serialization`. `run_settings` translates them to the
settings that all entry points share.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import optax

from trainformer.backends.jax.optimizers import make_optimizer
from trainformer.backends.jax.precision import resolve_dtype
from trainformer.backends.jax.schedules import Schedule, make_schedule
from trainformer.backends.jax.sharding import DATA_AXES, resolve_dims
from trainformer.backends.jax.step import resolve_remat
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.engine.cadence import Cadence
from trainformer.jax.aliases import ALIASES, SETTINGS, default_of, resolve_aliases
from trainformer.jax.batch_sizes import BatchSizes, resolve_batch_sizes
from trainformer.jax.field_types import check_types
from trainformer.jax.limits import SaveInterval, TimeLimit, parse_duration
from trainformer.jax.serialization import JsonArguments
from trainformer.models.jax.attention_kernels import KERNELS
from trainformer.utils.files import check_local

_ALL = 10**9  # checkpoints: no limit
_LIMITS = ("per_epoch_training_steps", "per_epoch_evaluation_steps", "max_evaluation_steps")


class _Arguments(type):
    """Translates aliases before the dataclass sees the keywords, and records which arguments were passed."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            do = "Write their names: TrainingArguments(output_dir=...)."
            raise BadArgument(expected(f"the arguments of {cls.__name__} by name", args[0], do))
        known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
        kwargs = resolve_aliases(kwargs, known, cls.__name__)
        made = super().__call__(**kwargs)
        made.passed = frozenset(kwargs)
        check_types(made)
        made.check()
        return made


@dataclass
class TrainingArguments(JsonArguments, metaclass=_Arguments):
    """All settings of a run apart from model and data.

    Cadences (`logging_steps`, `save_steps`, `eval_steps`) are steps, or strings such as ``"10min"`` and ``"2epochs"``.
    `passed` holds the names of the arguments that were passed explicitly.
    """

    linked: ClassVar[tuple[str, ...]] = (
        *("evaluation_strategy", "eval_steps", "do_eval", "metric_for_best_model"),
        *("save_strategy", "save_steps", "save_interval_minutes", "logging_steps"),
    )

    _: KW_ONLY
    model_name: str | None = "trainformer"
    output_dir: str | None = None  # None: runs/<name>

    # Training
    num_train_epochs: float = 3
    max_steps: int = -1  # overrides num_train_epochs
    training_time_limit: str | float | None = None  # stop after this time: seconds, or "45m", "2h30m", "1d"
    total_batch_size: int | None = None  # rows per optimizer step over all devices
    per_device_train_batch_size: int = 8  # rows of a micro-batch on one data shard
    per_device_eval_batch_size: int = 8
    eval_batch_size: int | None = None  # over all devices
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    learning_rate_end: float | None = None  # at the end of the schedule
    scheduler: Any = "linear"  # constant, linear, cosine, onecycle, inverse_sqrt, wsd, or a function of the step
    scheduler_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    optimizer: Any = "adamw"  # adamw, adam, adafactor, lion, muon, sgd, or an optax factory or transformation
    optimizer_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.01
    tx_mu_dtype: Any = None  # dtype of the first moment of adam, adamw and lion; None: float32
    max_grad_norm: float | None = 1.0  # None or 0: no clipping
    frozen_parameters: str | list[str] | None = None  # regexes of paths such as "layers/attention/q_proj/kernel"
    steps_per_execution: int = 1  # steps that are dispatched together, for small models
    nonfinite: str = "raise"  # or skip: skip steps with a non-finite loss or gradient
    seed: int = 42

    # Devices and precision
    # dp, fsdp, tp, sp or dp, fsdp, ep, tp, sp; -1: the remaining devices
    sharding_array: tuple[int, ...] = (1, -1, 1, 1)
    dtype: str = "auto"  # compute dtype: bf16, fp32, or fp8 (bf16 around fp8 matmuls); auto: bf16 on GPUs and TPUs
    param_dtype: str = "fp32"  # of the stored weights
    gradient_checkpointing: Any = None  # remat policy: nothing_saveable, dots_saveable, ...; None: off
    use_fast_kernels: bool = True  # False: attention_kernel="xla"
    attention_kernel: str = "auto"  # xla, cudnn, splash, ring; auto: the fastest that applies
    unroll_layers: int | bool | None = None  # layers per scan iteration; True: all; None: depends on the device

    # Data
    max_sequence_length: int | None = None  # None: the model's maximum
    packing: bool = False  # several documents per sequence; attention stays inside each document
    train_on_inputs: bool | None = None  # also train on prompts; None: only if the data do not mark them
    shuffle: bool = True
    shuffle_seed_train: int | None = None  # of the order of the training data; None: seed
    drop_last: bool = False  # drop an incomplete last batch of an epoch
    dataloader_num_workers: int = 0
    ids_to_pop_from_dataset: list[str] | None = None  # columns to drop
    per_epoch_training_steps: int | None = None  # at most so many optimizer steps per epoch
    per_epoch_evaluation_steps: int | None = None  # at most so many batches per evaluation
    max_evaluation_steps: int | None = None  # the same

    # Logging
    log: Any = "console"  # console, wandb, tensorboard, mlflow, none, a logger, or a list of them
    logging_steps: int | str = 10
    project: str = "trainformer"
    run_name: str | None = None  # None: model_name, after trainer_prefix
    trainer_prefix: str | None = None

    # Evaluation
    evaluation_strategy: str = "no"  # no, steps, epoch
    eval_steps: int | str | None = None  # None: logging_steps
    do_eval: bool = False  # True: evaluation_strategy="epoch" unless set

    # Checkpoints
    save_strategy: str = "steps"  # no: the final one only; steps, epoch
    save_steps: int | str | None = 500
    save_interval_minutes: float | None = None  # also save every so many minutes; alone, instead of save_steps
    save_total_limit: int | None = None  # None: keep all
    save_best: int | None = None  # best checkpoints to keep as well; None: 1 with metric_for_best_model
    save_async: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None  # None: inferred from the name
    resume: str | None = dataclasses.field(
        default="auto", metadata={"do": "Pass 'auto', a path, or None to start from scratch."}
    )

    passed: frozenset[str] = dataclasses.field(default=frozenset(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Normalise values that can be written in several ways. `check` runs afterwards."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, os.PathLike):
                setattr(self, field.name, os.fspath(value))
            elif isinstance(value, str) and hasattr(value, "value"):
                setattr(self, field.name, str(value.value))  # a member of an enum
        for name in ("scheduler_kwargs", "optimizer_kwargs"):
            value = getattr(self, name)
            setattr(self, name, dict(value or {}) if isinstance(value, Mapping | None) else value)
        for name in ("evaluation_strategy", "save_strategy"):
            value = getattr(self, name)
            setattr(self, name, "no" if value is None or value is False else value)
        axes = self.sharding_array
        if isinstance(axes, (tuple, list)):
            # The axis for experts is dropped if its size is 1.
            self.sharding_array = (*axes[:2], *axes[3:]) if len(axes) == 5 and axes[2] == 1 else tuple(axes)
        self.dtype = _dtype_name("dtype", self.dtype)
        self.param_dtype = _dtype_name("param_dtype", self.param_dtype)
        self.max_steps = -1 if self.max_steps is None else self.max_steps
        self.resume = None if self.resume is False else self.resume  # type: ignore[comparison-overlap]
        self.log = list(self.log) if isinstance(self.log, tuple) else self.log
        if isinstance(self.frozen_parameters, tuple):
            self.frozen_parameters = list(self.frozen_parameters)
        if self.max_evaluation_steps == -1:
            self.max_evaluation_steps = None
        if isinstance(self.ids_to_pop_from_dataset, (tuple, set, list)):
            self.ids_to_pop_from_dataset = list(self.ids_to_pop_from_dataset) or None
        if self.tx_mu_dtype is not None:
            self.tx_mu_dtype = _dtype_name("tx_mu_dtype", self.tx_mu_dtype)

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Validate all fields. A subclass with more fields extends this."""
        self._check_numbers()
        self._resolve_strategies()
        self._check_choices()
        axes = self.sharding_array if isinstance(self.sharding_array, tuple) else ()
        # The axes alone: the number of devices is not known yet.
        resolve_dims(self.sharding_array, math.prod(size for size in axes if isinstance(size, int) and size > 0))
        resolve_remat(self.gradient_checkpointing)
        frozen = self.frozen_parameters
        for pattern in frozen if isinstance(frozen, list) else [frozen] if frozen is not None else []:
            what = "frozen_parameters to be regular expressions"
            if not isinstance(pattern, str):
                raise BadArgument(expected(what, pattern))
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadArgument(expected(what, pattern, f"{error}.")) from error
        schedule = self._schedule(1000)  # any length: only checks that it can be built
        if isinstance(self.optimizer, optax.GradientTransformation):
            if "weight_decay" in self.passed and self.weight_decay:
                do = "Pass it to the optimizer, or pass the optimizer by name or as a factory (optimizer=optax.adamw)."
                raise BadArgument(expected("no weight_decay with an optimizer object", self.weight_decay, do))
            make_optimizer(self.optimizer, schedule, **self.optimizer_kwargs)
        elif not callable(self.optimizer):  # a factory may have side effects: it is called by the run
            make_optimizer(self.optimizer, schedule, self.weight_decay, **self._optimizer_options())

    def _check_numbers(self) -> None:
        batches = "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"
        for name in (*batches, "steps_per_execution"):
            self._integer(name, 1)
        for name in ("warmup_steps", "seed", "dataloader_num_workers"):
            self._integer(name, 0)
        for name in ("total_batch_size", "eval_batch_size", "max_sequence_length", "save_total_limit", *_LIMITS):
            self._integer(name, 1, or_none=True)
        for name in ("save_best", "shuffle_seed_train"):
            self._integer(name, 0, or_none=True)
        parse_duration(self.training_time_limit)
        if self.max_steps != -1:
            self._integer("max_steps", 1, more=", or -1 for whole epochs")
        self._positive("learning_rate", "num_train_epochs")
        self._weight("weight_decay")
        self._number("warmup_ratio", lambda v: 0 <= v <= 1, "a number from 0 to 1")
        for name in ("max_grad_norm", "learning_rate_end"):
            if getattr(self, name) is not None:
                self._number(name, lambda v: v >= 0, "a number of at least 0, or None")
        if self.unroll_layers is not None and not isinstance(self.unroll_layers, bool):
            self._integer("unroll_layers", 1, more=", True or None")

    def _check_choices(self) -> None:
        if self.attention_kernel not in KERNELS:
            do = did_you_mean(str(self.attention_kernel), KERNELS)
            raise BadArgument(
                expected(f"attention_kernel to be one of {', '.join(KERNELS)}", self.attention_kernel, do)
            )
        if not self.use_fast_kernels and self.attention_kernel not in ("auto", "xla"):
            do = "Leave out use_fast_kernels=False."
            raise BadArgument(expected("attention_kernel='xla' with use_fast_kernels=False", self.attention_kernel, do))
        if self.nonfinite not in ("raise", "skip"):
            raise BadArgument(expected("nonfinite to be 'raise' or 'skip'", self.nonfinite))
        for name in ("output_dir", "resume"):
            check_local(name, getattr(self, name))
        for name in ("logging_steps", "save_steps", "eval_steps"):
            Cadence.parse(getattr(self, name), "steps", name)

    def _resolve_strategies(self) -> None:
        """Passing `eval_steps` or `save_steps` alone implies the strategy "steps"."""
        minutes = self.save_interval_minutes
        if minutes is not None:
            self._number("save_interval_minutes", lambda v: v > 0, "a positive number, or None")
            if not self.passed & {"save_steps", "save_strategy"}:
                self.save_steps = f"{minutes}min"
        for strategy, steps in (("evaluation_strategy", "eval_steps"), ("save_strategy", "save_steps")):
            value = getattr(self, strategy)
            if value not in ("no", "steps", "epoch"):
                raise BadArgument(expected(f"{strategy} to be 'no', 'steps' or 'epoch'", value))
            if strategy not in self.passed and steps in self.passed:
                value = "no" if getattr(self, steps) is None else "steps"
            setattr(self, strategy, value)
        if self.do_eval and self.evaluation_strategy == "no":
            if "evaluation_strategy" in self.passed:
                raise BadArgument("Expected an evaluation_strategy with do_eval=True, received 'no'. Keep one of them.")
            self.evaluation_strategy = "epoch"
        if self.evaluation_strategy != "no" and "do_eval" in self.passed and not self.do_eval:
            do = "Keep one of them."
            raise BadArgument(expected("no evaluation with do_eval=False", self.evaluation_strategy, do))
        if self.evaluation_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        if self.save_strategy == "steps" and self.save_steps is None:
            raise BadArgument("Expected save_steps with save_strategy='steps', received None. Use save_strategy='no'.")
        if self.metric_for_best_model is not None and self.evaluation_strategy == "no":
            do = "Pass evaluation_strategy='epoch'."
            raise BadArgument(expected("an evaluation_strategy with metric_for_best_model", "no", do))

    def _integer(self, name: str, least: int, *, or_none: bool = False, more: str = "") -> None:
        value = getattr(self, name)
        if value is None and or_none:
            return
        more += ", or None" if or_none else ""
        self._number(name, lambda v: isinstance(v, int) and v >= least, f"an integer of at least {least}{more}")

    def _positive(self, *names: str) -> None:
        for name in names:
            self._number(name, lambda v: v > 0, "a positive number")

    def _weight(self, *names: str) -> None:
        for name in names:
            self._number(name, lambda v: v >= 0, "a number of at least 0")

    def _number(self, name: str, fits: Callable[[Any], bool], words: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not fits(value):
            raise BadArgument(expected(f"{name} to be {words}", value))

    def __getattr__(self, name: str) -> Any:
        """Arguments under their other names; those without a counterpart here read as their defaults."""
        if name in ALIASES:
            return getattr(self, ALIASES[name])
        try:
            return default_of(name)
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    # -- used by a run --------------------------------------------------------------------------------

    def resolve(self, data_shards: int) -> BatchSizes:
        """Batch sizes on a mesh with `data_shards` = dp * fsdp * ep."""
        return resolve_batch_sizes(self, data_shards)

    def resolve_on(self, n_devices: int) -> BatchSizes:
        """Batch sizes on `n_devices` devices, arranged by `sharding_array`."""
        return self.resolve(math.prod(resolve_dims(self.sharding_array, n_devices)[: len(DATA_AXES)]))

    @property
    def timers(self) -> list[Any]:
        """Callbacks that act after some time: `training_time_limit`, and `save_interval_minutes` besides steps."""
        limit, minutes = parse_duration(self.training_time_limit), self.save_interval_minutes
        also_saves = minutes is not None and self.save_steps != f"{minutes}min"
        return [*([] if limit is None else [TimeLimit(limit)]), *([SaveInterval(60 * (minutes or 0))] * also_saves)]

    @property
    def evaluation_limit(self) -> int | None:
        """The largest number of batches of an evaluation; None: no limit."""
        limits = [n for n in (self.per_epoch_evaluation_steps, self.max_evaluation_steps) if n is not None]
        return min(limits, default=None)

    def planned_steps(self, steps_per_epoch: int | None) -> int | None:
        """Optimizer steps of the whole run; None if the length of an epoch is unknown."""
        if self.max_steps > 0:
            return self.max_steps
        return None if steps_per_epoch is None else math.ceil(self.num_train_epochs * steps_per_epoch)

    def get_optimizer_and_scheduler(self, steps: int | None) -> tuple[optax.GradientTransformation, Schedule]:
        """The optimizer and the learning-rate schedule for a run of `steps` steps."""
        schedule = self._schedule(steps)
        return self.get_optimizer(schedule), schedule

    def get_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        """The optimizer with a learning rate or a schedule."""
        return make_optimizer(self.optimizer, learning_rate, self.weight_decay, **self._optimizer_options())

    def _optimizer_options(self) -> dict[str, Any]:
        moment = {} if self.tx_mu_dtype is None else {"mu_dtype": resolve_dtype(self.tx_mu_dtype)}
        return {**moment, **self.optimizer_kwargs}

    def _schedule(self, steps: int | None) -> Schedule:
        return make_schedule(
            self.scheduler,
            self.learning_rate,
            steps,
            warmup_steps=self.warmup_steps,
            warmup_ratio=self.warmup_ratio,
            end=self.learning_rate_end,
            options=self.scheduler_kwargs,
        )

    def run_settings(self, sizes: BatchSizes, steps_per_epoch: int | None = None) -> dict[str, Any]:
        """The settings of a run under the names that all entry points share.

        A batch holds a whole optimizer step: the step function splits it, and the loop accumulates nothing.
        """
        by_steps = self.max_steps > 0 or self.num_train_epochs != int(self.num_train_epochs)
        if by_steps and self.planned_steps(steps_per_epoch) is None:
            what = "an integer num_train_epochs for data of unknown length"
            raise BadArgument(expected(what, self.num_train_epochs, "Pass max_steps."))
        metric = (self.metric_for_best_model or "loss").removeprefix("eval_").removeprefix("val/")
        is_loss = any(word in metric for word in ("loss", "perplexity", "error"))
        greater = not is_loss if self.greater_is_better is None else self.greater_is_better
        save_best = int(self.metric_for_best_model is not None) if self.save_best is None else self.save_best
        return {
            **{name: getattr(self, own) for name, own in SETTINGS.items()},
            "epochs": max(1, math.ceil(self.num_train_epochs)),
            "max_steps": self.planned_steps(steps_per_epoch) if by_steps else None,
            "batch_size": sizes.total,
            "micro_batches": sizes.accumulation,
            "eval_batch_size": sizes.evaluation,
            "gradient_clip": self.max_grad_norm or None,
            "drop_last": self.drop_last,
            "precision": "no" if self.dtype == "fp32" else self.dtype,
            "sharding_array": self.sharding_array,
            "num_workers": self.dataloader_num_workers,
            "project": self.project,
            "name": self.run_name or "-".join(filter(None, (self.trainer_prefix, self.model_name))) or None,
            "save_every": _cadence(self.save_strategy, self.save_steps),
            "save_best": save_best,
            "save_last": self.save_total_limit or _ALL,
            "save_async": self.save_async,
            "monitor_metric": f"val/{metric}",
            "monitor_mode": "max" if greater else "min",
            "eval_every": _cadence(self.evaluation_strategy, self.eval_steps),
        }


def _cadence(strategy: str, every: int | str | None) -> str | None:
    if strategy == "epoch":
        return "1epochs"
    return None if strategy == "no" else str(Cadence.parse(every, "steps"))


def _dtype_name(name: str, value: Any) -> str:
    short = {"float32": "fp32", "bfloat16": "bf16"}
    if isinstance(value, str) and value.lower() in ("auto", "fp8"):
        if name == "dtype":
            return value.lower()
        raise BadArgument(expected(f"{name} to be 'bf16' or 'fp32'", value))
    dtype = str(resolve_dtype(value, on="cpu"))
    if dtype not in short:
        do = "float16 needs loss scaling, bf16 does not." if dtype == "float16" else ""
        raise BadArgument(expected(f"{name} to be 'bf16' or 'fp32'", dtype, do))
    return short[dtype]
