"""What every other layer may use: shared types, errors, optional imports. Knows neither torch nor jax."""

from trainformer.core.errors import (
    BadArgument,
    CheckFailed,
    DataError,
    MissingDependency,
    NonFiniteError,
    TrainformerError,
)
from trainformer.core.optional import require
from trainformer.core.types import Entry, EvalResult, Loss, Placed, Sized, StepResult

__all__ = [
    "BadArgument",
    "CheckFailed",
    "DataError",
    "Entry",
    "EvalResult",
    "Loss",
    "MissingDependency",
    "NonFiniteError",
    "Placed",
    "Sized",
    "StepResult",
    "TrainformerError",
    "require",
]
