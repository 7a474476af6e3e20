"""What can be asked of a running job, and what that means for its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainformer.engine import Control

#: Carried out by the loop, at a step boundary.
VERBS = ("save", "stop", "abort", "eval")
#: Answered at once, by the thread that listens.
STATUS = "status"
#: How the one who asks is called where somebody must be named.
NAME = "trainformer ctl"


@dataclass(frozen=True, slots=True)
class Request:
    """Plain values, so that it can be sent to other processes. `by` says who asked."""

    verb: str
    by: str


@dataclass(slots=True, eq=False)
class Ticket:
    """A request and the way back to whoever waits for its answer. Stays in the process that listens.

    `resolve` sends an answer, `resolve_when` as soon as a file is there; the first answer counts. `step` is that of the
    boundary at which the request was applied, `path` where its checkpoint is being written, and `failures` how many
    saves had failed by then.
    """

    request: Request
    resolve: Callable[[dict[str, Any]], None]
    resolve_when: Callable[[Path, dict[str, Any]], None]
    step: int = -1
    path: str | None = None
    failures: int = 0

    def answer(self, **values: Any) -> None:
        """It was done."""
        self.resolve({"ok": True, **values})

    def answer_when(self, file: Path, **values: Any) -> None:
        """It is done once a file is there, which somebody else is writing."""
        self.resolve_when(file, {"ok": True, **values})

    def refuse(self, error: str) -> None:
        """It could not be done."""
        self.resolve({"ok": False, "error": error})


def apply(request: Request, control: Control) -> None:
    """Enter a request into the control, for the boundary that the loop is at.

    >>> control = Control()
    >>> apply(Request("stop", "ann@desk (pid 7)"), control)
    >>> control.should_save, control.stopped_by, control.stop_reason
    (True, 'trainformer ctl', 'asked by ann@desk (pid 7)')
    """
    reason = f"asked by {request.by}"
    if request.verb == "eval":
        control.should_evaluate = True
    elif request.verb == "save":
        control.should_save = True
    elif request.verb == "stop":
        control.should_save = True
        control.stop(reason, by=NAME)
    else:
        assert request.verb == "abort", request.verb
        control.abort(reason, by=NAME)
