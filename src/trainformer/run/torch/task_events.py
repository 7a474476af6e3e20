"""What a task hears of its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainformer.engine import Event
from trainformer.tasks.base import provides


def task_handlers(task: Any, total_steps: Callable[[], int | None]) -> dict[Event, Any]:
    """Those of a task's methods that it defines itself."""
    handlers = {
        "on_train_begin": (Event.TRAIN_BEGIN, lambda: task.on_train_begin()),
        "on_train_end": (Event.TRAIN_END, lambda: task.on_train_end()),
        "on_epoch_begin": (Event.EPOCH_BEGIN, lambda epoch: task.on_epoch_begin(epoch)),
        "on_epoch_end": (Event.EPOCH_END, lambda epoch, metrics: task.on_epoch_end(epoch, metrics)),
        "on_step_end": (Event.STEP_END, lambda step, loss: task.on_step_end(step, total_steps() or 0)),
        "on_validation_end": (Event.EVAL_END, lambda metrics: task.on_validation_end(metrics)),
    }
    return {event: handler for name, (event, handler) in handlers.items() if provides(task, name)}
