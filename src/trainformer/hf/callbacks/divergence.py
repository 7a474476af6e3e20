"""`DivergenceDetector`: ends a run whose loss runs away, before more hours are spent on it."""

from __future__ import annotations

import logging
import math
from typing import Any

from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.core.errors import BadArgument, expected

logger = logging.getLogger("trainformer")

_FLAGS = {"abort": "should_abort_without_save", "stop": "should_training_stop", "warn": None}


class DivergenceDetector(TrainerCallback):
    """Watches a logged metric that should fall. It has diverged when its moving average stays above a limit.

    The average is exponential: each record counts for ``1 - smoothing``. The limit is `factor` times the lowest average
    so far, and at least `min_rise` above it, so that noise around a small loss is no divergence. Above it for
    `patience` records in a row, or once NaN or infinite, is a divergence; the first `warmup` records only
    count for the average.

    `action`: "abort" ends the run and saves nothing more, so that the last checkpoint is one from before; "stop" ends
    it as planned, with a checkpoint; "warn" says so once and goes on. `metric` is a name as in the logs: "loss",
    "eval_loss", "grad_norm", ...
    """

    def __init__(
        self,
        metric: str = "loss",
        factor: float = 2.0,
        patience: int = 3,
        *,
        action: str = "abort",
        smoothing: float = 0.8,
        min_rise: float = 0.1,
        warmup: int = 5,
    ) -> None:
        if action not in _FLAGS:
            raise BadArgument(expected("DivergenceDetector's action to be 'abort', 'stop' or 'warn'", action))
        for name, value, fits, what in (
            ("factor", factor, factor > 1, "above 1"),
            ("patience", patience, patience >= 1, "at least 1"),
            ("smoothing", smoothing, 0 <= smoothing < 1, "from 0 and below 1"),
            ("min_rise", min_rise, min_rise >= 0, "at least 0"),
            ("warmup", warmup, warmup >= 0, "at least 0"),
        ):
            if not fits:
                raise BadArgument(expected(f"DivergenceDetector's {name} to be {what}", value))
        self.metric, self.factor, self.patience, self.action = metric, factor, patience, action
        self.smoothing, self.min_rise, self.warmup = smoothing, min_rise, warmup
        self._sum = 0.0  # of values, each weighted by how long ago it was
        self._records = 0
        self._best = math.inf
        self._above = 0
        self._reported = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What was said in a run before is said again."""
        self._reported = False

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> Any:
        """Look at the record."""
        value = (logs or {}).get(self.metric)
        if value is None:
            return control
        if not math.isfinite(value):
            self._diverged(control, state, f"{self.metric} is {value}")
            return control
        average = self._follow(float(value))
        limit = self._best + max((self.factor - 1) * abs(self._best), self.min_rise)
        if self._records > self.warmup and average > limit:
            self._above += 1
            if self._above >= self.patience:
                bound = f"{limit:.4g} (its lowest was {self._best:.4g})"
                self._diverged(control, state, f"the average of {self.metric}, {average:.4g}, is above {bound}")
        else:
            self._above = 0
            self._reported = False
        self._best = min(self._best, average)
        return control

    def _follow(self, value: float) -> float:
        self._records += 1
        self._sum = self.smoothing * self._sum + (1 - self.smoothing) * value
        return self._sum / (1 - self.smoothing**self._records)

    def _diverged(self, control: TrainerControl, state: TrainerState, what: str) -> None:
        flag = _FLAGS[self.action]
        if not self._reported:
            consequence = {"abort": "the run ends without another checkpoint", "stop": "the run ends"}
            then = consequence.get(self.action, "the run goes on")
            logger.warning("DivergenceDetector: %s at step %d; %s", what, state.global_step, then)
            self._reported = True
        if flag is not None:
            # transformers' own control knows no aborting.
            setattr(control, flag if hasattr(control, flag) else "should_training_stop", True)

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far."""
        best = self._best if math.isfinite(self._best) else None
        return {"sum": self._sum, "records": self._records, "best": best, "above": self._above}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._sum, self._records, self._above = state["sum"], state["records"], state["above"]
        self._best = math.inf if state["best"] is None else state["best"]
