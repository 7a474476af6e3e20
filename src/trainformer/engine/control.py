"""What callbacks ask of the loop, and who asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Control:
    """Requests to the loop. They are honoured at the next step boundary and then cleared.

    >>> control = Control()
    >>> control.stop("validation loss has not improved for 3 evaluations", by="EarlyStopping")
    >>> control.should_stop, control.stopped_by
    (True, 'EarlyStopping')
    """

    should_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    stopped_by: str | None = None
    stop_reason: str | None = None
    signal: int | None = None  # set by a signal handler, which does nothing else

    def stop(self, reason: str, by: str) -> None:
        """End training after this step. The first to ask is the one who is named."""
        if not self.should_stop:
            self.should_stop, self.stop_reason, self.stopped_by = True, reason, by

    def reset(self) -> None:
        """Forget every request. Done when a run begins, so that a second `fit()` does not end at once."""
        self.should_stop = self.should_log = self.should_evaluate = self.should_save = False
        self.stopped_by = self.stop_reason = self.signal = None
