"""The settings of a torch run: every field once, with its default and validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainformer.backends.torch.memory import SdpaChoice, sdpa_backends
from trainformer.backends.torch.nonfinite import parse_policy
from trainformer.backends.torch.quantize import check_recipes
from trainformer.distributed import check_strategy
from trainformer.run.settings import CommonSettings


@dataclass(kw_only=True)
class RunSettings(CommonSettings):
    """Settings of a torch run. Every entry point on torch fills in one of these.

    Cadences are integers in their usual unit, or strings that name it: ``"500steps"``, ``"2epochs"``, ``"10min"``.
    """

    # Optimization
    lr: float = 1e-4
    weight_decay: float = 0.01
    weight_decay_end: float | None = None  # final value of a cosine schedule over the run; None: constant
    layer_decay: float | None = None  # each layer gets the learning rate of the layer above times this
    warmup_ratio: float = 0.1
    gradient_clip: float | None = 1.0
    optimizer: Any = "adamw"  # name, {"name": ..., options}, class, factory or instance
    scheduler: Any = "onecycle"  # name, factory, instance, {"name": ..., "interval": ...}, or several; None: constant
    ema: float | None = None  # decay of an EMA of the weights, used for evaluation and export (the callback EMA)
    nonfinite: str = "raise"  # raise, skip, retry, retry:N
    oom: str = "split"  # out of memory: split the micro-batch and repeat the step, or raise
    bad_samples: str = "raise"  # a sample that cannot be read: raise, or skip (counted and logged)
    sampler: Any = None  # balanced, pk, repeated, a sampler, or a function of the dataset; None: every sample once
    drop_last: bool = False  # drop the last batch of an epoch if it is smaller

    # Device and performance
    device: Any = None  # None: the best available
    precision: str = "auto"  # auto, no, bf16, fp16, fp8
    fp8_recipe: str | None = None  # tensorwise, rowwise, rowwise_with_gw_hp; precision="fp8" alone means tensorwise
    fp8_dim_alignment: int = 16  # layers whose sizes are not multiples of this stay in bf16
    qat_recipe: str | None = None  # quantization-aware training with this recipe
    compile: bool | str | Mapping[str, Any] = False  # or a torch.compile mode, or its arguments by name
    channels_last: bool = False
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    sdpa_backend: SdpaChoice = None  # math, flash, efficient, cudnn, or several
    matmul_precision: str | None = None  # highest, high, medium
    num_workers: int | None = None  # None: chosen for the data
    prefetch_factor: int | None = None  # batches that each worker prefetches; None: torch's default
    worker_context: str | None = None  # how workers are started: fork, spawn, forkserver; None: torch's default
    pin_memory: bool | None = None  # None: on CUDA
    strategy: Any = "auto"  # single, ddp, fsdp, tp, pipeline, accelerate, {"name": ..., options}, or an Accelerator
    dispatch_batches: bool = False  # rank 0 reads the data and scatters it

    def validate(self) -> None:
        """Reject settings that cannot work, before anything is built."""
        super().validate()
        self._whole("fp8_dim_alignment", least=1)
        self._whole("prefetch_factor", least=1, optional=True)
        self._whole("num_workers", least=0, optional=True)
        self._choice("worker_context", ("fork", "spawn", "forkserver", None))
        for name in ("drop_last", "channels_last", "gradient_checkpointing", "activation_offload", "dispatch_batches"):
            self._flag(name)
        self._flag("pin_memory", optional=True)
        self._number("lr", lambda v: 0 <= v < math.inf, "a number of at least 0")
        self._number("weight_decay", lambda v: 0 <= v < math.inf, "a number of at least 0")
        self._number("weight_decay_end", lambda v: 0 <= v < math.inf, "a number of at least 0, or None")
        self._number("layer_decay", lambda v: 0 < v <= 1, "a number above 0 and up to 1, or None")
        self._number("ema", lambda v: 0 <= v < 1, "a number from 0 and below 1, or None")
        self._number("warmup_ratio", lambda v: 0 <= v <= 1, "a number from 0 to 1")
        self._number("gradient_clip", lambda v: v >= 0, "a number of at least 0, or None")
        check_strategy(self.strategy)
        self._choice("oom", ("split", "raise"))
        self._choice("bad_samples", ("raise", "skip"))
        self._choice("matmul_precision", ("highest", "high", "medium", None))
        parse_policy(self.nonfinite)
        sdpa_backends(self.sdpa_backend)
        check_recipes(self.precision, self.fp8_recipe, self.qat_recipe)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of every setting, without fields that a subclass adds."""
        return {f.name: f.default for f in fields(RunSettings)}
