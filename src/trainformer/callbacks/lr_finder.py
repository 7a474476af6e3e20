"""The learning-rate range test (Smith, 2015)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, expected

logger = logging.getLogger("trainformer")

_NOISY = 10  # first values of the smoothed loss, which are averages of few batches


@dataclass
class LRFinder:
    """Before training, raise the learning rate from `min_lr` to `max_lr` over `num_steps` steps and suggest one.

    The suggestion is the learning rate where the smoothed loss falls most steeply. The run uses it unless you passed
    `lr` (even with its default value); then it is only reported, as ``suggested_lr`` in the config of the run. The test
    has no side effects: weights, optimizer, random state and data position are restored. The curve is stored in
    ``records.jsonl`` and shown in reports.
    """

    min_lr: float = 1e-7
    max_lr: float = 10.0
    num_steps: int = 100
    smoothing: float = 0.05
    divergence_factor: float = 4.0

    lrs: list[float] = field(init=False, default_factory=list, repr=False)
    losses: list[float] = field(init=False, default_factory=list, repr=False)
    suggested_lr: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not 0 < self.min_lr < self.max_lr:
            raise BadArgument(expected("LRFinder to have 0 < min_lr < max_lr", (self.min_lr, self.max_lr)))
        if self.num_steps < 10:
            raise BadArgument(expected("LRFinder's num_steps to be at least 10", self.num_steps))
        if not 0 < self.smoothing <= 1:
            raise BadArgument(expected("LRFinder's smoothing to be in (0, 1]", self.smoothing))

    def on_train_begin(self, trainer: TrainerLike) -> None:
        """Run the test, unless this run is resumed."""
        if self.suggested_lr is not None:  # found before the run was resumed
            self._record_config(trainer)
        if self.suggested_lr is not None or trainer.state.step > 0:
            return
        if hasattr(getattr(trainer, "task", None), "configure_optimizers"):
            raise BadArgument(
                "LRFinder varies one learning rate, but the task configures several optimizers. Leave it out."
            )
        logger.info(
            "LRFinder: trying learning rates from %g to %g in %d steps", self.min_lr, self.max_lr, self.num_steps
        )
        self._sweep(trainer)
        self.suggested_lr = self._steepest()
        trainer.record("lr_finder", lrs=self.lrs, losses=self.losses, suggestion=self.suggested_lr)
        if self.suggested_lr is None:
            logger.warning("LRFinder: the loss never fell; lr stays at %g", trainer.lr)
            return
        self._record_config(trainer)
        if trainer.was_set("lr"):
            logger.info("LRFinder: suggests lr=%.2e; keeping your lr=%.2e", self.suggested_lr, trainer.lr)
        else:
            logger.info("LRFinder: lr=%.2e", self.suggested_lr)
            trainer.lr = self.suggested_lr
            trainer.active_scheduler.rescale(self.suggested_lr)

    def _record_config(self, trainer: TrainerLike) -> None:
        trainer.context.config.set_derived("suggested_lr", self.suggested_lr, ("lr_finder",))
        if not trainer.was_set("lr"):
            trainer.context.config.set_derived("lr", self.suggested_lr, ("suggested_lr",))

    def _sweep(self, trainer: TrainerLike) -> None:
        ratio = (self.max_lr / self.min_lr) ** (1 / (self.num_steps - 1))
        average, best = 0.0, math.inf
        self.lrs, self.losses = [], []
        with trainer.sandbox() as probe:
            for step, batch in zip(range(self.num_steps), probe.batches(), strict=False):
                lr = self.min_lr * ratio**step
                loss = probe.step(batch, lr=lr)
                # A moving average with bias correction, as in Adam.
                average = (1 - self.smoothing) * average + self.smoothing * loss
                smooth = average / (1 - (1 - self.smoothing) ** (step + 1))
                if not math.isfinite(smooth) or smooth > self.divergence_factor * best > 0:
                    break
                self.lrs.append(lr)
                self.losses.append(smooth)
                best = min(best, smooth)

    def _steepest(self) -> float | None:
        """The learning rate at the steepest descent of the smoothed loss over log(lr), without the noisy start."""
        if len(self.losses) < 3:
            return None
        logs = [math.log(lr) for lr in self.lrs]
        first = max(1, min(_NOISY, len(logs) // 4))
        slopes = {
            i: (self.losses[i + 1] - self.losses[i - 1]) / (logs[i + 1] - logs[i - 1])
            for i in range(first, len(logs) - 1)
        }
        best = min(slopes, key=slopes.__getitem__)
        return self.lrs[best] if slopes[best] < 0 else None

    def state_dict(self) -> dict[str, float | None]:
        return {"suggested_lr": self.suggested_lr}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        self.suggested_lr = state["suggested_lr"]
