"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainformer.callbacks.base import TrainerLike, WeightAverage
from trainformer.core.errors import BadArgument, expected


@dataclass
class EMA:
    """Keep an exponential moving average of the weights, and evaluate, predict and export with it.

    The average is a separate fp32 model. Weights are never swapped, so no crash and no checkpoint can catch the wrong
    ones. It is updated every `update_every` optimizer steps. With `warmup` the decay grows as (1 + n) / (10 + n) up to
    `decay`, so that the initial weights are forgotten quickly. Floating-point buffers (running statistics) are averaged
    as well, other buffers are copied. With ``evaluate=False`` the average is only kept (`ema.model`). With
    ``compare=True`` each evaluation also runs with the trained weights, as ``val/without_ema/...``. `modules` names the
    parts of the model to average, such as ``["generator"]``; the other weights are those of the trained model.
    """

    metric_names = ()  # besides val/without_ema/...
    sets_control = False  # never requests a stop, save or evaluation, so ranks need not sync requests

    decay: float = 0.9999
    update_every: int = 1
    start_step: int = 0
    warmup: bool = True
    evaluate: bool = True
    compare: bool = False
    modules: Sequence[str] | None = None

    average: WeightAverage | None = field(init=False, default=None, repr=False)
    updates: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.decay, (int, float)) or not 0 <= self.decay < 1:
            raise BadArgument(expected("EMA's decay to be at least 0 and below 1", self.decay))
        if self.update_every < 1:
            raise BadArgument(expected("EMA's update_every to be at least 1", self.update_every))
        if isinstance(self.modules, str) or (self.modules is not None and not self.modules):
            raise BadArgument(expected("EMA's modules to be a list of names, or None for all", self.modules))
        if self.compare and not self.evaluate:
            do = "There is nothing to compare with."
            raise BadArgument(expected("EMA's compare with evaluate=True", self.evaluate, do))

    def attach(self, trainer: TrainerLike) -> None:
        """Copy the weights."""
        self.average = trainer.average_weights(self.modules)

    @property
    def model(self) -> Any:
        """The model with the averaged weights: a torch module, or on JAX a flax module. None before there is a run."""
        return None if self.average is None else self.average.model

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        assert self.average is not None
        if step <= self.start_step:
            self.average.update(1.0)
        elif step % self.update_every == 0:
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
            self.average.update(1 - decay)
            self.updates += 1

    def inference_model(self) -> Any:
        """What evaluation, prediction and export use, or None for the trained weights."""
        return self.average.inference_model if self.evaluate and self.average is not None else None

    def compute_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        if not self.compare:
            return {}
        trained = trainer.evaluate_without_ema(trainer.evaluated_sets)
        return {f"val/without_ema/{name.removeprefix('val/')}": value for name, value in trained.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, **({"model": {}} if self.average is None else self.average.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        if self.average is not None:
            self.average.load_state_dict(state)
