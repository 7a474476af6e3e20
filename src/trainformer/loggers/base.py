"""The logger interface, `NoOpLogger`, `MultiLogger`, and the conversion of metrics to plain numbers.

The engine decides when to log (at log points only) and which process logs (one per run), so a logger may assume that
nobody else writes to the same place.
"""

# ruff: noqa: B027 - empty methods without @abstractmethod are intended: doing nothing is the default.

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.core.secrets import mask, mask_text

Handle = TypeVar("Handle")
Scalar = bool | int | float | str | None


class LoggerError(TrainformerError, RuntimeError):
    """A logger was used out of order, or cannot be set up as requested."""


class BaseLogger(ABC):
    """Base class of all loggers. A custom logger needs `init`, `log` and `finish`.

    The engine calls the methods in this order; those in brackets only when a run is resumed::

        [load_state_dict(state)]  [continue_from(step)]  init(config)
        log(metrics, step) ... log_text(key, text, step) ... flush() ... state_dict() ...
        finish(status)

    After `finish`, `init` may be called again; that starts a new run.

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

    #: Whether metrics leave this machine. In a `MultiLogger`, an error of a remote logger is a warning; an error of a
    #: local one (a full disk, a bug) stops the run.
    remote: ClassVar[bool] = False

    @abstractmethod
    def init(self, config: dict[str, Any]) -> None:
        """Start logging. `config` is the configuration of the run, possibly nested."""

    @abstractmethod
    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics at an optimizer step. Names have a prefix: ``train/loss``, ``val/accuracy``."""

    @abstractmethod
    def finish(self, status: str = "finished") -> None:
        """Stop logging. May be called more than once, and without `init`.

        `status` is ``"finished"``, ``"stopped"`` (early stopping), ``"interrupted"`` (Ctrl-C, a signal) or
        ``"failed"``; any other word counts as failed.
        """

    def log_text(self, key: str, text: str, step: int) -> None:
        """Log a text, such as a generated sample. Ignored by loggers that cannot show texts."""

    def continue_from(self, step: int) -> None:
        """Called before `init` when a run resumes from `step`: what was logged after it must not appear twice."""

    def flush(self) -> None:
        """Write buffered metrics to durable storage. May be called at any time.

        The engine calls it before each checkpoint: what was logged before a checkpoint is not logged again after a
        crash.
        """

    def state_dict(self) -> dict[str, Any]:
        """What is needed to resume logging to the same run, such as a run id. Must be JSON-serializable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called before `init`."""

    def _started(self, handle: Handle | None) -> Handle:
        """The handle that `init` opened; an error if `init` was not called."""
        if handle is None:
            name = type(self).__name__
            raise LoggerError(
                f"Expected {name}.init(config) before anything is logged, received a call on a logger that was not "
                f"started or is already finished. Call {name}.init({{}}) first."
            )
        return handle


class NoOpLogger(BaseLogger):
    """Logs nothing.

    >>> NoOpLogger().log({"train/loss": 0.5}, step=1)
    """

    def init(self, config: dict[str, Any]) -> None:
        pass

    def log(self, metrics: dict[str, float], step: int) -> None:
        pass

    def finish(self, status: str = "finished") -> None:
        pass


class MultiLogger(BaseLogger):
    """Forwards every call to each of several loggers, in order. Secrets in the configuration and in texts are masked.

    Errors in `init` are raised: nothing is lost yet, and a run that silently logs nowhere helps nobody. Later, an error
    of a remote logger (a network outage) must not end the training run: it causes one warning and is counted in
    `failures`. Errors of local loggers are raised.

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
        # A stable key for each: the class name, numbered from the second one of a class.
        self._by_key: dict[str, BaseLogger] = {}
        for logger in self.loggers:
            name = type(logger).__name__
            seen = sum(key.partition("#")[0] == name for key in self._by_key)
            self._by_key[f"{name}#{seen + 1}" if seen else name] = logger

    def init(self, config: dict[str, Any]) -> None:
        self.failures = {}
        config = mask(config)
        try:
            for logger in self.loggers:
                logger.init(config)
        except BaseException:
            self._finish_all("failed")  # finish() is also allowed on loggers that were not started
            raise
        self._running = True

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._call_each("log", lambda logger: logger.log(metrics, step))

    def log_text(self, key: str, text: str, step: int) -> None:
        masked = mask_text(text, names=False)
        self._call_each("log_text", lambda logger: logger.log_text(key, masked, step))

    def flush(self) -> None:
        if self._running:
            self._call_each("flush", lambda logger: logger.flush())

    def finish(self, status: str = "finished") -> None:
        """Finish every logger, even if one fails; then raise the first error of a local one."""
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
        # A logger that was added after the state was saved has none, and starts a new run.
        for key, logger in self._by_key.items():
            if key in state:
                logger.load_state_dict(state[key])

    def _finish_all(self, status: str) -> Exception | None:
        first: Exception | None = None
        for key, logger in self._by_key.items():
            try:
                self._call(key, logger, "finish", lambda logger: logger.finish(status))
            except Exception as error:
                first = first or error
        return first

    def _call_each(self, what: str, call: Callable[[BaseLogger], None]) -> None:
        self._started(self._running or None)
        for key, logger in self._by_key.items():
            self._call(key, logger, what, call)

    def _call(self, key: str, logger: BaseLogger, what: str, call: Callable[[BaseLogger], None]) -> None:
        try:
            call(logger)
        except Exception as error:
            if not logger.remote:
                raise
            self.failures[key] = self.failures.get(key, 0) + 1
            if self.failures[key] == 1:
                reason = f"{type(error).__name__}: {mask_text(str(error))}"
                warnings.warn(
                    f"{key}.{what} failed: {reason}. Training continues; further failures of "
                    "this logger are counted, not shown. metrics.jsonl is complete.",
                    RuntimeWarning,
                    stacklevel=4,
                )


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Metrics as Python numbers; accepts NumPy scalars and one-element tensors.

    >>> import numpy as np
    >>> as_numbers({"train/loss": np.float32(0.5), "train/tokens": 12, "val/perfect": True})
    {'train/loss': 0.5, 'train/tokens': 12, 'val/perfect': 1}
    """
    return {key: _number(key, value) for key, value in metrics.items()}


def _number(key: str, value: Any) -> int | float:
    if isinstance(value, int):
        return int(value)
    # float("0.5") would work, but a string among the metrics is a mistake that should not be hidden.
    if not isinstance(value, str | bytes):
        try:
            return float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
            pass
    raise BadArgument(
        expected(f"metric {key!r} to be a number", value, "Reduce it to a scalar first, or use log_text for texts.")
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """A nested configuration as one level of scalars; lists become JSON strings.

    >>> flatten({"lr": 0.1, "data": {"size": 32, "crops": [2, 8]}})
    {'lr': 0.1, 'data.size': 32, 'data.crops': '[2, 8]'}
    """
    flat: dict[str, Scalar] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
            continue
        plain = jsonable(value)
        flat[name] = json.dumps(plain) if isinstance(plain, list) else plain
    return flat
