"""Live control: external requests (`trainformer ctl`), applied at step boundaries.

A server thread (`trainformer.live.server`) receives them and never touches training. The loop polls at every boundary;
requests are broadcast to all ranks and applied to the `Control` of each, so they take effect at that boundary. Clients
get their answer when the loop has done the work: on the event, at the next boundary, or at the end of the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from trainformer.checkpointing.checkpointer import Checkpointer
from trainformer.checkpointing.manifest import MANIFEST
from trainformer.context.jsonable import jsonable
from trainformer.engine import Event
from trainformer.live import address
from trainformer.live.runs import newest_checkpoint
from trainformer.live.server import NAME, ControlServer, Request, Ticket, apply
from trainformer.run.folder import NoFolder, RunFolder
from trainformer.utils.console import INTERRUPTIONS

if TYPE_CHECKING:
    from trainformer.run.run import Run

logger = logging.getLogger("trainformer")

_NOT_WRITTEN = "The checkpoint could not be written; the run's log.txt says why."


class LiveControl:
    """The live requests to one run. Per step only `waiting` is tested: some ten nanoseconds."""

    def __init__(self, run: Run) -> None:
        self.waiting = False  # a request has arrived or is in progress
        self._run = run
        self._incoming: SimpleQueue[Ticket] = SimpleQueue()
        self._taken: list[Ticket] = []  # received, not yet applied
        self._in_progress: list[Ticket] = []
        self._checkpointer: Checkpointer | None = None
        self._began = 0.0, 0
        self._planned: int | None = None

    @contextmanager
    def serving(
        self, folder: RunFolder | NoFolder, checkpointer: Checkpointer | None, outcome: Callable[[], str]
    ) -> Iterator[None]:
        """Serve requests, if there is a run folder to publish the address in. A run that cannot serve trains anyway."""
        if folder.path is None or not self._run.process_group.is_main:
            yield
            return
        self._checkpointer = checkpointer
        self._began, self._planned = (time.monotonic(), self._run.state.step), self._run.total_steps()
        try:
            listener, where = address.listen()
        except OSError as error:
            logger.warning("live control is off: no socket could be opened (%s)", error)
            yield
            return
        server = ControlServer(listener, where.token, self._receive, lambda: self._snapshot(folder))
        server.start()
        ended = "finished"
        try:
            try:
                address.publish(folder.path, where)
            except OSError as error:
                logger.warning("live control is off: %s", error)
            yield
            ended = outcome()
        except BaseException as error:
            interrupted = isinstance(error, INTERRUPTIONS)
            ended = "interrupted" if interrupted else f"failed: {type(error).__name__} {error}"
            raise
        finally:
            address.withdraw(folder.path, where)
            self._close(folder, ended)
            server.close(f"The run has ended ({ended}).")
            self._drain()  # late requests were refused; a second `fit()` must not apply them
            self.waiting = False

    def _receive(self, ticket: Ticket) -> None:
        """Called in the server thread. Put first, then set the flag: what is flagged is there."""
        self._incoming.put(ticket)
        self.waiting = True

    # -- at a step boundary --------------------------------------------------------------------------------

    def answer_finished(self) -> None:
        """Answer requests that are done."""
        if not self.waiting:
            return
        self._check_progress()
        # Tested after the flag is cleared, not before: the thread may just have put something in.
        self.waiting = False
        if self._in_progress or not self._incoming.empty():
            self.waiting = True

    def has_requests(self) -> bool:
        """Whether a request arrived since the last boundary."""
        return self.waiting and not self._incoming.empty()

    def take(self) -> list[Request]:
        """Requests since the last boundary. Only rank 0 receives any; they are broadcast."""
        self._taken = self._drain()
        return [ticket.request for ticket in self._taken]

    def apply_requests(self, requests: list[Request]) -> None:
        """Apply requests, on every rank; rank 0 answers the client when they are done."""
        possible = [request.verb != "eval" or self._run.val_source is not None for request in requests]
        for request, is_possible in zip(requests, possible, strict=True):
            if is_possible:
                apply(request, self._run.control)
        tickets, self._taken = self._taken, []
        self._track(tickets, possible[: len(tickets)])
        if self._in_progress:  # never cleared here: the thread may just have set it
            self.waiting = True

    def _drain(self) -> list[Ticket]:
        tickets = []
        while not self._incoming.empty():
            tickets.append(self._incoming.get_nowait())
        return tickets

    def _track(self, tickets: list[Ticket], possible: list[bool]) -> None:
        """Keep the tickets until their requests are done; some already are."""
        state = self._run.state
        for ticket, is_possible in zip(tickets, possible, strict=True):
            ticket.step = state.step
            if not is_possible:
                ticket.refuse("There is no validation data, so nothing can be evaluated. The run continues.")
                continue
            logger.info("%s at step %d: requested by %s", ticket.request.verb, state.step, ticket.request.by)
            self._in_progress.append(ticket)
            if ticket.request.verb == "eval" and state.evaluated_at == state.step:
                self._evaluated()
            elif state.saved_at == state.step:
                self._saved(self._path_of(state.step))
        bus = self._run.bus
        # Subscribe to saves and evaluations, on the first request only. Changing callbacks clears the bus.
        if self._in_progress and all(name != NAME for name, _ in bus.listeners(Event.SAVE)):
            bus.add(NAME, {Event.SAVE: self._saved, Event.EVAL_END: lambda metrics: self._evaluated()})

    # -- answers -------------------------------------------------------------------------------------------

    def _evaluated(self) -> None:
        """Answer evaluation requests. The evaluation is logged by now."""
        step = self._run.state.step
        for ticket in self._of("eval"):
            self._finish(ticket, step=step, metrics=jsonable(_evaluation(self._run.state.log_history, step)))

    def _saved(self, path: str) -> None:
        """A checkpoint was written, or is being written in the background."""
        place = Path(path).absolute()  # the client may have another working directory
        for ticket in self._of("save"):
            if ticket.path is None:
                ticket.path, ticket.failures = str(place), self._failures()
                # The loop may be in a long step when the file appears; the client need not wait for it.
                ticket.answer_when(place / MANIFEST, step=ticket.step, checkpoint=ticket.path)
        self._answer_saves()

    def _answer_saves(self) -> None:
        for ticket in self._of("save"):
            if ticket.path is not None and (Path(ticket.path) / MANIFEST).exists():
                self._finish(ticket, step=ticket.step, checkpoint=ticket.path)
            elif ticket.path is not None and self._failures() > ticket.failures:
                self._finish(ticket, error=_NOT_WRITTEN)

    def _check_progress(self) -> None:
        """At the next boundary everything is decided, except for a save in the background."""
        state = self._run.state
        for ticket in self._of("save"):
            if ticket.path is None:
                # No event: a callback was added or removed, which clears the bus, or the save failed.
                if state.saved_at >= ticket.step:
                    ticket.path = self._path_of(state.saved_at)
                else:
                    self._finish(ticket, error=_NOT_WRITTEN)
        self._answer_saves()
        for ticket in self._of("eval"):
            metrics = _evaluation(state.log_history, state.evaluated_at)
            self._finish(ticket, step=state.evaluated_at, metrics=jsonable(metrics))
        for ticket in self._of("stop", "abort"):
            if state.step > ticket.step and not self._run.control.should_stop:
                self._finish(ticket, error="A callback has cancelled it. The run continues.")

    def _close(self, folder: RunFolder, ended: str) -> None:
        """The run is over: answer everyone who still waits."""
        self._answer_saves()
        step, newest = self._run.state.step, newest_checkpoint(folder.path)
        where = {"step": step, "status": ended, "checkpoint": None if newest is None else str(newest.absolute())}
        for ticket in [*self._in_progress, *self._drain()]:
            verb = ticket.request.verb
            if verb in ("stop", "abort") and ticket.step == step and not ended.startswith("failed"):
                ticket.answer(**where)
            else:
                ticket.refuse(f"The run has ended at step {step} ({ended}) before this could be done.")
        self._in_progress.clear()

    def _path_of(self, step: int) -> str:
        assert self._checkpointer is not None
        return str(self._checkpointer.store.path_of(step).absolute())

    def _failures(self) -> int:
        return 0 if self._checkpointer is None else self._checkpointer.failures

    def _of(self, *verbs: str) -> list[Ticket]:
        return [ticket for ticket in self._in_progress if ticket.request.verb in verbs]

    def _finish(self, ticket: Ticket, error: str | None = None, **values: Any) -> None:
        self._in_progress.remove(ticket)
        if error is None:
            ticket.answer(**values)
        else:
            ticket.refuse(error)

    # -- in the server thread ------------------------------------------------------------------------

    def _snapshot(self, folder: RunFolder) -> dict[str, Any]:
        """The status of the run. Read without locks: each value is right, two may be of neighbouring steps."""
        state, (began, first) = self._run.state, self._began
        step, planned = state.step, self._planned
        seconds = time.monotonic() - began
        rate = (step - first) / seconds if seconds > 0 and step > first else None
        newest = newest_checkpoint(folder.path)
        recent = state.log_history[-100:]
        status: dict[str, Any] = jsonable(
            {
                "status": "running",
                "step": step,
                "planned_steps": planned,
                "epoch": state.epoch,
                "metrics": next((record for record in reversed(recent) if "train/loss" in record), {}),
                # The latest value of each metric: validation sets may be evaluated at different steps.
                "evaluation": {k: v for record in recent if "train/loss" not in record for k, v in record.items()},
                "best": dict(state.best_metrics),
                "best_step": state.best_step if state.best_step >= 0 else None,
                "steps_per_second": rate,
                "eta_seconds": None if rate is None or planned is None else max(0, planned - step) / rate,
                "checkpoints": str(folder.checkpoints.absolute()),
                "checkpoint": None if newest is None else str(newest.absolute()),
            }
        )
        return status


def _evaluation(history: list[dict[str, float]], step: int) -> dict[str, float]:
    """The record of the evaluation at a step."""
    for record in reversed(history):
        if record["step"] == step and "train/loss" not in record:
            return {name: value for name, value in record.items() if name not in ("step", "epoch")}
        if record["step"] < step:
            break
    return {}
