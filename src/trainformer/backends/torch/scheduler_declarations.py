"""What users write as `scheduler=`: names, torch schedulers, functions that make them, and when each is stepped.

A declaration belongs to one optimizer. `declared` reads it without building anything; `SchedulerDeclaration.build`
makes the scheduler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import lr_scheduler

from trainformer.backends.schedules import Factor, constant, cosine, linear, onecycle, wsd
from trainformer.core.errors import BadArgument, did_you_mean, expected

SCHEDULES: dict[str, Callable[[float, float], Factor]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "onecycle": onecycle,
    "wsd": wsd,
}
INTERVALS = ("step", "epoch", "eval")
_KEYS = ("scheduler", "interval", "frequency", "monitor")
_MADE_OF_OTHERS = ("SequentialLR", "ChainedScheduler")
#: Classes of torch by name, except for those that are made of other schedulers.
TORCH_SCHEDULERS: dict[str, type] = {
    name: kind
    for name in lr_scheduler.__all__
    if name not in ("LRScheduler", *_MADE_OF_OTHERS) and isinstance(kind := getattr(lr_scheduler, name), type)
}
#: Parameters that mean the number of steps of the run.
_TOTALS = ("T_max", "total_steps", "total_iters", "num_training_steps")
_WHAT = "scheduler to be a name, a factory (a function of the optimizer), a torch LRScheduler, a mapping, or a list"


@dataclass(frozen=True)
class SchedulerDeclaration:
    """One scheduler, and when it is stepped; `interval` None is up to its kind."""

    scheduler: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    interval: str | None = None
    frequency: int = 1
    monitor: str | None = None
    is_mapping: bool = False

    @property
    def schedule(self) -> str | None:
        """The name of one of our own schedules, if it is one."""
        name = _normalised(self.scheduler) if isinstance(self.scheduler, str) else None
        return name if name in SCHEDULES else None

    def build(self, optimizer: torch.optim.Optimizer, total: int | None, mode: str = "min") -> Any:
        """The scheduler. `mode` is that of the run's monitored metric."""
        spec = self.scheduler
        if isinstance(spec, str):
            return self._build_named(spec, optimizer, total, mode)
        made = spec
        if isinstance(spec, type) or not hasattr(spec, "step"):
            made = _call(spec, optimizer, total)
            if not hasattr(made, "step") or isinstance(made, type):
                raise BadArgument(expected("the scheduler factory to return a torch LRScheduler", made))
        _check_optimizer(made, optimizer)
        return made

    def _build_named(self, name: str, optimizer: torch.optim.Optimizer, total: int | None, mode: str) -> Any:
        kind = next(kind for known, kind in TORCH_SCHEDULERS.items() if _normalised(known) == _normalised(name))
        options, parameters = dict(self.options), inspect.signature(kind).parameters
        counts_steps = self.interval in (None, "step")
        for key in _TOTALS:
            is_required = key in parameters and parameters[key].default is inspect.Parameter.empty
            if is_required and key not in options and total is not None and counts_steps:
                options[key] = total
        if kind is lr_scheduler.ReduceLROnPlateau and self.monitor is None:
            options.setdefault("mode", mode)
        listed = ", ".join(key for key in parameters if key not in ("optimizer", "last_epoch", "verbose"))
        try:
            inspect.signature(kind).bind(optimizer, **options)
            return kind(optimizer, **options)
        except (TypeError, ValueError, AttributeError) as error:
            do = f"{error}. Write {{'name': {kind.__name__!r}, 'interval': 'step' or 'epoch', option: value, ...}}."
            what = f"options that {kind.__name__} can be made with ({listed})"
            raise BadArgument(expected(what, dict(self.options) or "none", do)) from error


def declared(spec: Any) -> list[SchedulerDeclaration]:
    """The schedulers that a declaration names, with their options checked.

    >>> [one.schedule or one.options for one in declared(["cosine", {"name": "StepLR", "step_size": 3}])]
    ['cosine', {'step_size': 3}]
    """
    if not isinstance(spec, list | tuple):
        return [_declaration(spec)]
    if not spec:
        raise BadArgument(expected("a list of schedulers to have at least one", spec, "Use None for a constant rate."))
    return [_declaration(part) for part in spec]


def _declaration(spec: Any) -> SchedulerDeclaration:
    if not isinstance(spec, Mapping):
        return SchedulerDeclaration(_checked(spec))
    given = dict(spec)
    timing = {key: given.pop(key) for key in ("interval", "frequency", "monitor") if key in given}
    key = "scheduler" if "scheduler" in given else "name"
    if isinstance(given.get(key), str):
        scheduler, options = given.pop(key), given
    elif "scheduler" in given:
        scheduler, options = given.pop("scheduler"), {}
        for key in given:
            hint = did_you_mean(str(key), _KEYS) or f"There is {', '.join(_KEYS)}."
            raise BadArgument(expected("keys of a scheduler that are known here", key, hint))
    else:
        do = "Write {'scheduler': scheduler, 'interval': 'epoch'} or {'name': 'StepLR', 'step_size': 3, ...}."
        hint = " ".join(did_you_mean(str(key), ("scheduler", "name")) for key in given)
        raise BadArgument(expected("a mapping with a 'scheduler' or a 'name'", sorted(map(str, spec)), f"{do} {hint}"))
    interval, frequency, monitor = timing.get("interval"), timing.get("frequency", 1), timing.get("monitor")
    if interval not in (None, *INTERVALS):
        what = "interval to be 'step' (optimizer steps), 'epoch' or 'eval' (evaluations)"
        raise BadArgument(expected(what, interval, did_you_mean(str(interval), INTERVALS)))
    if not isinstance(frequency, int) or isinstance(frequency, bool) or frequency < 1:
        raise BadArgument(expected("frequency to be a whole number of at least 1", frequency))
    if monitor is not None and (not isinstance(monitor, str) or not monitor.startswith("val/")):
        do = "Such as 'val/loss': only validation metrics can be monitored."
        raise BadArgument(expected("monitor to be the name of a validation metric", monitor, do))
    return SchedulerDeclaration(_checked(scheduler), options, interval, frequency, monitor, is_mapping=True)


def _checked(spec: Any) -> Any:
    """A name that is known, or something that can be a scheduler or make one."""
    if isinstance(spec, str):
        names = {_normalised(name): name for name in (*SCHEDULES, *TORCH_SCHEDULERS)}
        if _normalised(spec) not in names:
            made_of = next((name for name in _MADE_OF_OTHERS if _normalised(name) == _normalised(spec)), None)
            do = "Pass a function of the optimizer that makes it." if made_of else ""
            what = f"scheduler to be one of {', '.join(SCHEDULES)}, or a class of torch.optim.lr_scheduler"
            raise BadArgument(expected(what, spec, do or did_you_mean(_normalised(spec), names)))
        return spec
    if callable(spec) or hasattr(spec, "step"):
        return spec
    raise BadArgument(expected(_WHAT, spec))


def _normalised(name: str) -> str:
    plain = name.lower().replace("_", "").replace("-", "")
    return "reducelronplateau" if plain == "plateau" else plain


def _call(factory: Any, optimizer: torch.optim.Optimizer, total: int | None) -> Any:
    """What a factory makes of the optimizer, and of the number of steps if it takes two arguments."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return factory(optimizer)
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [p for p in parameters if p.default is p.empty and p.kind not in variadic]
    if len(needed) < 2:
        return factory(optimizer)
    is_total = not isinstance(factory, type) or needed[1].name in _TOTALS
    if len(needed) == 2 and is_total and needed[1].kind is not inspect.Parameter.KEYWORD_ONLY:
        return factory(optimizer, total)
    name = getattr(factory, "__name__", type(factory).__name__)
    others = ", ".join(f"{p.name}=..." for p in needed[1:])
    do = f"Pass lambda optimizer: {name}(optimizer, {others})."
    what = "a scheduler factory that takes the optimizer, or the optimizer and the number of steps"
    raise BadArgument(expected(what, f"{name}({', '.join(p.name for p in needed)})", do))


def _check_optimizer(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """A scheduler of another optimizer would change nothing that is trained."""
    own = getattr(scheduler, "optimizer", None)
    if own is None:
        what = "a scheduler with the attribute 'optimizer', as those of torch have"
        raise BadArgument(expected(what, type(scheduler).__name__))
    same = own is optimizer or own is getattr(optimizer, "optimizer", None)
    if not same and own.param_groups is not optimizer.param_groups:
        raise BadArgument(
            f"Expected {type(scheduler).__name__} to schedule the optimizer of the run, received one over another "
            f"optimizer ({type(own).__name__}): the learning rate of the run would never change. Pass that optimizer "
            "as optimizer=..., or the scheduler as a function of the optimizer."
        )
    for part in getattr(scheduler, "_schedulers", ()):
        _check_optimizer(part, optimizer)
