"""Trial steps that leave no trace: for the learning rate finder, FLOP counting and the pre-flight check."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from trainformer.backends.torch.schedules import Schedule
from trainformer.core.types import DeviceBatch

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun


class DryRun:
    """What can be done inside `TorchRun.sandbox`. No events are emitted and nothing is logged."""

    def __init__(self, run: TorchRun) -> None:
        self._run = run
        self._backend = run.backend

    def batches(self) -> Iterator[DeviceBatch]:
        """Training batches, epoch after epoch."""
        for epoch in count():
            empty = True
            for batch in self._backend.feed(self._run.train_source.batches(epoch), train=True):
                empty = False
                yield batch
            if empty:
                return

    def gradients(self, batch: DeviceBatch) -> float:
        """Forward and backward of one batch; gradients stay until `drop` or the next `step`."""
        self._backend.begin_training()
        self._backend.accumulate(batch)
        self._backend.reduce_window_loss()
        return self._backend.window_loss()

    def drop(self) -> None:
        """Discard the gradients."""
        self._backend.drop_step()

    def step(self, batch: DeviceBatch, lr: float | None = None) -> float:
        """One optimizer step on a batch, at a given learning rate or at that of the first step; its loss."""
        backend = self._backend
        schedule = backend.schedule
        if lr is not None:
            backend.schedule = Schedule(backend.optimizer, lambda step: 1.0)
            backend.schedule.base = [lr for _ in backend.schedule.base]
        try:
            backend.begin_training()
            backend.accumulate(batch)
            backend.finish()
            backend.update(0)
            return backend.window_loss()
        finally:
            backend.schedule = schedule
            backend.drop_step()
