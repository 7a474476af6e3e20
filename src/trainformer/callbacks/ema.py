"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.utils.distributed import local_tensors


@dataclass
class EMA:
    """Keep an exponential moving average of the weights, and evaluate, predict and export with it.

    The average is a separate fp32 model. Weights are never swapped, so no crash and no checkpoint can catch the wrong
    ones. It is updated every `update_every` optimizer steps. With `warmup` the decay grows as (1 + n) / (10 + n) up to
    `decay`, so that the initial weights are forgotten quickly. Floating-point buffers (running statistics) are averaged
    as well, other buffers are copied. With ``evaluate=False`` the average is only kept (`ema.model`). With
    ``compare=True`` each evaluation also runs with the trained weights, as ``val/without_ema/...``. `modules` names the
    parts of the model to average, such as ``["generator"]``; the other weights are copied.
    """

    needs_torch = True
    metric_names = ()  # besides val/without_ema/...
    sets_control = False  # never requests a stop, save or evaluation, so ranks need not sync requests

    decay: float = 0.9999
    update_every: int = 1
    start_step: int = 0
    warmup: bool = True
    evaluate: bool = True
    compare: bool = False
    modules: Sequence[str] | None = None

    model: nn.Module | None = field(init=False, default=None, repr=False)
    updates: int = field(init=False, default=0, repr=False)
    _averaged: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list, repr=False)
    _copied: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list, repr=False)

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
        """Copy the model."""
        source = trainer.task.model
        self.model = average = trainer.copy_model().requires_grad_(False).eval()
        for name in self.modules or ():
            if not any(found == name for found, _ in source.named_modules()):
                names = [found for found, _ in source.named_children()]
                what = f"EMA's modules to be parts of {type(source).__name__}"
                raise BadArgument(expected(what, name, did_you_mean(name, names) or f"It has {', '.join(names)}."))
        names = [name for name, _ in (*source.named_parameters(), *source.named_buffers())]
        pairs = zip([*average.parameters(), *average.buffers()], [*source.parameters(), *source.buffers()], strict=True)
        self._averaged, self._copied = [], []
        for name, (tensor, trained) in zip(names, pairs, strict=True):
            chosen = self.modules is None or any(name.startswith(f"{part}.") for part in self.modules)
            (self._averaged if chosen and tensor.is_floating_point() else self._copied).append((tensor, trained))

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        if step <= self.start_step or step % self.update_every:
            if step <= self.start_step:
                self._update(1.0)
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self._update(1 - decay)
        self.updates += 1

    @torch.no_grad()
    def _update(self, weight: float) -> None:
        moving = [(average, trained.detach().to(average.dtype)) for average, trained in self._averaged]
        torch._foreach_lerp_(local_tensors([a for a, _ in moving]), local_tensors([w for _, w in moving]), weight)
        for average, trained in self._copied:
            average.copy_(trained)

    def inference_model(self) -> nn.Module | None:
        """The model to use for evaluation, prediction and export, or None for the trained one."""
        return self.model if self.evaluate else None

    def compute_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        if not self.compare:
            return {}
        trained = trainer.evaluate_without_ema(trainer.evaluated_sets)
        return {f"val/without_ema/{name.removeprefix('val/')}": value for name, value in trained.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "model": {} if self.model is None else self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        if self.model is not None:
            self.model.load_state_dict(state["model"])
