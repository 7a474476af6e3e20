"""Requests to a run, made the same on all ranks.

Three kinds reach a loop. What the plan makes due by steps and epochs is the same on every rank and needs no agreement.
What comes from outside (a signal, `trainformer ctl`, the clock) reaches one rank: that it asks travels with a step's
gradients (`Backend.others_ask`), and only then do ranks tell each other what it was. What callbacks ask for may differ
from rank to rank: after events that some callback hears, ranks compare their requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainformer.engine.control import Control
from trainformer.engine.process_group import ProcessGroup
from trainformer.engine.protocols import Backend, Services


@dataclass
class Outside:
    """Requests of one rank that did not come from the plan or from a callback."""

    signal: int | None = None
    save: bool = False
    due: list[str] = field(default_factory=list)  # flags of the control that the clock of rank 0 sets
    live: list[Any] = field(default_factory=list)
    callbacks_ask: bool = False  # whether a callback that hears of steps may ask for something


def merged(all_of_them: list[Outside]) -> Outside:
    """What all ranks were asked for, together."""
    signals = [one.signal for one in all_of_them if one.signal is not None]
    return Outside(
        signal=signals[0] if signals else None,
        save=any(one.save for one in all_of_them),
        due=[name for one in all_of_them for name in one.due],
        live=[request for one in all_of_them for request in one.live],
        callbacks_ask=any(one.callbacks_ask for one in all_of_them),
    )


_FLAGS = ("should_log", "should_evaluate", "should_save", "should_end_epoch", "should_stop", "aborted")


class Agreement:
    """What is asked of a run, on its way to the control. One process alone asks nobody."""

    def __init__(self, control: Control, process_group: ProcessGroup, backend: Backend, services: Services) -> None:
        self._control = control
        self._peers = process_group
        self._backend = backend
        self._services = services
        self._is_alone = process_group.is_single_process
        self._overdue: list[str] = []
        self._callbacks_ask = False  # on any rank
        self._may_ask: Callable[[], bool] = lambda: False

    def begin(self, may_ask: Callable[[], bool]) -> None:
        """Before the first step. `may_ask`: does a callback of this rank hear of steps, and could ask for something?"""
        self._may_ask = may_ask
        self._callbacks_ask = self._peers.any_rank([may_ask()])[0]

    def note_overdue(self, name: str) -> None:
        """Something is due by the clock. Clocks differ: that of rank 0 counts."""
        if self._peers.is_main and name not in self._overdue:
            self._overdue.append(name)

    def has_requests(self) -> bool:
        """Whether this rank was asked for something that the others do not know of."""
        control = self._control
        noted = control.noted_signal is not None or control.noted_save
        if noted or self._overdue or self._services.has_requests():
            return True
        # A callback may be added while the run goes on, and on one rank only.
        return not self._is_alone and not self._callbacks_ask and self._may_ask()

    def hear(self) -> None:
        """At a step boundary: enter into the control what was asked for from outside, and on other ranks."""
        if self._is_alone:
            if self.has_requests():
                self._obey(self._outside())
            return
        if self._backend.others_ask():
            outside = merged(self._peers.all_gather_object(self._outside()))
            self._callbacks_ask |= outside.callbacks_ask
            self._obey(outside)
        if self._callbacks_ask:
            self.settle()

    def conclude(self) -> None:
        """After the last step, whose gradients carried no more than what was known by then."""
        self._obey(merged(self._peers.all_gather_object(self._outside())))

    def settle(self) -> None:
        """Make the requests of callbacks those of all ranks: what one of them asks for, all of them do."""
        control, process_group = self._control, self._peers
        if self._is_alone:
            return
        wanted = dict(zip(_FLAGS, process_group.any_rank([getattr(control, name) for name in _FLAGS]), strict=True))
        if wanted.pop("should_stop"):
            told = process_group.all_gather_object(
                (control.stopped_by, control.stop_reason) if control.should_stop else None
            )
            rank, (by, reason) = next((rank, words) for rank, words in enumerate(told) if words is not None)
            control.stop(str(reason), by=f"{by} (on rank {rank})")  # has no effect where it stops already
        for name, value in wanted.items():
            setattr(control, name, value)

    def _outside(self) -> Outside:
        """What this rank was asked for; asked again, it is nothing."""
        control = self._control
        live = self._services.take_requests() if self._services.has_requests() else []
        found = Outside(control.noted_signal, control.noted_save, self._overdue, live, self._may_ask())
        control.noted_signal, control.noted_save, self._overdue = None, False, []
        return found

    def _obey(self, outside: Outside) -> None:
        control = self._control
        if outside.signal is not None and control.signal is None:
            control.signal = outside.signal
        control.should_save |= outside.save
        for name in outside.due:
            setattr(control, name, True)
        if outside.live:
            self._services.carry_out(outside.live)
