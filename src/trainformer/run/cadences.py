"""Cadences that a run never reaches: 125 meant as steps, where the unit is epochs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from trainformer.engine.cadence import Cadence, Unit
from trainformer.run.settings import CommonSettings

logger = logging.getLogger("trainformer")


def never_due(
    settings: CommonSettings, passed: Collection[str], evaluates: bool, steps: int | None, per_epoch: int | None
) -> dict[str, str]:
    """What is never due before the end of a run, of the cadences that the user passed: the reasons, by name.

    `steps` are those of the run, and `per_epoch` those of an epoch, if known.

    >>> settings = CommonSettings(eval_every=125, max_steps=250)
    >>> print(never_due(settings, {"eval_every"}, True, 250, 100)["eval_every"])
    eval_every=125 means 125 epochs, and the run has 2.5: it is never due before the end. For steps write '125steps'.
    """
    each = settings.eval_every.items() if isinstance(settings.eval_every, Mapping) else [(None, settings.eval_every)]
    given: list[tuple[str, Any, Unit]] = [
        ("log_every", settings.log_every, "steps"),
        ("save_every", settings.save_every, settings.save_strategy),
    ]
    if evaluates:
        given += [("eval_every" if name is None else f"eval_every[{name!r}]", value, "epochs") for name, value in each]
    epochs = _epochs(settings, steps, per_epoch)
    reasons = {}
    for name, value, unit in given:
        cadence = Cadence.parse(value, unit, name)
        if cadence is None or name.partition("[")[0] not in passed:
            continue
        if cadence.unit == "steps" and steps is not None and cadence.every > steps:
            reasons[name] = f"{name}={value!r} is longer than the whole run of {steps} steps."
        elif cadence.unit == "epochs" and epochs is not None and cadence.every > epochs:
            reasons[name] = (
                f"{name}={value!r} means {cadence.every:g} epochs, and the run has {epochs:.2g}: it is never due "
                f"before the end. For steps write '{cadence.every:g}steps'."
            )
    return reasons


def _epochs(settings: CommonSettings, steps: int | None, per_epoch: int | None) -> float | None:
    """The epochs of a run, or at least an upper bound; None if they are unknown."""
    if settings.max_steps is None:
        return settings.epochs
    return None if steps is None else steps / (per_epoch or 1)


def warn_of_cadences(
    settings: CommonSettings, passed: Collection[str], evaluates: bool, steps: int | None, per_epoch: int | None
) -> None:
    """Warn of evaluations and checkpoints that a run never reaches. Training goes on: the end has both."""
    for name, reason in never_due(settings, passed, evaluates, steps, per_epoch).items():
        if name != "log_every":
            logger.warning(reason)
