"""Several loggers as one. Owns what happens when one of them fails while the others are fine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.loggers.base import BaseLogger


class MultiLogger(BaseLogger):
    """Passes every call on to each logger, in the order given.

    Errors in `init` are raised: nothing is lost yet, and a run that silently logs nowhere helps nobody. Later on, an
    error of a remote logger (a network that is down for a minute) must not end a training run: it is warned about
    once and counted in `failures`. Errors of local loggers are raised.

    >>> from trainformer.loggers import NoOpLogger
    >>> logger = MultiLogger([NoOpLogger(), NoOpLogger()])
    >>> logger.init({"lr": 0.1})
    >>> logger.log({"train/loss": 0.5}, step=1)
    >>> logger.state_dict(), logger.failures
    ({}, {})
    """

    def __init__(self, loggers: Sequence[BaseLogger]) -> None:
        for logger in loggers:
            if not isinstance(logger, BaseLogger):
                raise BadArgument(expected("loggers to be BaseLogger instances", logger))
        self.loggers = list(loggers)
        self.failures: dict[str, int] = {}
        self._running = False
        self._by_key = dict(zip(_unique_keys(self.loggers), self.loggers, strict=True))

    def init(self, config: dict[str, Any]) -> None:
        self.failures = {}
        try:
            for logger in self.loggers:
                logger.init(config)
        except BaseException:
            self._finish_all("failed")  # a logger that was not started does not mind
            raise
        self._running = True

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._each("log", lambda logger: logger.log(metrics, step))

    def log_text(self, key: str, text: str, step: int) -> None:
        self._each("log_text", lambda logger: logger.log_text(key, text, step))

    def flush(self) -> None:
        if self._running:
            self._each("flush", lambda logger: logger.flush())

    def finish(self, status: str = "finished") -> None:
        """Finish every logger, also after one failed; then raise the first error of a local one."""
        running, self._running = self._running, False
        error = self._finish_all(status)
        for key, count in self.failures.items():
            if running and count > 1:
                warnings.warn(f"{key}: {count} calls failed during the run.", RuntimeWarning, stacklevel=2)
        if error is not None:
            raise error

    def continue_from(self, step: int) -> None:
        for logger in self.loggers:
            logger.continue_from(step)

    def state_dict(self) -> dict[str, Any]:
        states = {key: logger.state_dict() for key, logger in self._by_key.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A logger that was added since the state was saved has none, and starts afresh.
        for key, logger in self._by_key.items():
            if key in state:
                logger.load_state_dict(state[key])

    def _finish_all(self, status: str) -> Exception | None:
        first: Exception | None = None
        for key, logger in self._by_key.items():
            try:
                self._guarded(key, logger, "finish", lambda logger: logger.finish(status))
            except Exception as error:
                first = first or error
        return first

    def _each(self, what: str, call: Callable[[BaseLogger], None]) -> None:
        self._started(self._running or None)
        for key, logger in self._by_key.items():
            self._guarded(key, logger, what, call)

    def _guarded(self, key: str, logger: BaseLogger, what: str, call: Callable[[BaseLogger], None]) -> None:
        try:
            call(logger)
        except Exception as error:
            if not logger.remote:
                raise
            self.failures[key] = self.failures.get(key, 0) + 1
            if self.failures[key] == 1:
                warnings.warn(
                    f"{key}.{what} failed: {type(error).__name__}: {error}. Training goes on; further failures of this "
                    "logger are counted, not shown. Nothing is lost in metrics.jsonl.",
                    RuntimeWarning,
                    stacklevel=4,
                )


def _unique_keys(loggers: Sequence[BaseLogger]) -> list[str]:
    """A stable name for each: the class, with a number from the second of a class on."""
    keys: list[str] = []
    for logger in loggers:
        name = type(logger).__name__
        seen = sum(key.partition("#")[0] == name for key in keys)
        keys.append(f"{name}#{seen + 1}" if seen else name)
    return keys
