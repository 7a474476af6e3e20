"""Learning-rate schedules by name, as pure functions of the optimizer step; the formulas are in `backends.schedules`.

A schedule takes a Python number and returns one, or a traced step inside a jitted function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainformer.backends.schedules import Factor, constant, cosine, inverse_sqrt, linear, onecycle, wsd
from trainformer.core.errors import BadArgument, did_you_mean, expected

Schedule = Callable[[Any], Any]

# name: factory, and its options besides total steps, warmup and end
SCHEDULES: dict[str, tuple[Callable[..., Factor], tuple[str, ...]]] = {
    "constant": (constant, ()),
    "linear": (linear, ()),
    "cosine": (cosine, ()),
    "onecycle": (onecycle, ("start",)),
    "inversesqrt": (inverse_sqrt, ("timescale",)),
    "wsd": (wsd, ("decay_ratio",)),
}
NAMES = ("constant", "linear", "cosine", "onecycle", "inverse_sqrt", "wsd")
_ALIASES = {
    "none": "constant",
    "constantwithwarmup": "constant",
    "warmuplinear": "linear",
    "warmupcosine": "cosine",
    "warmupstabledecay": "wsd",
}
_CHOICES = f"scheduler to be one of {', '.join(NAMES)}, or a function of the step"
_ENDLESS = ("constant", "inversesqrt")


def make_schedule(
    spec: str | Schedule | None,
    lr: float,
    total_steps: int | None = None,
    *,
    warmup_steps: int = 0,
    warmup_ratio: float = 0.0,
    end: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """The learning rate as a function of the completed steps, from a name or a function.

    `end` is the learning rate at the end of the run. With `total_steps=None` (unknown) only schedules without an end
    are possible.

    >>> schedule = make_schedule("linear", 0.1, 10, warmup_steps=2)
    >>> [round(float(schedule(step)), 4) for step in (0, 1, 2, 6, 10)]
    [0.05, 0.1, 0.1, 0.05, 0.0]
    """
    if spec is not None and not isinstance(spec, str):
        if not callable(spec):
            do = "Schedulers that count epochs or watch a metric, and several of them, exist on torch only."
            raise BadArgument(expected(_CHOICES, spec, do))
        if warmup_steps or warmup_ratio or end is not None or options:
            raise BadArgument(
                "Expected no warmup, learning_rate_end or options with a scheduler that is a function. "
                "Put them into the function."
            )
        return spec
    name = _canonical(spec or "constant")
    if warmup_steps and warmup_ratio:
        raise BadArgument("Expected warmup_steps or warmup_ratio, received both. Keep the one you mean.")
    if total_steps is None and (name not in _ENDLESS or warmup_ratio):
        raise BadArgument(
            f"The {spec!r} schedule needs the number of steps, but the length of the dataset is unknown. "
            "Pass max_steps=..., or scheduler='constant' with warmup_steps instead of warmup_ratio."
        )
    total = total_steps or 1
    # torch's OneCycleLR accepts a fractional number of warmup steps; the others round down.
    warmup = warmup_steps or (warmup_ratio * total if name == "onecycle" else int(warmup_ratio * total))
    factor = SCHEDULES[name][0](total, warmup, **_check_options(spec, name, lr, end, options))

    def schedule(step: Any) -> Any:
        # On the host the result must not wait for a device; inside jit it must be traced.
        return lr * factor(step, jnp if isinstance(step, jax.Array) else np)

    return schedule


def _canonical(spec: str) -> str:
    name = spec.lower().replace("_", "").replace("-", "")
    name = _ALIASES.get(name, name)
    if name not in SCHEDULES:
        hint = did_you_mean(spec.lower(), (*NAMES, *_ALIASES))
        raise BadArgument(expected(_CHOICES, spec, hint))
    return name


def _check_options(
    spec: str | None, name: str, lr: float, end: float | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The options of a schedule; `end` is converted from a learning rate to a fraction of the peak."""
    given = dict(options or {})
    known = SCHEDULES[name][1]
    for unknown in sorted(given.keys() - set(known)):
        takes = f"It takes {', '.join(known)}." if known else "It takes none."
        raise BadArgument(expected(f"options that the schedule {spec!r} takes", unknown, takes))
    for option, value in given.items():
        is_positive = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if not is_positive or (option == "decay_ratio" and value > 1):
            raise BadArgument(expected(f"{option} of the schedule {spec!r} to be a positive number", value))
    if end is None:
        return given
    if name in _ENDLESS:
        do = "Leave out learning_rate_end, or use 'linear' or 'cosine'."
        raise BadArgument(expected("a schedule that has an end", spec, do))
    return {**given, "end": end / lr}
