"""An evaluation that raises must not cost what was trained before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainformer.run.run import Run

logger = logging.getLogger("trainformer")


@contextmanager
def saved_if_it_fails(run: Run) -> Iterator[None]:
    """Around an evaluation: if it raises, save what was trained. A resumed run starts with this evaluation."""
    try:
        yield
    except Exception as error:
        state = run.state
        # Other ranks may wait elsewhere, and could not take part in a save.
        if run.process_group.is_single_process and state.saved_at != state.step:
            state.evaluation_failed_at = state.step
            _save(run, error)
        raise


def _save(run: Run, error: Exception) -> None:
    try:
        path = run.save()
    except Exception as other:
        logger.error("the evaluation failed, and so did saving what was trained: %s", other)
        return
    if path is not None:
        error.add_note(f"(the evaluation after step {run.state.step}; {path} has what was trained so far)")
