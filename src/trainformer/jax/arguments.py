"""The arguments of a run on JAX, in the words of EasyDeL and HuggingFace. They are checked when they are made.

Their other names are in `aliases`, the arithmetic of batches is in `batch_sizes`, their JSON in `written`. What a run
makes of them is the trainer's business; `run_settings` says it in the names that all ways into the library share.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import optax

from trainformer.backends.jax.mesh import resolve_dims
from trainformer.backends.jax.optimizers import make_optimizer
from trainformer.backends.jax.precision import resolve_dtype
from trainformer.backends.jax.remat import resolve_remat
from trainformer.backends.jax.schedules import Schedule, make_schedule
from trainformer.core.errors import BadArgument, expected
from trainformer.engine.cadence import Cadence
from trainformer.jax.aliases import in_own_words
from trainformer.jax.batch_sizes import BatchSizes, solve_batch_sizes
from trainformer.jax.serialization import Written

_ALL = 10**9  # more checkpoints than anybody keeps
_OFF_WORDS = ("no", "steps", "epoch")


class _Arguments(type):
    """Looks at the keywords before the dataclass does: other names are translated, and what was passed is noted."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            do = "Write their names: TrainingArguments(output_dir=...)."
            raise BadArgument(expected(f"the arguments of {cls.__name__} by name", args[0], do))
        known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
        kwargs = in_own_words(kwargs, known, cls.__name__)
        made = super().__call__(**kwargs)
        made.passed = frozenset(kwargs)
        made.check()
        return made


@dataclass
class TrainingArguments(Written, metaclass=_Arguments):
    """Everything that is said about a run, apart from model and data.

    Cadences (`logging_steps`, `save_steps`, `eval_steps`) are steps, or strings such as ``"10min"`` and ``"2epochs"``.
    `passed` holds the names of what was said, rather than left to its default.
    """

    linked: ClassVar[tuple[str, ...]] = (
        *("evaluation_strategy", "eval_steps", "do_eval", "metric_for_best_model"),
        *("save_strategy", "save_steps", "logging_steps"),
    )

    _: KW_ONLY
    model_name: str = "trainformer"
    output_dir: str | None = None  # None: runs/<name>

    # How long, and with what
    num_train_epochs: float = 3
    max_steps: int = -1  # overrides num_train_epochs
    total_batch_size: int | None = None  # rows of one optimizer step on all devices
    per_device_train_batch_size: int = 8  # rows of a micro-batch on one data shard
    per_device_eval_batch_size: int = 8
    eval_batch_size: int | None = None  # of all devices
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    learning_rate_end: float | None = None  # where the schedule ends
    scheduler: Any = "linear"  # constant, linear, cosine, onecycle, inverse_sqrt, wsd, or a function of the step
    scheduler_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    optimizer: Any = "adamw"  # adamw, adam, adafactor, lion, muon, sgd, a factory or transformation of optax
    optimizer_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0  # None or 0: no clipping
    frozen_parameters: str | list[str] | None = None  # regexes of paths such as "layers/attention/q_proj/kernel"
    nonfinite: str = "raise"  # or skip: leave a step out whose gradients are not finite
    seed: int = 42

    # Where and how it is computed
    sharding_array: tuple[int, ...] = (1, -1, 1, 1)  # dp, fsdp, tp, sp; -1: what the others leave
    dtype: str = "auto"  # of computing: bf16, fp32; auto: bf16 where the device is fast in it
    param_dtype: str = "fp32"  # of the weights that are kept
    gradient_checkpointing: Any = None  # nothing_saveable, dots_saveable, everything_saveable ...; None: off
    use_fast_kernels: bool = True  # cuDNN's attention on GPUs
    unroll_layers: int | bool | None = None  # layers per round of the scan, True: all; None: what suits the device

    # Data
    max_sequence_length: int | None = None  # None: what the model can take
    packing: bool = False  # fill sequences with several documents, which do not see each other
    train_on_inputs: bool | None = None  # learn prompts as well; None: only where the data do not tell them apart
    shuffle: bool = True
    drop_last: bool = False  # leave out the last batch of an epoch if it is smaller
    dataloader_num_workers: int = 0

    # What is recorded
    log: Any = "console"  # console, wandb, tensorboard, mlflow, none, a logger, or several
    logging_steps: int | str = 10
    project: str = "trainformer"
    run_name: str | None = None  # None: model_name

    # Evaluation
    evaluation_strategy: str = "no"  # no, steps, epoch
    eval_steps: int | str | None = None  # None: as logging_steps
    do_eval: bool = False  # True: evaluation_strategy="epoch", unless one is given

    # What is kept
    save_strategy: str = "steps"  # no: the last one only; steps, epoch
    save_steps: int | str | None = 500
    save_total_limit: int | None = None  # None: all
    save_best: int | None = None  # so many of the best beyond that; None: one if metric_for_best_model is given
    save_async: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None  # None: told by the name
    resume: str | None = "auto"  # auto, a path, or None to begin anew

    passed: frozenset[str] = dataclasses.field(default=frozenset(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Bring values that may be written in several ways into one form. `check` comes when all are known."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, os.PathLike):
                setattr(self, field.name, os.fspath(value))
            elif isinstance(value, str) and hasattr(value, "value"):
                setattr(self, field.name, str(value.value))  # a member of an enum
        self.scheduler_kwargs = dict(self.scheduler_kwargs or {})
        self.optimizer_kwargs = dict(self.optimizer_kwargs or {})
        self.sharding_array = _four_axes(self.sharding_array)
        self.dtype, self.param_dtype = _format("dtype", self.dtype), _format("param_dtype", self.param_dtype)
        self.max_steps = -1 if self.max_steps is None else self.max_steps
        self.resume = None if self.resume is False else self.resume  # type: ignore[comparison-overlap]
        self.log = list(self.log) if isinstance(self.log, tuple) else self.log
        if isinstance(self.frozen_parameters, tuple):
            self.frozen_parameters = list(self.frozen_parameters)

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what cannot work. A class with more fields extends it."""
        self._check_numbers()
        self._settle_strategies()
        self._check_choices()
        _check_axes(self.sharding_array)
        resolve_remat(self.gradient_checkpointing)
        frozen = self.frozen_parameters
        for pattern in frozen if isinstance(frozen, list) else [frozen] if frozen is not None else []:
            _check_regex(pattern)
        schedule = self._schedule(1000)  # of any length: this only asks whether it can be made
        if isinstance(self.optimizer, optax.GradientTransformation):
            if "weight_decay" in self.passed and self.weight_decay:
                do = "Say it to the optimizer, or pass that by name or as a factory (optimizer=optax.adamw)."
                raise BadArgument(expected("no weight_decay with an optimizer that is made", self.weight_decay, do))
            make_optimizer(self.optimizer, schedule, **self.optimizer_kwargs)
        elif not callable(self.optimizer):  # a factory may have effects, so it waits for the run
            make_optimizer(self.optimizer, schedule, self.weight_decay, **self.optimizer_kwargs)

    def _check_numbers(self) -> None:
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            self._whole(name, 1)
        for name in ("warmup_steps", "seed", "dataloader_num_workers"):
            self._whole(name, 0)
        for name in ("total_batch_size", "eval_batch_size", "max_sequence_length", "save_total_limit"):
            self._whole(name, 1, or_none=True)
        self._whole("save_best", 0, or_none=True)
        if self.max_steps != -1:
            self._whole("max_steps", 1, more=", or -1 for whole epochs")
        for name in ("learning_rate", "num_train_epochs"):
            _number(name, getattr(self, name), lambda v: v > 0, "a positive number")
        _number("weight_decay", self.weight_decay, lambda v: v >= 0, "a number of at least 0")
        _number("warmup_ratio", self.warmup_ratio, lambda v: 0 <= v <= 1, "a number from 0 to 1")
        for name in ("max_grad_norm", "learning_rate_end"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), lambda v: v >= 0, "a number of at least 0, or None")
        if self.unroll_layers is not None and not isinstance(self.unroll_layers, bool):
            self._whole("unroll_layers", 1, more=", True or None")

    def _check_choices(self) -> None:
        for name in ("use_fast_kernels", "packing", "shuffle", "drop_last", "do_eval", "save_async"):
            if not isinstance(getattr(self, name), bool):
                raise BadArgument(expected(f"{name} to be True or False", getattr(self, name)))
        for name in ("train_on_inputs", "greater_is_better"):
            if getattr(self, name) not in (None, True, False):
                raise BadArgument(expected(f"{name} to be True, False or None", getattr(self, name)))
        if self.nonfinite not in ("raise", "skip"):
            raise BadArgument(expected("nonfinite to be 'raise' or 'skip'", self.nonfinite))
        for name in ("output_dir", "resume", "run_name", "metric_for_best_model"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                do = "Pass 'auto', a path, or None to begin anew." if name == "resume" else ""
                raise BadArgument(expected(f"{name} to be a string or None", getattr(self, name), do))
        for name in ("logging_steps", "save_steps", "eval_steps"):
            Cadence.parse(getattr(self, name), "steps", name)

    def _settle_strategies(self) -> None:
        """A number of steps that was passed asks for its strategy, too."""
        for strategy, steps in (("evaluation_strategy", "eval_steps"), ("save_strategy", "save_steps")):
            value = getattr(self, strategy)
            value = "no" if value is None or value is False else value
            if value not in _OFF_WORDS:
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
            do = "Without evaluations nothing is best. Pass evaluation_strategy='epoch'."
            raise BadArgument(expected("an evaluation_strategy with metric_for_best_model", "no", do))

    def _whole(self, name: str, least: int, *, or_none: bool = False, more: str = "") -> None:
        value = getattr(self, name)
        if value is None and or_none:
            return
        more += ", or None" if or_none else ""
        _number(name, value, lambda v: isinstance(v, int) and v >= least, f"a whole number of at least {least}{more}")

    # -- what a run makes of them --------------------------------------------------------------------------------

    def resolve(self, data_shards: int) -> BatchSizes:
        """The sizes of batches on a mesh whose axes dp and fsdp have `data_shards` places together."""
        return solve_batch_sizes(vars(self), self.passed, data_shards)

    def resolve_on(self, n_devices: int) -> BatchSizes:
        """The same on so many devices, which `sharding_array` divides."""
        dp, fsdp, _, _ = resolve_dims(self.sharding_array, n_devices)
        return self.resolve(dp * fsdp)

    def planned_steps(self, steps_per_epoch: int | None) -> int | None:
        """Optimizer steps of the whole run, None where nobody knows how long an epoch is."""
        if self.max_steps > 0:
            return self.max_steps
        return None if steps_per_epoch is None else math.ceil(self.num_train_epochs * steps_per_epoch)

    def get_optimizer_and_scheduler(self, steps: int | None) -> tuple[optax.GradientTransformation, Schedule]:
        """The optimizer of a run of so many steps, and its learning rate as a function of the step."""
        schedule = self._schedule(steps)
        return make_optimizer(self.optimizer, schedule, self.weight_decay, **self.optimizer_kwargs), schedule

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
        """The settings of a run by the names that all ways into the library share.

        A batch is that of a whole optimizer step: the step itself divides it, so the loop accumulates nothing.
        """
        by_steps = self.max_steps > 0 or self.num_train_epochs != int(self.num_train_epochs)
        if by_steps and self.planned_steps(steps_per_epoch) is None:
            do = "Pass max_steps."
            raise BadArgument(
                expected("whole num_train_epochs where the data have no length", self.num_train_epochs, do)
            )
        metric = (self.metric_for_best_model or "loss").removeprefix("eval_").removeprefix("val/")
        kept_best = int(self.metric_for_best_model is not None) if self.save_best is None else self.save_best
        return {
            "epochs": max(1, math.ceil(self.num_train_epochs)),
            "max_steps": self.planned_steps(steps_per_epoch) if by_steps else None,
            "batch_size": sizes.total,
            "micro_batches": sizes.accumulation,
            "eval_batch_size": sizes.evaluation,
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            "warmup_ratio": self.warmup_ratio,
            "gradient_clip": self.max_grad_norm or None,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "nonfinite": self.nonfinite,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "precision": "no" if self.dtype == "fp32" else self.dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
            "sharding_array": self.sharding_array,
            "num_workers": self.dataloader_num_workers,
            "log": self.log,
            "log_every": self.logging_steps,
            "project": self.project,
            "name": self.run_name or self.model_name,
            "run_dir": self.output_dir,
            "save_every": _cadence(self.save_strategy, self.save_steps),
            "save_best": kept_best,
            "save_last": self.save_total_limit or _ALL,
            "save_async": self.save_async,
            "monitor_metric": f"val/{metric}",
            "monitor_mode": "max" if self._more_is_better(metric) else "min",
            "resume": self.resume,
            "eval_every": _cadence(self.evaluation_strategy, self.eval_steps),
        }

    def _more_is_better(self, metric: str) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not any(word in metric for word in ("loss", "perplexity", "error"))


def _number(name: str, value: Any, fits: Callable[[Any], bool], words: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not fits(value):
        raise BadArgument(expected(f"{name} to be {words}", value))


def _cadence(strategy: str, every: int | str | None) -> str | None:
    if strategy == "epoch":
        return "1epochs"
    return None if strategy == "no" else str(Cadence.parse(every, "steps"))


def _four_axes(given: Any) -> Any:
    """EasyDeL's newer arrays have a fifth axis for experts, in the middle; where it asks for nothing it goes."""
    if not isinstance(given, (tuple, list)):
        return given
    return (*given[:2], *given[3:]) if len(given) == 5 and given[2] == 1 else tuple(given)


def _check_axes(given: Any) -> None:
    """Ask whether there is a number of devices that they would fit."""
    sizes = given if isinstance(given, tuple) else ()
    resolve_dims(given, math.prod(size for size in sizes if isinstance(size, int) and size > 0))


def _format(name: str, value: Any) -> str:
    short = {"float32": "fp32", "bfloat16": "bf16"}
    if isinstance(value, str) and value.lower() == "auto":
        if name == "dtype":
            return "auto"
        raise BadArgument(expected(f"{name} to be 'bf16' or 'fp32'", value))
    dtype = str(resolve_dtype(value, on="cpu"))
    if dtype not in short:
        do = "float16 needs scaled losses, bf16 does not." if dtype == "float16" else ""
        raise BadArgument(expected(f"{name} to be 'bf16' or 'fp32'", dtype, do))
    return short[dtype]


def _check_regex(pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise BadArgument(expected("frozen_parameters to be regular expressions", pattern))
    try:
        re.compile(pattern)
    except re.error as error:
        raise BadArgument(expected("frozen_parameters to be regular expressions", pattern, f"{error}.")) from error
