"""Events of a run, and the bus that delivers them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Handler = Callable[..., None]


class Event(enum.Enum):
    """What happens in a run, in this order (arguments in brackets)::

    TRAIN_BEGIN
    for each epoch:
        EPOCH_BEGIN (epoch)                also when a run resumes in the middle of an epoch
        for each optimizer step:
            STEP_BEGIN (step)              steps done before this one
            for each micro-batch:          with several optimizers: these three once for each update
                SUBSTEP_END (step)         gradients of one micro-batch were accumulated
            BEFORE_OPTIMIZER_STEP (step)   gradients are complete and clipped, weights are still the old ones
            AFTER_OPTIMIZER_STEP (step)    weights are new, gradients are still there
            STEP_END (step, loss)          steps done including this one; the loss syncs only when read; what is due
                                           now is set in the control, and can be cancelled there
            LOG (metrics)                  at log points, before the record is written: listeners may add to it
            EVAL_BEGIN, EVAL_END (metrics) when an evaluation is due
            EPOCH_END (epoch, metrics)     after the last step of an epoch that was completed
            SAVE (path)                    when a checkpoint was written; it includes the effects of all of the above
    LOG, EVAL_BEGIN, EVAL_END, SAVE        final log, evaluation and checkpoint
    TRAIN_END
    ERROR (exception)                      instead of TRAIN_END, when the run fails
    """

    TRAIN_BEGIN = "train_begin"
    EPOCH_BEGIN = "epoch_begin"
    STEP_BEGIN = "step_begin"
    SUBSTEP_END = "substep_end"
    BEFORE_OPTIMIZER_STEP = "before_optimizer_step"
    AFTER_OPTIMIZER_STEP = "after_optimizer_step"
    STEP_END = "step_end"
    LOG = "log"
    EVAL_BEGIN = "eval_begin"
    EVAL_END = "eval_end"
    SAVE = "save"
    EPOCH_END = "epoch_end"
    TRAIN_END = "train_end"
    ERROR = "error"


#: Events of every step.
STEP_EVENTS = (
    Event.STEP_BEGIN,
    Event.SUBSTEP_END,
    Event.BEFORE_OPTIMIZER_STEP,
    Event.AFTER_OPTIMIZER_STEP,
    Event.STEP_END,
)


class EventBus:
    """Delivers events to listeners in the order in which they were added.

    Handlers are stored per event, so an event without listeners costs one truth test of an empty list.

    >>> bus = EventBus()
    >>> bus.add("printer", {Event.STEP_END: lambda step, loss: print(step, loss)})
    >>> bus.emit(Event.STEP_END, 1, 0.5)
    1 0.5
    >>> bus.emit(Event.EPOCH_END, 0, {})
    """

    def __init__(self) -> None:
        self._handlers: dict[Event, list[tuple[str, Handler]]] = {event: [] for event in Event}
        self._requesting: set[Event] = set()
        self.current_listener: str | None = None

    def add(self, name: str, handlers: Mapping[Event, Handler], makes_requests: bool = True) -> None:
        """Add a listener. `name` identifies it in logs (who stopped the run, who raised).

        `makes_requests=False` promises that it never sets a flag of the control: ranks then skip the all-reduce of
        requests.
        """
        for event, handler in handlers.items():
            self._handlers[event].append((name, handler))
        if makes_requests:
            self._requesting |= set(handlers)

    def clear(self) -> None:
        """Remove all listeners. An event that is being delivered still reaches every listener it was emitted to."""
        self._handlers = {event: [] for event in Event}
        self._requesting = set()

    def may_request(self, events: Iterable[Event]) -> bool:
        """Whether a listener of one of these events may request something of the loop."""
        return not self._requesting.isdisjoint(events)

    def listeners(self, event: Event) -> list[tuple[str, Handler]]:
        """The listeners of an event (the list itself): the loop tests it before it prepares arguments."""
        return self._handlers[event]

    def emit(self, event: Event, *args: Any) -> None:
        """Call every listener. An exception names its listener and stops the run."""
        for name, handler in self._handlers[event]:
            self.current_listener = name
            try:
                handler(*args)
            except Exception as error:
                error.add_note(f"(raised by {name}, which handled the event {event.value})")
                raise
            finally:
                self.current_listener = None
