"""What the settings of a run say to its loop and to its checkpoint store."""

from __future__ import annotations

from trainformer.engine import Cadence, Plan
from trainformer.engine.checkpoint import Retention
from trainformer.session.settings import CommonSettings


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
