"""What a run says of itself when it begins and when it was stopped."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainformer.run.run import Run

logger = logging.getLogger("trainformer")


def announce_start(run: Run) -> None:
    """What is about to be trained, or why there is nothing to train."""
    state, total, anew = run.state, run.total_steps(), run.habits.begin_anew
    if state.stopped:
        logger.warning(
            "nothing left to train: the run was stopped at step %d by %s: %s. Call fit() again or load the "
            "checkpoint to go on all the same, or %s to begin anew.", state.step, *state.stopped, anew,
        )  # fmt: skip
        return
    if total is not None and state.step >= total:
        logger.warning(
            "nothing left to train: %d of %d steps are done. Raise the number of steps or epochs to go on, "
            "or %s to begin anew.", state.step, total, anew,
        )  # fmt: skip
        return
    samples = run.train_size
    logger.info(
        "training %s, %s samples, %s steps",
        run.describe(), samples if samples is not None else "?", total if total is not None else "?",
    )  # fmt: skip


def announce_stop(run: Run) -> None:
    """Who stopped the run, and why, if anybody did."""
    control = run.control
    if control.should_stop:
        reason, who = control.stop_reason, control.stopped_by
        logger.info("stopped at step %d by %s: %s", run.state.step, who, reason)
