"""The context of a run: configuration with provenance (`config`), and shared state with a lifecycle (`state`).

Imports no torch.
"""

from trainformer.context.config import ConfigSource, ConfigValue, PipelineConfig, UnknownKey, record_arguments
from trainformer.context.state import Lifecycle, PipelineContext, ScopedContext, StateEntry

__all__ = [
    "ConfigSource",
    "ConfigValue",
    "Lifecycle",
    "PipelineConfig",
    "PipelineContext",
    "ScopedContext",
    "StateEntry",
    "UnknownKey",
    "record_arguments",
]
