"""Who hears of a run's events, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainformer.callbacks.base import handlers_of
from trainformer.engine import Event

if TYPE_CHECKING:
    from trainformer.run.run import Run


def connect_listeners(run: Run) -> None:
    """Subscribe everybody anew: what is trained first, then the callbacks in their order, then records and context."""
    bus, context = run.bus, run.context
    bus.clear()
    bus.add(run.title, run.own_listeners(), makes_requests=False)
    for name, callback in run.callbacks.named().items():
        bus.add(name, handlers_of(callback, run.owner), makes_requests=getattr(callback, "sets_control", True))
    bus.add("records", run.records.listeners(), makes_requests=False)
    bus.add(
        "context",
        {
            Event.STEP_END: lambda step, loss: context.on_step_end(),
            Event.EPOCH_END: lambda epoch, metrics: context.on_epoch_end(),
        },
        makes_requests=False,
    )
