"""What a run knows about itself: configuration with provenance (`config`), shared state with a lifetime (`state`).

Neither trains, reads files or knows a task, and importing them does not import torch.
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
