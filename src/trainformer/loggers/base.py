"""What a logger is, and the logger that does nothing.

Owns the interface. When to log is the engine's business (at log points only), and so is where: only one process
of a run logs, so a logger may assume that nobody else writes to the same place.
"""

# ruff: noqa: B027 - empty methods without @abstractmethod are meant: doing nothing is the default.

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from trainformer.core.errors import TrainformerError

Handle = TypeVar("Handle")


class LoggerError(TrainformerError, RuntimeError):
    """A logger was used out of order, or cannot be set up as asked."""


class BaseLogger(ABC):
    """Where the numbers of a run go. To write one's own, `init`, `log` and `finish` are enough.

    The calls come in this order; those in brackets only when a run is resumed::

        [load_state_dict(state)]  [continue_from(step)]  init(config)
        log(metrics, step) ... log_text(key, text, step) ... flush() ... state_dict() ...
        finish(status)

    After `finish` a logger may be started again with `init`; that is then a new run.

    >>> class Printer(BaseLogger):
    ...     def init(self, config: dict[str, Any]) -> None:
    ...         print("start", config)
    ...
    ...     def log(self, metrics: dict[str, float], step: int) -> None:
    ...         print(step, metrics)
    ...
    ...     def finish(self, status: str = "finished") -> None:
    ...         print(status)
    >>> Printer().log({"train/loss": 0.5}, step=10)
    10 {'train/loss': 0.5}
    """

    #: Whether the numbers leave this machine. In a `MultiLogger`, an error while logging to a remote place is a
    #: warning; an error of any other logger (a full disk, a bug) stops the run.
    remote: ClassVar[bool] = False

    @abstractmethod
    def init(self, config: dict[str, Any]) -> None:
        """Start logging. `config` is the configuration of the run, possibly nested."""

    @abstractmethod
    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log numbers at an optimizer step. Names have a prefix: ``train/loss``, ``val/accuracy``."""

    @abstractmethod
    def finish(self, status: str = "finished") -> None:
        """End logging. May be called more than once, and without `init`.

        `status` is ``"finished"``, ``"stopped"`` (early, but on purpose), ``"interrupted"`` (Ctrl-C, a signal) or
        ``"failed"``; any other word counts as failed.
        """

    def log_text(self, key: str, text: str, step: int) -> None:
        """Log a text, such as a generated sample. A logger that has no place for texts leaves them out."""

    def continue_from(self, step: int) -> None:
        """Say before `init` that the run goes on from `step`: what was logged after it must not appear twice."""

    def flush(self) -> None:
        """Bring what was logged so far to where it outlives this process. May be called at any time.

        It is called before a checkpoint is saved, since what was logged before one is not logged again after a crash.
        """

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on in the same place after a restart, such as a run id. Must be JSON-able."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, before `init`."""

    def _started(self, handle: Handle | None) -> Handle:
        """The handle that `init` made, or an error that says it was not called."""
        if handle is None:
            name = type(self).__name__
            raise LoggerError(
                f"Expected {name}.init(config) before anything is logged, received a call on a logger that was not "
                f"started or is already finished. Call {name}.init({{}}) first."
            )
        return handle


class NoOpLogger(BaseLogger):
    """Logs nothing, so that nobody has to ask whether there is a logger.

    >>> NoOpLogger().log({"train/loss": 0.5}, step=1)
    """

    def init(self, config: dict[str, Any]) -> None:
        pass

    def log(self, metrics: dict[str, float], step: int) -> None:
        pass

    def finish(self, status: str = "finished") -> None:
        pass
