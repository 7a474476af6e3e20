"""The settings of a run on JAX, by the names that all runs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainformer.run.settings import CommonSettings


@dataclass(kw_only=True)
class JaxSettings(CommonSettings):
    """What the arguments of a trainer come to. They were checked when they were made; here they are recorded.

    `batch_size` is that of a whole optimizer step on all devices, which `micro_batches` divide.
    """

    lr: float = 5e-5
    weight_decay: float = 0.01
    warmup_ratio: float = 0.0
    gradient_clip: float | None = 1.0
    optimizer: Any = "adamw"
    scheduler: Any = "linear"
    nonfinite: str = "raise"
    micro_batches: int = 1
    drop_last: bool = False
    precision: str = "auto"
    gradient_checkpointing: Any = None
    sharding_array: tuple[int, ...] = (1, -1, 1, 1)
    num_workers: int = 0
