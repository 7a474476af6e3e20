"""Stop when a metric stops improving, or diverges."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from trainformer.callbacks.base import TrainerLike, was_left_out
from trainformer.core.errors import BadArgument, check_count, did_you_mean, expected
from trainformer.engine.state import is_better

logger = logging.getLogger("trainformer")


@dataclass
class EarlyStopping:
    """Stop after `patience` evaluations without an improvement of more than `min_delta`.

    With `divergence_threshold`, a metric that is NaN or beyond the threshold (above it for ``mode="min"``, below it for
    ``"max"``) stops the run at once. Without it, NaN counts as no improvement.
    """

    monitor: str = "val/loss"
    patience: int = 5
    mode: str = "min"
    min_delta: float = 0.0
    divergence_threshold: float | None = None

    _best: float | None = field(init=False, default=None, repr=False)
    _counter: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise BadArgument(expected("EarlyStopping's mode to be 'min' or 'max'", self.mode))
        check_count("EarlyStopping's patience", self.patience)
        if not isinstance(self.monitor, str):
            raise BadArgument(expected("EarlyStopping's monitor to be the name of a metric", self.monitor))
        if not isinstance(self.min_delta, (int, float)) or not self.min_delta >= 0:
            raise BadArgument(expected("EarlyStopping's min_delta to be a number of at least 0", self.min_delta))

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        value = metrics.get(self.monitor)
        if value is None and was_left_out(trainer, self.monitor):
            return
        if value is None:
            raise BadArgument(
                f"EarlyStopping monitors {self.monitor!r}, but the evaluation returned {sorted(metrics)}. "
                f"{did_you_mean(self.monitor, metrics)}"
            )
        limit = self.divergence_threshold
        if limit is not None and (math.isnan(value) or (value > limit if self.mode == "min" else value < limit)):
            trainer.stop(f"{self.monitor} diverged to {value:g}")
        elif is_better(value, self._best, self.mode, self.min_delta):
            self._best, self._counter = value, 0
        else:
            self._counter += 1
            if self._counter >= self.patience:
                best = "none" if self._best is None else f"{self._best:g}"
                trainer.stop(f"{self.monitor} has not improved for {self.patience} evaluations (best {best})")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "counter": self._counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._counter = state["best"], state["counter"]
