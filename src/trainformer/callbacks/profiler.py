"""Trace some steps of a run with the profiler of its framework."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from trainformer.callbacks.base import Trace, TrainerLike
from trainformer.core.errors import BadArgument, expected

logger = logging.getLogger("trainformer")


@dataclass
class Profiler:
    """Write a trace of the steps from the first to the last of `steps`, both included.

    On torch it is a Chrome trace, on JAX a trace for xprof and TensorBoard, and one for Perfetto. It is written to
    `folder` in the run folder (without one: in that of the checkpoints) when the last of the steps is done, or when the
    run ends or fails before. A run that resumes within these steps traces the rest of them. The first process traces
    itself. The traced steps are slower; choose steps after the first few, which compile and warm up.

    >>> Profiler(steps=(10, 13)).steps
    (10, 13)
    """

    sets_control = False

    steps: tuple[int, int] = (10, 13)
    folder: str = "profile"

    _trace: Trace | None = field(init=False, default=None, repr=False)
    _has_traced: bool = field(init=False, default=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.steps, list):  # of a config file
            self.steps = tuple(self.steps)
        what = "Profiler's steps to be the first and the last step to trace, counted from 1"
        if not isinstance(self.steps, tuple) or len(self.steps) != 2 or not all(type(n) is int for n in self.steps):
            raise BadArgument(expected(what, self.steps, "Write steps=(10, 13)."))
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise BadArgument(expected(what, self.steps))

    def on_step_begin(self, trainer: TrainerLike, step: int) -> None:
        first, last = self.steps
        if not trainer.is_main or not first <= step + 1 <= last:
            return
        if self._trace is None:
            path = trainer.output_folder.absolute() / self.folder / f"steps_{step + 1}-{last}"
            path.mkdir(parents=True, exist_ok=True)
            self._trace, self._has_traced = trainer.start_trace(path), True
        self._trace.begin_step(step + 1)

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        if self._trace is None:
            return
        self._trace.end_step()
        if step >= self.steps[1]:
            self._stop(f"steps up to {step}")

    def on_train_end(self, trainer: TrainerLike) -> None:
        if self._trace is not None:
            self._stop(f"steps up to {trainer.state.step}, where the run ended")
        elif not self._has_traced and trainer.is_main and trainer.state.step < self.steps[0]:
            logger.warning("Profiler: the run ended at step %d, before step %d", trainer.state.step, self.steps[0])

    def on_error(self, trainer: TrainerLike, error: BaseException) -> None:
        if self._trace is not None:
            self._stop(f"steps up to {trainer.state.step}, where the run failed")

    def _stop(self, what: str) -> None:
        assert self._trace is not None
        trace, self._trace = self._trace, None
        logger.info("Profiler: wrote a trace of %s; %s", what, trace.stop())
