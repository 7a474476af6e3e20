"""Which checkpoints are kept. Independent of when they are written and of when evaluations happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainformer.checkpointing.store import Checkpoint
from trainformer.engine.state import is_better


@dataclass(frozen=True)
class Retention:
    """Keep the `last` newest, the `best` by a metric, and one every `every` steps; protected ones anyway.

    The newest is always kept. `best` compares with the worst that is kept; 0.0 is a valid value, NaN is not.
    """

    last: int = 1
    best: int = 0
    every: int | None = None
    monitor: str = "val/loss"
    mode: str = "min"

    def to_delete(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints that no rule keeps."""
        ordered = sorted(checkpoints, key=lambda c: c.step)
        kept = {c.step for c in ordered[-max(self.last, 1) :]}
        kept |= {c.step for c in self.ranked(ordered)[: self.best]}
        if self.every is not None:
            kept |= {c.step for c in ordered if c.step % self.every == 0}
        return [c for c in ordered if c.step not in kept and not c.is_protected]

    def ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints that have the metric, best first; ties go to the earlier one."""
        scores = ((c.manifest.metrics.get(self.monitor, math.nan), c) for c in checkpoints)
        sign = 1 if self.mode == "min" else -1
        # Drop NaN before sorting: a single NaN among the keys leaves a list in no order at all.
        scored = [(sign * score, c.step, c) for score, c in scores if not math.isnan(score)]
        return [c for *_, c in sorted(scored, key=lambda s: s[:2])]

    def is_worth_keeping(self, metrics: dict[str, float], checkpoints: Sequence[Checkpoint]) -> bool:
        """Whether an evaluation with these metrics is among the best so far."""
        value = metrics.get(self.monitor)
        if value is None or value != value or self.best == 0:
            return False
        kept = self.ranked(checkpoints)[: self.best]
        return len(kept) < self.best or is_better(value, kept[-1].manifest.metrics[self.monitor], self.mode)
