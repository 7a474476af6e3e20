"""Learning rate schedules: pure functions of the optimizer step. The formulas are in `backends.schedules`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from trainformer.backends.schedules import Factor, constant, cosine, linear, onecycle
from trainformer.core.errors import BadArgument, did_you_mean, expected

SCHEDULES: dict[str, Callable[[float, float], Factor]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "onecycle": onecycle,
}


class Schedule:
    """Sets the learning rate of an optimizer before each step.

    It keeps the initial learning rates of the groups; the learning rate of a step is that times the factor of the step,
    whatever was loaded or set in between. So it cannot drift, and resuming needs no replay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.configured = [float(group["lr"]) for group in optimizer.param_groups]
        self.base = list(self.configured)

    def apply(self, step: int) -> float:
        """Set the learning rates for the step after `step` steps; returns that of the first group."""
        factor = self.factor(step)
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * factor
        return self.base[0] * factor

    def advance(self) -> None:
        """Called after the step; nothing to do for a function of the step."""

    def observe(self, value: float | None) -> None:
        """Called after an evaluation with the monitored metric; nothing to do for a function of the step."""

    def rescale(self, lr: float) -> None:
        """Set the learning rate of the first group to `lr`, the others in proportion."""
        ratio = lr / self.base[0] if self.base[0] else 1.0
        self.base = [base * ratio for base in self.base]

    def get_last_lr(self) -> list[float]:
        """The current learning rates, as in torch's schedulers."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Learning rates that were found rather than configured (`LRFinder`) must survive a restart."""
        return {"configured": list(self.configured), "base": list(self.base)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the saved learning rates, unless the user has changed the configured ones since."""
        if list(state["configured"]) == self.configured:
            self.base = list(state["base"])


class TorchSchedule(Schedule):
    """A scheduler of torch or the user, stepped once per optimizer step."""

    def __init__(self, scheduler: LRScheduler) -> None:
        super().__init__(scheduler.optimizer, lambda step: 1.0)
        self.scheduler = scheduler

    def apply(self, step: int) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        self.scheduler.step()

    def rescale(self, lr: float) -> None:
        ratio = lr / self.scheduler.base_lrs[0] if self.scheduler.base_lrs[0] else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] *= ratio
        self.scheduler.base_lrs = [base * ratio for base in self.scheduler.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


class MetricSchedule(TorchSchedule):
    """A scheduler that is stepped with the monitored metric after each evaluation, such as `ReduceLROnPlateau`."""

    def advance(self) -> None:
        """Nothing to do: only evaluations change the learning rate."""

    def observe(self, value: float | None) -> None:
        """Step the scheduler, if the evaluation had the metric."""
        if value is not None:
            self.scheduler.step(value)  # type: ignore[arg-type]


class DecaySchedule:
    """Moves the weight decay of an optimizer along half a cosine to `end`, in the groups that have any.

    Create it before loading a state: it starts from the initial weight decay of the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, end: float) -> None:
        self.optimizer = optimizer
        self.end = end
        self.starts = [float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups]

    def apply(self, step: int, total: int) -> None:
        """Set the weight decay for the step after `step` of `total` steps."""
        share = 0.5 * (1.0 - math.cos(math.pi * min(step / max(total - 1, 1), 1.0)))
        for group, start in zip(self.optimizer.param_groups, self.starts, strict=True):
            if start:
                group["weight_decay"] = start + (self.end - start) * share


def make_schedule(
    spec: str | Callable[..., Any] | LRScheduler | None,
    optimizer: torch.optim.Optimizer,
    total: int | None,
    warmup_ratio: float,
) -> Schedule:
    """A schedule from a name, a factory or an instance.

    A factory gets the optimizer, and the number of steps if it takes two arguments; it returns a torch scheduler.
    """
    if spec is None:
        return Schedule(optimizer, lambda step: 1.0)
    if not isinstance(spec, (str, type)) and hasattr(spec, "step"):
        return _stepped(spec)
    if isinstance(spec, str):
        name = spec.lower().replace("_", "").replace("-", "")
        if name not in SCHEDULES:
            what = f"scheduler to be one of {', '.join(SCHEDULES)}"
            raise BadArgument(expected(what, spec, did_you_mean(name, SCHEDULES)))
        if total is None and (name != "constant" or warmup_ratio):
            raise BadArgument(
                f"The {spec!r} schedule needs the number of steps, but the dataset has no length. "
                "Pass max_steps=..., or scheduler='constant' with warmup_ratio=0."
            )
        total = total or 1
        # OneCycleLR takes a fraction of the total; the others count integer warm-up steps.
        warmup = warmup_ratio * total if name == "onecycle" else int(warmup_ratio * total)
        return Schedule(optimizer, SCHEDULES[name](total, warmup))
    if callable(spec):
        parameters = inspect.signature(spec).parameters.values()
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        takes_total = sum(p.kind in kinds and p.default is p.empty for p in parameters) >= 2
        made = spec(optimizer, total) if takes_total else spec(optimizer)
        if hasattr(made, "step"):
            return _stepped(made)
        raise BadArgument(expected("the scheduler factory to return a torch LRScheduler", made))
    raise BadArgument(expected("scheduler to be a name, a factory or an LRScheduler", spec))


def _stepped(scheduler: Any) -> TorchSchedule:
    """A scheduler of torch, or one with the same methods, that is stepped after each step or each evaluation."""
    return (
        MetricSchedule(scheduler)
        if "metrics" in inspect.signature(scheduler.step).parameters
        else TorchSchedule(scheduler)
    )
