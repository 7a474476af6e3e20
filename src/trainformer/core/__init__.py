"""Shared by all layers: types, errors, optional imports, plugins. Imports neither torch nor jax."""

from trainformer.core.errors import (
    BadArgument,
    CheckFailed,
    DataError,
    MissingDependency,
    NonFiniteError,
    TrainformerError,
    UnknownArgument,
)
from trainformer.core.optional import require
from trainformer.core.types import DeviceBatch, Entry, EvalResult, HostBatch, Loss, OptimizerConfig, StepResult

__all__ = [
    "BadArgument",
    "CheckFailed",
    "DataError",
    "DeviceBatch",
    "Entry",
    "EvalResult",
    "HostBatch",
    "Loss",
    "MissingDependency",
    "NonFiniteError",
    "OptimizerConfig",
    "StepResult",
    "TrainformerError",
    "UnknownArgument",
    "require",
]
