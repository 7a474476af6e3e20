"""What the settings of a run say to its loop and to its checkpoint store."""

from __future__ import annotations

from trainformer.checkpointing import Retention
from trainformer.engine import Cadence, Control, Plan, RunState
from trainformer.run.settings import CommonSettings


def plan(settings: CommonSettings, evaluates: bool) -> Plan:
    """To the loop: how long it goes on, and what it does when. Without validation data nothing is evaluated."""
    s = settings
    return Plan(
        max_steps=s.max_steps,
        epochs=None if s.max_steps is not None else s.epochs,
        accumulation=s.accumulation_steps,
        log_every=Cadence.parse(s.log_every, "steps", "log_every"),
        eval_every=Cadence.parse(s.eval_every, "epochs", "eval_every") if evaluates else None,
        save_every=Cadence.parse(s.save_every, s.save_strategy, "save_every"),
        eval_on_save=s.eval_on_save and evaluates,
        eval_at_end=evaluates and s.eval_every is not None,
        monitor=s.monitor_metric,
        monitor_mode=s.monitor_mode,
    )


def retention(settings: CommonSettings) -> Retention:
    """To the checkpoint store: what it keeps."""
    return Retention(
        last=settings.save_last,
        best=settings.save_best,
        every=settings.keep_every,
        monitor=settings.monitor_metric,
        mode=settings.monitor_mode,
    )


def why_saved(plan: Plan, state: RunState, control: Control, is_best: bool) -> str:
    """Why a checkpoint is written at the step where the run is. Of several reasons, the one that would not recur."""
    if control.ending_signal is not None:
        return "signal"
    if is_best:
        return "best"
    if control.should_stop:
        return "stopped"
    limits = (state.step, plan.max_steps), (state.epoch, plan.epochs)
    if any(limit is not None and done >= limit for done, limit in limits):
        return "end"
    cadence = plan.save_every
    if cadence is None:
        return "asked for"
    at_epoch = state.batch == 0 and cadence.due_at_epoch(state.epoch)
    # When minutes are over is known to the loop alone.
    return "due" if at_epoch or cadence.due_at_step(state.step) or cadence.unit == "seconds" else "asked for"
