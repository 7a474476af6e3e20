"""Steps that wait to be executed together, for models so small that starting a step takes longer than computing it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.gradient_norms import NORMS
from trainformer.backends.jax.step_metrics import PACKED, QueuedArray, QueuedSteps, unpack_metrics

logger = logging.getLogger("trainformer")

_TRIED = 32  # executions after which it is clear whether steps wait at all


class StepQueue:
    """Up to `limit` train steps, which one call executes (`JittedStep.run_loop`).

    `execute` is called when the output of a waiting step is read; it has to call `run`.
    """

    def __init__(self, step: JittedStep, limit: int, execute: Callable[[], None]) -> None:
        self._step, self._limit, self._execute = step, limit, execute
        self._batches: list[Mapping[str, Any]] = []
        self._layout: Any = None  # of the waiting batches
        self._metrics: dict[Any, Mapping[str, Any]] = {}  # their names, by layout
        self._steps = QueuedSteps(execute)
        self._executions = self._executed = 0

    def add(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Let the step of a batch wait, or have it executed. Returns its output, to be read whenever it is needed."""
        layout = tuple((name, array.shape, array.dtype) for name, array in batch.items())
        if self._batches and layout != self._layout:
            self._execute()
        self._layout = layout
        self._batches.append(batch)
        steps, row = self._steps, len(self._batches) - 1
        if layout not in self._metrics or len(self._batches) == self._limit:  # the first one tells what it returns
            self._execute()
        output = {"metrics": self._metrics[layout], PACKED: QueuedArray(steps, PACKED, row)}
        norm = unpack_metrics(output)[1]
        return {**output, "grad_norm": norm, NORMS: QueuedArray(steps, NORMS, row)}

    def run(self, state: Any) -> Any:
        """Execute the waiting steps from a state; the state after them."""
        if not self._batches:
            return state
        batches, steps = self._batches, self._steps
        self._batches, self._steps = [], QueuedSteps(self._execute)  # also if it fails
        state, output = self._step.run_loop(state, batches, self._limit)
        self._metrics[self._layout] = output.pop("metrics")
        steps.arrays = output
        self._executions += 1
        self._executed += len(batches)
        if self._executions == _TRIED and self._executed < 1.5 * _TRIED:
            logger.warning(
                "steps_per_execution=%d has no effect: a callback or the log reads the weights or the loss after each "
                "step, or batches have many shapes.", self._limit,
            )  # fmt: skip
        return state
