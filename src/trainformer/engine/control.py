"""Requests to the loop: log, evaluate, save, end the epoch, stop; and who made them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Control:
    """Requests to the loop. It acts on them at the next step boundary and clears them.

    What the plan makes due after a step is set here before `STEP_END` is emitted, so a callback can see what is about
    to happen and cancel it.

    >>> control = Control()
    >>> control.stop("validation loss has not improved for 3 evaluations", by="EarlyStopping")
    >>> control.should_stop, control.stopped_by
    (True, 'EarlyStopping')
    """

    should_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    due_sets: tuple[str, ...] = ()  # validation sets whose own cadence made the evaluation due; empty: all of them
    should_save: bool = False
    should_end_epoch: bool = False
    aborted: bool = False  # stop at once: no final log, evaluation or checkpoint
    stopped_by: str | None = None
    stop_reason: str | None = None
    signal: int | None = None  # the signal that ends the run
    pending_signal: int | None = None  # set by the signal handler, which does nothing else
    pending_save: bool = False  # likewise

    @property
    def ending_signal(self) -> int | None:
        """The signal that ends the run, whether the loop has acted on it yet or not."""
        return self.pending_signal if self.signal is None else self.signal

    def stop(self, reason: str, by: str) -> None:
        """Stop training after this step. The first caller is the one that is reported."""
        if not self.should_stop:
            self.should_stop, self.stop_reason, self.stopped_by = True, reason, by

    def abort(self, reason: str, by: str) -> None:
        """Stop training after this step and discard everything since the last checkpoint."""
        self.aborted = True
        self.stop(reason, by)

    def cancel_stop(self) -> None:
        """Withdraw a request to stop."""
        self.should_stop = self.aborted = False
        self.stopped_by = self.stop_reason = None

    def request(self, what: str) -> None:
        """Set a flag; ``should_evaluate/NAME`` requests the evaluation of one validation set."""
        flag, _, name = what.partition("/")
        if name and (self.due_sets or not self.should_evaluate) and name not in self.due_sets:
            self.due_sets = (*self.due_sets, name)
        setattr(self, flag, True)

    def reset(self) -> None:
        """Clear every request. Called when `fit()` starts, so that a second call does not stop at once."""
        for field in fields(self):
            setattr(self, field.name, field.default)
