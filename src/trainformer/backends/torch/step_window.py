"""What a task gets to know about a whole step before its first micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from trainformer.core.types import DeviceBatch
from trainformer.utils.distributed import all_reduce_sum, padding


def announce_step(task: Any, batches: Sequence[DeviceBatch], precision: Any, strategy: Any) -> None:
    """Pass the micro-batches of the next step to the task, and their totals if it has `step_totals`."""
    if hasattr(task, "begin_window"):
        with precision.forward():
            task.begin_window([batch.data for batch in batches], [batch.size for batch in batches])
    if not hasattr(task, "step_totals"):
        return
    found = []
    for batch in batches:
        # Nothing is logged here: the step itself does that.
        with torch.no_grad(), precision.forward(), nullcontext() if batch.size else padding(participates=True):
            totals = strategy.infer(task.step_totals, batch.data)
        found.append(totals if batch.size else torch.zeros_like(totals))
    task.use_step_totals(all_reduce_sum(torch.stack(found).sum(0)))


def forget_totals(task: Any) -> None:
    """Make the task forget the totals of a trial step."""
    if hasattr(task, "use_step_totals"):
        task.use_step_totals(None)
