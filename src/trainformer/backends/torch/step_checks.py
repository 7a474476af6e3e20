"""What is looked at once, in the first step of a run, and what is added to the errors of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trainformer.backends.torch.coverage import unoptimized, unoptimized_message
from trainformer.backends.torch.hints import explain
from trainformer.backends.torch.placement import Feeder
from trainformer.core.types import DeviceBatch

logger = logging.getLogger("trainformer")


class StepChecks:
    """Warns of what is wrong with the first batch and loss; explains errors.

    `unoptimized` are parameters that get gradients and are never updated; None if no step has told yet.
    `describe_sample` names a sample of the training data.
    """

    def __init__(self, task: Any, feeder: Feeder) -> None:
        self.unoptimized: list[str] | None = None
        self.describe_sample: Callable[[int], str] = lambda index: f"sample {index}"
        self._task = task
        self._feeder = feeder

    def check_batch(self, batch: DeviceBatch) -> None:
        """Pass on what the task finds wrong with the first batch."""
        check = getattr(self._task, "check_batch", None)
        for problem in (check(batch.data) if check is not None and batch.size else None) or ():
            logger.warning("the first batch: %s", problem)

    def check_loss(self, loss: Tensor | None, parameters: list[nn.Parameter] | None) -> None:
        """Warn of parameters that the first loss depends on and that are not among those to be trained, if known."""
        self.unoptimized = [] if loss is None or parameters is None else unoptimized(loss, self._task, parameters)
        if self.unoptimized:
            logger.warning(unoptimized_message(self.unoptimized))

    def explain(self, error: Exception, step: str, batch: DeviceBatch) -> None:
        """Add what the batch holds, and a hint, to an error of a step."""
        describe = self.describe_sample if step in ("train_step", "manual_step") else _describe_evaluated
        samples, recent = self._feeder.samples_of(batch), self._feeder.recent_labels()
        explain(error, step, batch.data, self._task.model, samples, describe, recent)


def _describe_evaluated(index: int) -> str:
    return f"sample {index} of the evaluated data"
