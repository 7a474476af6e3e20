"""Trial steps that leave no trace: for the learning rate finder, FLOP counting and the pre-flight check."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from trainformer.backends.torch.schedules import Schedule
from trainformer.backends.torch.step_window import forget_totals
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

    def gradients(self, batch: DeviceBatch) -> Iterator[tuple[str, float]]:
        """Forward and backward of a batch, once for each optimizer: its name and loss, while the gradients are there.

        The name is empty if there is only one.
        """
        backend = self._backend
        backend.begin_training()
        self._begin_window(batch)
        for _ in backend.updates(None, [batch]):
            backend.accumulate(batch)
            backend.reduce_window_loss()
            yield backend.active.name, backend.window_loss()
            backend.drop_step()
        forget_totals(backend.task)

    def _begin_window(self, batch: DeviceBatch) -> None:
        if self._backend.wants_window:
            self._backend.begin_window([batch])

    def step(self, batch: DeviceBatch, lr: float | None = None) -> float:
        """One step on a batch, at a given learning rate or at that of the first step; its loss."""
        backend = self._backend
        schedules = {name: o.schedule for name, o in backend.optimizers.items()}
        if lr is not None:
            for o in backend.optimizers.values():
                o.schedule = Schedule(o.optimizer, lambda step: 1.0)
                o.schedule.base = [lr for _ in o.schedule.base]
        losses = []
        try:
            backend.begin_training()
            self._begin_window(batch)
            for _ in backend.updates(None, [batch]):
                backend.accumulate(batch)
                backend.finish()
                backend.update(0)
                losses.append(backend.window_loss())
                backend.end_step()
            return losses[0]
        finally:
            for name, schedule in schedules.items():
                backend.optimizers[name].schedule = schedule
            backend.drop_step()
            forget_totals(backend.task)
