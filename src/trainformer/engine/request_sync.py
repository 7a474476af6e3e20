"""Requests to a run, synchronised over ranks so that every rank acts on the same ones at the same step.

Three kinds reach the loop. What the plan makes due by steps and epochs is the same on every rank and needs no
communication. External requests (a signal, `trainformer ctl`, a wall-clock cadence) reach one rank: a flag that it has
one travels with the gradients (`Backend.any_rank_has_request`), and only when it is set do ranks gather the requests.
Requests of callbacks may differ between ranks: they are all-reduced after events that some callback handles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainformer.engine.control import Control
from trainformer.engine.process_group import ProcessGroup
from trainformer.engine.protocols import Backend, Services


@dataclass
class ExternalRequests:
    """Requests of one rank that come neither from the plan nor from a callback."""

    signal: int | None = None
    save: bool = False
    due: list[str] = field(default_factory=list)  # control flags set by rank 0's clock
    live: list[Any] = field(default_factory=list)
    callbacks_may_request: bool = False  # whether a callback that handles step events may request something


def merge(requests: list[ExternalRequests]) -> ExternalRequests:
    """The union of the requests of all ranks; of several signals the first."""
    signals = [one.signal for one in requests if one.signal is not None]
    return ExternalRequests(
        signal=signals[0] if signals else None,
        save=any(one.save for one in requests),
        due=[name for one in requests for name in one.due],
        live=[request for one in requests for request in one.live],
        callbacks_may_request=any(one.callbacks_may_request for one in requests),
    )


_FLAGS = ("should_log", "should_evaluate", "should_save", "should_end_epoch", "should_stop", "aborted")


class RequestSync:
    """Moves requests into the `Control` of every rank. With one process nothing is communicated."""

    def __init__(self, control: Control, process_group: ProcessGroup, backend: Backend, services: Services) -> None:
        self._control = control
        self._process_group = process_group
        self._backend = backend
        self._services = services
        self._is_single_process = process_group.is_single_process
        self._overdue: list[str] = []
        self._any_callback_may_request = False  # on any rank
        self._callbacks_may_request: Callable[[], bool] = lambda: False

    def begin(self, callbacks_may_request: Callable[[], bool]) -> None:
        """Before the first step. `callbacks_may_request`: does a callback of this rank handle step events?"""
        self._callbacks_may_request = callbacks_may_request
        self._any_callback_may_request = self._process_group.any_rank([callbacks_may_request()])[0]

    def note_overdue(self, flag: str) -> None:
        """A wall-clock cadence is due. Clocks differ, so rank 0 decides."""
        if self._process_group.is_main and flag not in self._overdue:
            self._overdue.append(flag)

    def has_requests(self) -> bool:
        """Whether this rank has a request that the other ranks do not know of."""
        control = self._control
        pending = control.pending_signal is not None or control.pending_save
        if pending or self._overdue or self._services.has_requests():
            return True
        # A callback may be added during the run, and on one rank only.
        return not self._is_single_process and not self._any_callback_may_request and self._callbacks_may_request()

    def poll_requests(self) -> None:
        """At a step boundary: move external requests of any rank into the control of all of them."""
        if self._is_single_process:
            if self.has_requests():
                self._apply(self._take_external())
            return
        if self._backend.any_rank_has_request():
            external = merge(self._process_group.all_gather_object(self._take_external()))
            self._any_callback_may_request |= external.callbacks_may_request
            self._apply(external)
        if self._any_callback_may_request:
            self.sync_requests()

    def drain(self) -> None:
        """After the last step, whose gradients could only carry what was requested before it."""
        self._apply(merge(self._process_group.all_gather_object(self._take_external())))

    def sync_requests(self) -> None:
        """All-reduce the requests of callbacks: what one rank requests, all ranks do."""
        control, process_group = self._control, self._process_group
        if self._is_single_process:
            return
        wanted = dict(zip(_FLAGS, process_group.any_rank([getattr(control, name) for name in _FLAGS]), strict=True))
        if wanted.pop("should_stop"):
            stops = process_group.all_gather_object(
                (control.stopped_by, control.stop_reason) if control.should_stop else None
            )
            rank, (by, reason) = next((rank, stop) for rank, stop in enumerate(stops) if stop is not None)
            control.stop(str(reason), by=f"{by} (on rank {rank})")  # no effect where it was stopped already
        for name, value in wanted.items():
            setattr(control, name, value)

    def _take_external(self) -> ExternalRequests:
        """The external requests of this rank, which are then cleared."""
        control = self._control
        live = self._services.take_requests() if self._services.has_requests() else []
        found = ExternalRequests(
            control.pending_signal, control.pending_save, self._overdue, live, self._callbacks_may_request()
        )
        control.pending_signal, control.pending_save, self._overdue = None, False, []
        return found

    def _apply(self, external: ExternalRequests) -> None:
        control = self._control
        if external.signal is not None and control.signal is None:
            control.signal = external.signal
        control.should_save |= external.save
        for what in external.due:
            control.request(what)
        if external.live:
            self._services.apply_requests(external.live)
