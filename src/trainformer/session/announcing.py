"""What a run says of itself when it begins and when it was stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from trainformer.session.session import Session

logger = logging.getLogger("trainformer")


def announce_start(session: Session) -> None:
    """What is about to be trained, or why there is nothing to train."""
    state, total, anew = session.state, session.total_steps(), session.habits.begin_anew
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
    backend, samples = session.backend, session.train_size
    parameters = backend.strategy.count_parameters(backend.parameters)
    together = "" if session.ranks.is_alone else f" ({backend.strategy.describe()})"
    logger.info(
        "training %s on %s%s in %s: %s trainable parameters%s, %s samples, %s steps",
        getattr(session.task, "title", type(session.task).__name__), backend.device, together, backend.precision.name,
        f"{parameters:,}", _in_short(backend.parameters),
        samples if samples is not None else "?", total if total is not None else "?",
    )  # fmt: skip


def _in_short(parameters: Iterable[Tensor]) -> str:
    """Which of the parameters are kept in fewer bits than usual."""
    short = sorted({str(p.dtype).removeprefix("torch.") for p in parameters} - {"float32", "float64"})
    return f" ({', '.join(short)})" if short else ""


def announce_stop(session: Session) -> None:
    """Who stopped the run, and why, if anybody did."""
    control = session.control
    if control.should_stop:
        reason, who = control.stop_reason, control.stopped_by
        logger.info("stopped at step %d by %s: %s", session.state.step, who, reason)
