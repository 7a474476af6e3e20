"""Learning rate schedules: ours, which are pure functions of the optimizer step, and torch's, which are stepped.

The formulas are in `backends.schedules`; `scheduler_declarations` reads what users write.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, OneCycleLR

from trainformer.backends.schedules import Factor
from trainformer.backends.torch.scheduler_declarations import SCHEDULES, SchedulerDeclaration, declared
from trainformer.core.errors import BadArgument, DataError, expected

_OTHER_SCHEDULE = (
    "The checkpoint has the state of another kind of scheduler. Nothing was loaded. Pass the same scheduler=, or leave "
    "out 'schedule' with load_components."
)
#: Schedulers of torch that compute the learning rate from its initial value, whatever it is now.
_ABSOLUTE = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)


class Schedule:
    """Sets the learning rate of an optimizer before each step.

    It keeps the initial learning rates of the groups; the learning rate of a step is that times the factor of the step,
    whatever was loaded or set in between. So it cannot drift, and resuming needs no replay.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Factor,
        fit_to: Callable[[int | None], Factor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self._fit_to = fit_to  # the factor for another number of steps
        self.configured = [float(group["lr"]) for group in optimizer.param_groups]
        self.base = list(self.configured)

    def apply(self, step: int) -> float:
        """Set the learning rates for the step after `step` steps; returns that of the first group."""
        factor = self.factor(step)
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * factor
        return self.base[0] * factor

    def resize(self, total: int | None) -> None:
        """Fit to another number of steps."""
        if self._fit_to is not None:
            self.factor = self._fit_to(total)

    def advance(self) -> None:
        """Called after the step; nothing to do for a function of the step."""

    def end_epoch(self, epochs: int) -> None:
        """Called after each epoch; `epochs` are done."""

    def observe(self, metrics: Mapping[str, float], monitor: str) -> None:
        """Called after an evaluation. `monitor` is the monitored metric of the run."""

    def monitors(self, monitor: str) -> list[tuple[str, Any]]:
        """Metrics that are needed, each with the scheduler that is stepped with it."""
        return []

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

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if the state is that of another kind of schedule."""
        if "configured" not in state:
            raise DataError(_OTHER_SCHEDULE)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the saved learning rates, unless the user has changed the configured ones since."""
        if list(state["configured"]) == self.configured:
            self.base = list(state["base"])


@dataclass
class _Stepped:
    """A scheduler with the time at which it is stepped, and what has been observed so far."""

    scheduler: Any
    interval: str  # step, epoch, eval
    frequency: int = 1
    monitor: str | None = None  # None: the monitored metric of the run
    takes_metric: bool = False
    evaluations: int = 0  # that had the metric
    latest: float | None = None  # value since the last step, for a scheduler that waits for the end of an epoch


class SteppedSchedule(Schedule):
    """Schedulers of torch or the user, each stepped at its own time: after steps, epochs or evaluations.

    `outer` is a schedule of ours that multiplies the learning rates they set. They never see it: before they are
    stepped, the groups get their own learning rates back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stepped: list[_Stepped], outer: Schedule | None) -> None:
        super().__init__(optimizer, lambda step: 1.0)
        self.stepped = stepped
        self.outer = outer
        if outer is None and len(stepped) == 1:
            self.scheduler = stepped[0].scheduler
        self._done = 0  # steps before the current one
        self._epochs = 0
        self._each_step = [one for one in stepped if one.interval == "step"]

    def apply(self, step: int) -> float:
        self._done = step
        if self.outer is not None:
            self.outer.base = list(self.base)
            return self.outer.apply(step)
        return float(self.optimizer.param_groups[0]["lr"])

    def resize(self, total: int | None) -> None:
        if self.outer is not None:
            self.outer.resize(total)

    def advance(self) -> None:
        self._step([(one, ()) for one in self._each_step if (self._done + 1) % one.frequency == 0])

    def end_epoch(self, epochs: int) -> None:
        """Step what counts epochs. Called again for the same epoch, it does nothing."""
        while self._epochs < epochs:
            self._epochs += 1
            due = [one for one in self.stepped if one.interval == "epoch" and self._epochs % one.frequency == 0]
            self._step([(one, ()) for one in due if not one.takes_metric])
            with_metric = [one for one in due if one.latest is not None]
            self._step([(one, (one.latest,)) for one in with_metric])
            for one in with_metric:
                one.latest = None

    def observe(self, metrics: Mapping[str, float], monitor: str) -> None:
        """Step what is stepped with a metric that this evaluation has."""
        due = []
        for one in self.stepped:
            value = metrics.get(one.monitor or monitor) if one.takes_metric else None
            if value is None:
                continue
            if one.interval == "epoch":
                one.latest = value
                continue
            one.evaluations += 1
            if one.evaluations % one.frequency == 0:
                due.append((one, (value,)))
        self._step(due)

    def monitors(self, monitor: str) -> list[tuple[str, Any]]:
        return [(one.monitor or monitor, one.scheduler) for one in self.stepped if one.takes_metric]

    def _step(self, due: list[tuple[_Stepped, tuple[Any, ...]]]) -> None:
        if not due:
            return
        groups = self.optimizer.param_groups
        if self.outer is not None:
            for group, own in zip(groups, self.base, strict=True):
                group["lr"] = own
        for one, arguments in due:
            one.scheduler.step(*arguments)
        if self.outer is not None:
            self.base = [float(group["lr"]) for group in groups]
            self.apply(self._done)

    def rescale(self, lr: float) -> None:
        first = self.optimizer.param_groups[0]
        initial = float(first.get("initial_lr", self.configured[0]))
        ratio = lr / initial if initial else 1.0
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group.update({key: group[key] * ratio for key in ("lr", "initial_lr", "max_lr", "min_lr") if key in group})
        self.base = [base * ratio for base in self.base]
        for one in self.stepped:
            for scheduler in with_parts(one.scheduler):
                for name in ("base_lrs", "max_lrs"):
                    if hasattr(scheduler, name):
                        setattr(scheduler, name, [base * ratio for base in getattr(scheduler, name)])

    @property
    def _is_plain(self) -> bool:
        """Whether the state of the scheduler is all there is: the file is then the one that transformers writes."""
        one = self.stepped[0]
        return hasattr(self, "scheduler") and one.interval != "epoch" and one.frequency == 1

    def state_dict(self) -> dict[str, Any]:
        if self._is_plain:
            state: dict[str, Any] = self.stepped[0].scheduler.state_dict()
            return state
        return {
            "epochs": self._epochs,
            "base": list(self.base),
            "schedulers": [
                {
                    "class": type(one.scheduler).__name__,
                    "state": one.scheduler.state_dict(),
                    "evaluations": one.evaluations,
                    "latest": one.latest,
                }
                for one in self.stepped
            ],
        }

    def check_state(self, state: dict[str, Any]) -> None:
        own = [type(one.scheduler).__name__ for one in self.stepped]
        saved = [one["class"] for one in state.get("schedulers", ())]
        if ("configured" in state) or (saved if self._is_plain else saved != own):
            received = f" It has the state of {', '.join(saved)}; here it is {', '.join(own)}." if saved else ""
            raise DataError(_OTHER_SCHEDULE + received)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._is_plain:
            self.stepped[0].scheduler.load_state_dict(state)
            return
        self._epochs, self.base = state["epochs"], list(state["base"])
        for one, kept in zip(self.stepped, state["schedulers"], strict=True):
            one.scheduler.load_state_dict(kept["state"])
            one.evaluations, one.latest = kept["evaluations"], kept["latest"]


def with_parts(scheduler: Any) -> list[Any]:
    """A scheduler, and those that it is made of."""
    return [scheduler, *(inner for part in getattr(scheduler, "_schedulers", ()) for inner in with_parts(part))]


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
    spec: Any, optimizer: torch.optim.Optimizer, total: int | None, warmup_ratio: float, mode: str = "min"
) -> Schedule:
    """The schedule of an optimizer from a declaration: a name, a torch scheduler, a factory, a mapping, or a list.

    A factory gets the optimizer, and the number of steps if it takes two arguments; it returns a torch scheduler. A
    mapping also says when its scheduler is stepped. `mode` is that of the run's monitored metric.
    """
    if spec is None:
        return Schedule(optimizer, lambda step: 1.0)
    declarations = declared(spec)
    ours = [one for one in declarations if one.schedule is not None]
    if len(ours) > 1:
        names = ", ".join(str(one.scheduler) for one in ours)
        raise BadArgument(expected(f"at most one of {', '.join(SCHEDULES)} per optimizer", names))
    # The schedule of ours last: it reads the learning rates that the others set, which set them when they are built.
    stepped = [_stepped(one, optimizer, total, mode) for one in declarations if one.schedule is None]
    _check_combination([one.scheduler for one in stepped])
    own = _own_schedule(ours[0], optimizer, total, warmup_ratio) if ours else None
    return SteppedSchedule(optimizer, stepped, own) if stepped else cast(Schedule, own)


def _own_schedule(
    declaration: SchedulerDeclaration, optimizer: torch.optim.Optimizer, total: int | None, warmup_ratio: float
) -> Schedule:
    """A schedule of ours, by name."""
    spec, name = declaration.scheduler, cast(str, declaration.schedule)
    extras = [*declaration.options, *(["monitor"] if declaration.monitor else [])]
    if extras or declaration.interval not in (None, "step") or declaration.frequency != 1:
        given = extras or f"interval={declaration.interval!r}, frequency={declaration.frequency}"
        do = "It is a function of the optimizer step. Use a class of torch.optim.lr_scheduler for other intervals."
        raise BadArgument(expected(f"no options for the schedule {spec!r}", given, do))

    def fit_to(total: int | None) -> Factor:
        if total is None and (name != "constant" or warmup_ratio):
            raise BadArgument(
                f"The {spec!r} schedule needs the number of steps, but the dataset has no length. "
                "Pass max_steps=..., or scheduler='constant' with warmup_ratio=0."
            )
        # OneCycleLR takes a fraction of the total; the others count integer warm-up steps.
        warmup = warmup_ratio * (total or 1)
        return SCHEDULES[name](total or 1, warmup if name == "onecycle" else int(warmup))

    return Schedule(optimizer, fit_to(total), fit_to)


def _stepped(
    declaration: SchedulerDeclaration, optimizer: torch.optim.Optimizer, total: int | None, mode: str
) -> _Stepped:
    """A scheduler of torch, or one with the same methods, with the time at which it is stepped."""
    scheduler = declaration.build(optimizer, total, mode)
    name = type(scheduler).__name__
    takes_metric = "metrics" in inspect.signature(scheduler.step).parameters
    interval = declaration.interval
    if takes_metric and interval == "step":
        do = "It is stepped with a metric. Use 'eval' (after each evaluation that has the metric) or 'epoch'."
        raise BadArgument(expected(f"another interval for {name}", interval, do))
    if not takes_metric and interval == "eval":
        raise BadArgument(expected(f"interval to be 'step' or 'epoch' for {name}, which takes no metric", interval))
    if not takes_metric and declaration.monitor is not None:
        raise BadArgument(expected(f"no monitor for {name}, which takes no metric", declaration.monitor))
    if declaration.is_mapping and not takes_metric and interval is None:
        do = "Add 'interval': 'step' to count optimizer steps, or 'interval': 'epoch' to count epochs."
        raise BadArgument(expected(f"an interval for {name}", "none", do))
    interval = interval or ("eval" if takes_metric else "step")
    return _Stepped(scheduler, interval, declaration.frequency, declaration.monitor, takes_metric)


def _check_combination(schedulers: list[Any]) -> None:
    """Some schedulers compute the learning rate from its initial value, and so undo what others have done."""
    if len({id(one) for one in schedulers}) < len(schedulers):
        raise BadArgument(
            "Expected different schedulers, received the same one twice: it would count everything twice."
        )
    if len(schedulers) < 2:
        return
    absolute = [part for one in schedulers for part in with_parts(one) if isinstance(part, _ABSOLUTE)]
    if absolute:
        name = type(absolute[0]).__name__
        raise BadArgument(
            f"Expected schedulers that can be combined, received {name} among several: it computes the learning rate "
            "from the initial one and would undo the others. Use LinearLR or MultiplicativeLR for a warm-up, or one of "
            f"{', '.join(SCHEDULES)}, which multiply what the others set."
        )
