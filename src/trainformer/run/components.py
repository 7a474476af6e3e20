"""The state that every run has, whatever computes it: progress, context and loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainformer.checkpointing import StateComponent, StatefulAdapter

if TYPE_CHECKING:
    from trainformer.run.run import Run


def common_components(run: Run) -> list[StateComponent]:
    """Progress, context and loggers."""

    def load_loggers(state: dict[str, Any]) -> None:
        run.logger_state = state  # kept for loggers that do not exist yet
        run.loggers.load_state_dict(state)

    context = StatefulAdapter(run.context.state_dict, run.context.load_state_dict)
    loggers = StatefulAdapter(lambda: run.loggers.state_dict(), load_loggers)
    return [
        StateComponent("run", StatefulAdapter(lambda: _progress(run), run.state.load_state_dict), format="json"),
        StateComponent("context", context, required=False),
        StateComponent("loggers", loggers, required=False, format="json"),
    ]


def _progress(run: Run) -> dict[str, Any]:
    """The run state, with the values of the next log record."""
    pending = run.loop.pending_values() if run.loop is not None else []
    control = run.control
    # A signal ends the process; a callback stops the run, also for the next process with the same command.
    is_stopped = control.should_stop and control.signal is None
    stopped = [control.stopped_by, control.stop_reason] if is_stopped else []
    return {**run.state.state_dict(), "pending": pending, "stopped": stopped}
