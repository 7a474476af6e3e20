"""The callback through which the runs of a trial report to the pruner of their sweep."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, expected

logger = logging.getLogger("trainformer")


@dataclass
class PruneTrial:
    """After each evaluation, report a metric to the sweep, and stop the run if the trial is not worth going on with.

    Every run that is made in a trial gets one by itself, for its `monitor_metric`. Evaluations are counted, rather than
    steps: trials with other batch sizes can be compared. Where a small metric is good while the sweep looks for a
    large one (or the other way round), its negative is reported.
    """

    monitor: str = "val/loss"
    mode: str = "min"

    _evaluations: int = field(init=False, default=0, repr=False)
    _before: int | None = field(init=False, default=None, repr=False)  # reports of earlier runs of the same trial

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise BadArgument(expected("PruneTrial's mode to be 'min' or 'max'", self.mode))

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Report, and obey."""
        from trainformer.sweep.trials import current_trial

        trial, value = current_trial(), metrics.get(self.monitor)
        if trial.number is None or not trainer.is_main:
            return
        if self._before is None:
            self._before = trial.reports
        self._evaluations += 1
        if value is None or value != value:
            logger.warning("nothing is reported to the sweep: the evaluation gave no %s", self.monitor)
            return
        has_same_sense = (self.mode == "max") == (trial.direction == "maximize")
        trial.report(value if has_same_sense else -value, self._before + self._evaluations)
        if trial.should_stop:
            trainer.stop(f"{self.monitor} {value:g} is not good enough at evaluation {self._evaluations}")

    def state_dict(self) -> dict[str, Any]:
        """How many evaluations there were."""
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._evaluations = state["evaluations"]
