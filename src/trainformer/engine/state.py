"""The progress of a run: the single source for schedules, cadences and resume."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

from trainformer.core.errors import DataError, expected


@dataclass(slots=True)
class RunState:
    """The record of a run's progress. Every field is saved; nothing else is.

    `step` counts optimizer steps done, `epoch` whole epochs done (so it is also the index of the running one),
    `batch` and `position` the micro-batches and samples already consumed of the running epoch. `bad_samples` were
    consumed too, but could not be read and were left out.

    >>> state = RunState(step=7, epoch=1)
    >>> RunState().load_state_dict(state.state_dict()).step
    7
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    position: int = 0
    samples: int = 0
    tokens: int = 0
    bad_samples: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # over the first `loss_steps` steps: loss_sum / loss_steps is the mean loss of the run
    loss_steps: int = 0
    evaluated_at: int = -1
    saved_at: int = -1
    best_metrics: dict[str, float] = field(default_factory=dict)
    best_step: int = -1
    stopped: list[str] = field(default_factory=list)  # who stopped the run early, and why
    log_history: list[dict[str, float]] = field(default_factory=list)
    # Values of the steps since the last log record. Without them the first record after a resume would average fewer
    # steps than in an uninterrupted run. Filled in when the state is saved.
    pending: list[list[Any]] = field(default_factory=list)

    def end_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.epoch += 1
        self.batch = self.position = 0

    def update_best(self, metrics: dict[str, float], monitor: str, mode: str) -> None:
        """Keep the metrics of the best evaluation, by the monitored metric."""
        value = metrics.get(monitor)
        if value is not None and is_better(value, self.best_metrics.get(monitor), mode):
            self.best_metrics = dict(metrics)
            self.best_step = self.step

    def state_dict(self) -> dict[str, Any]:
        """A copy that later steps do not change."""
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in fields(self)}

    def load_state_dict(self, state: dict[str, Any]) -> RunState:
        """Load a saved state in place; fields that it lacks get their defaults."""
        fresh = RunState()
        values = {f.name: state.get(f.name, getattr(fresh, f.name)) for f in fields(self)}
        for name, value in values.items():
            kind = type(getattr(fresh, name))
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                raise DataError(expected(f"{name} of the run's state to be of type {kind.__name__}", value))
        for name, value in values.items():
            setattr(self, name, copy.deepcopy(value))
        return self


def is_better(value: float, than: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a metric improved by more than `min_delta`. NaN never does; anything beats nothing.

    >>> is_better(0.0, 0.1, "min"), is_better(float("nan"), 0.1, "min"), is_better(0.95, 0.9, "max", min_delta=0.1)
    (True, False, False)
    """
    if value != value:
        return False
    if than is None or than != than:
        return True
    return value < than - min_delta if mode == "min" else value > than + min_delta
