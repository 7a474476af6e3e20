"""Trainers that say in their name how several processes train together. Everything else is `Trainer`'s.

Each runs alone, too. Start the processes with ``trainformer launch --nproc 4 script.py``, or with torchrun.
"""

from __future__ import annotations

from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.hf.trainer import Trainer


class DDPTrainer(Trainer):
    """Every process has the whole model, and computes a part of each batch. `Trainer` does that by itself, too."""

    strategy = "ddp"


class FSDPTrainer(Trainer):
    """The model, its gradients and the optimizer's state are divided over the processes (FSDP2)."""

    strategy = "fsdp"


class TPTrainer(Trainer):
    """The layers of the model are divided over the processes (tensor parallelism)."""

    strategy = "tp"


class PipelineTrainer(Trainer):
    """The processes have different layers, through which micro-batches pass one after another."""

    strategy = "pipeline"


class AccelTrainer(Trainer):
    """Trains with an `Accelerator` of accelerate: one that is passed, or one made of `strategy_options`."""

    strategy: Any = "accelerate"

    def __init__(self, *args: Any, accelerator: Any = None, **kwargs: Any) -> None:
        if accelerator is not None:
            if type(accelerator).__name__ != "Accelerator":
                raise BadArgument(
                    expected("accelerator to be an Accelerator of accelerate", type(accelerator).__name__)
                )
            self.strategy = accelerator
        super().__init__(*args, **kwargs)

    @property
    def accelerator(self) -> Any:
        """The `Accelerator`; None before the first run has made one."""
        if not isinstance(self.strategy, str):
            return self.strategy
        return None if self._run is None else getattr(self._run.backend.strategy, "accelerator", None)
