"""Every setting of a run, with its default, and what makes a setting wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainformer.backends.torch.distribution import check_strategy
from trainformer.backends.torch.memory import SdpaChoice, sdpa_backends
from trainformer.backends.torch.nonfinite import parse_policy
from trainformer.backends.torch.quantize import check_recipes
from trainformer.core.errors import BadArgument, expected
from trainformer.engine.cadence import Cadence, Unit


@dataclass(kw_only=True)
class RunSettings:
    """Settings of a run. Every way into the library fills in one of these.

    Cadences are integers in their usual unit, or strings that name it: ``"500steps"``, ``"2epochs"``, ``"10min"``.
    """

    # How long, and with what
    epochs: int = 100
    max_steps: int | None = None  # overrides epochs
    batch_size: int = 32  # of all processes together
    eval_batch_size: int | None = None  # None: as batch_size
    lr: float = 1e-4
    weight_decay: float = 0.01
    weight_decay_end: float | None = None  # where a cosine leads it over the run; None: constant
    layer_decay: float | None = None  # each layer below the head gets the rate of the one above times this
    warmup_ratio: float = 0.1
    gradient_clip: float | None = 1.0
    accumulation_steps: int = 1
    optimizer: Any = "adamw"  # name, {"name": ..., options}, class, factory or instance
    scheduler: Any = "onecycle"  # name, factory or instance; None: constant
    ema: float | None = None  # decay of an average of the weights to evaluate and export with (the callback EMA)
    nonfinite: str = "raise"  # raise, skip, retry, retry:N
    oom: str = "split"  # out of memory: split the micro-batch and repeat the step, or raise
    bad_samples: str = "raise"  # a sample that cannot be read: raise, or skip, count and name it
    seed: int = 42
    sampler: Any = None  # balanced, pk, repeated, a sampler, or a function of the data set; None: every sample once
    drop_last: bool = False  # leave out the last batch of an epoch if it is smaller

    # Where and how it is computed
    device: Any = None  # None: the best there is
    precision: str = "auto"  # auto, no, bf16, fp16, fp8
    fp8_recipe: str | None = None  # tensorwise, rowwise, rowwise_with_gw_hp; precision="fp8" alone means tensorwise
    fp8_dim_alignment: int = 16  # layers with a size that is no multiple of this stay out of fp8
    qat_recipe: str | None = None  # round weights while training as this recipe will in deployment
    compile: bool | str | Mapping[str, Any] = False  # or a mode of torch.compile, or its arguments by name
    channels_last: bool = False
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    sdpa_backend: SdpaChoice = None  # math, flash, efficient, cudnn, or several
    matmul_precision: str | None = None  # highest, high, medium
    num_workers: int | None = None  # None: what suits the data
    prefetch_factor: int | None = None  # batches that each worker reads ahead; None: as torch does
    pin_memory: bool | None = None  # None: on CUDA
    strategy: Any = "auto"  # single, ddp, fsdp, tp, pipeline, accelerate, {"name": ..., options}, or an Accelerator
    dispatch_batches: bool = False  # rank 0 reads the data and hands each rank its part
    rank_timeout: float = 1800.0  # seconds that ranks wait for each other

    # What is recorded
    log: Any = "console"  # console, wandb, tensorboard, mlflow, none, a logger, or several
    log_every: int | str | None = 100
    project: str = "trainformer"
    name: str | None = None
    run_dir: str | Path | None = None  # None: runs/<name>

    # What is kept
    save_dir: str = "checkpoints"  # inside the run folder, unless absolute
    save_every: int | str | None = "10min"  # None: only the best and the last
    save_strategy: Unit = "steps"  # the unit of a bare number in save_every: steps, epochs or seconds
    save_best: int = 3
    save_last: int = 1
    keep_every: int | None = None  # keep one checkpoint per so many steps for good
    save_async: bool = False  # copy the state, write it in the background
    eval_on_save: bool = False
    monitor_metric: str = "val/loss"
    monitor_mode: str = "min"
    resume: str | Path | None = "auto"  # auto, a path, or None to begin anew
    load_components: Sequence[str] | None = None  # resume these only, e.g. ["model"]; None: everything
    exit_on_signal: bool = True  # after SIGTERM or SIGINT: save, then leave with 128 + signal; False: return from fit

    # Evaluation
    eval_every: int | str | None = 1

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is built."""
        for name in ("epochs", "batch_size", "accumulation_steps", "fp8_dim_alignment"):
            self._whole(name, least=1)
        for name in ("max_steps", "eval_batch_size", "keep_every", "prefetch_factor"):
            if getattr(self, name) is not None:
                self._whole(name, least=1)
        for name in ("save_best", "save_last", "seed"):
            self._whole(name, least=0)
        if self.num_workers is not None:
            self._whole("num_workers", least=0)
        self._number("lr", lambda v: v > 0, "a positive number")
        self._number("weight_decay", lambda v: v >= 0, "a number of at least 0")
        if self.weight_decay_end is not None:
            self._number("weight_decay_end", lambda v: v >= 0, "a number of at least 0, or None")
        if self.layer_decay is not None:
            self._number("layer_decay", lambda v: 0 < v <= 1, "a number above 0 and up to 1, or None")
        if self.ema is not None:
            self._number("ema", lambda v: 0 <= v < 1, "a number from 0 and below 1, or None")
        self._number("warmup_ratio", lambda v: 0 <= v <= 1, "a number from 0 to 1")
        if self.gradient_clip is not None:
            self._number("gradient_clip", lambda v: v >= 0, "a number of at least 0, or None")
        if self.monitor_mode not in ("min", "max"):
            raise BadArgument(expected("monitor_mode to be 'min' or 'max'", self.monitor_mode))
        check_strategy(self.strategy)
        self._number("rank_timeout", lambda v: v > 0, "a positive number of seconds")
        if self.save_strategy not in ("steps", "epochs", "seconds"):
            raise BadArgument(expected("save_strategy to be 'steps', 'epochs' or 'seconds'", self.save_strategy))
        for name, choices in (("oom", ("split", "raise")), ("bad_samples", ("raise", "skip"))):
            if getattr(self, name) not in choices:
                raise BadArgument(expected(f"{name} to be {' or '.join(map(repr, choices))}", getattr(self, name)))
        for name, unit in (("log_every", "steps"), ("save_every", self.save_strategy), ("eval_every", "epochs")):
            Cadence.parse(getattr(self, name), unit, name)  # type: ignore[arg-type]
        if self.matmul_precision not in (None, "highest", "high", "medium"):
            words = "matmul_precision to be 'highest', 'high', 'medium' or None"
            raise BadArgument(expected(words, self.matmul_precision))
        parse_policy(self.nonfinite)
        sdpa_backends(self.sdpa_backend)
        check_recipes(self.precision, self.fp8_recipe, self.qat_recipe)

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadArgument(expected(f"{name} to be a whole number of at least {least}", value))

    def _number(self, name: str, fits: Any, words: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not fits(value):
            raise BadArgument(expected(f"{name} to be {words}", value))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of every setting."""
        return {f.name: f.default for f in fields(RunSettings)}

    def values(self) -> dict[str, Any]:
        """Every setting as it is now."""
        return {f.name: getattr(self, f.name) for f in fields(RunSettings)}
