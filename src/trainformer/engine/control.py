"""What callbacks ask of the loop, and who asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Control:
    """Requests to the loop. They are honoured at the next step boundary and then cleared.

    What the plan makes due after a step is entered here before `STEP_END` is told, so that whoever hears of the step
    can see what is about to happen, and call it off.

    >>> control = Control()
    >>> control.stop("validation loss has not improved for 3 evaluations", by="EarlyStopping")
    >>> control.should_stop, control.stopped_by
    (True, 'EarlyStopping')
    """

    should_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    should_end_epoch: bool = False
    aborted: bool = False  # stop at once: nothing is logged, evaluated or saved any more
    stopped_by: str | None = None
    stop_reason: str | None = None
    signal: int | None = None  # the signal that ends the run
    noted_signal: int | None = None  # set by a signal handler, which does nothing else; obeyed at the next boundary
    noted_save: bool = False  # likewise

    @property
    def ending_signal(self) -> int | None:
        """The signal that ends the run, obeyed or only noted."""
        return self.noted_signal if self.signal is None else self.signal

    def stop(self, reason: str, by: str) -> None:
        """End training after this step. The first to ask is the one who is named."""
        if not self.should_stop:
            self.should_stop, self.stop_reason, self.stopped_by = True, reason, by

    def abort(self, reason: str, by: str) -> None:
        """End training after this step and keep nothing since the last checkpoint."""
        self.aborted = True
        self.stop(reason, by)

    def call_off_stop(self) -> None:
        """Go on after all."""
        self.should_stop = self.aborted = False
        self.stopped_by = self.stop_reason = None

    def reset(self) -> None:
        """Forget every request. Done when a run begins, so that a second `fit()` does not end at once."""
        self.should_stop = self.should_log = self.should_evaluate = self.should_save = False
        self.should_end_epoch = self.aborted = False
        self.stopped_by = self.stop_reason = self.signal = self.noted_signal = None
        self.noted_save = False
