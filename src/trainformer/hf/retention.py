"""Which checkpoints `save_total_limit` keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainformer.checkpointing import Checkpoint, Retention


@dataclass(frozen=True)
class TotalRetention(Retention):
    """Keeps `last` checkpoints in all, the best one among them. The newest is kept in addition if it must."""

    def to_delete(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        best = {c.step for c in self.ranked(checkpoints)[: self.best]}
        ordered = sorted(checkpoints, key=lambda c: c.step)
        newest = {c.step for c in ordered[-max(self.last, 1) :]}
        kept = newest if best <= newest else best | {c.step for c in ordered[-max(self.last - len(best), 1) :]}
        return [c for c in ordered if c.step not in kept and not c.is_protected]
