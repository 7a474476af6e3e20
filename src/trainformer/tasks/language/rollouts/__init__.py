"""Completions sampled from the model that is trained, for tasks that learn from their own output."""

from __future__ import annotations

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.tasks.language.rollouts.environment": ["Environment", "ToolEnvironment"],
        "trainformer.tasks.language.rollouts.generation": ["Generated", "Generator"],
        "trainformer.tasks.language.rollouts.rewards": ["overlong_penalty"],
        "trainformer.data.text.sampling": ["SamplingOptions"],
        "trainformer.tasks.language.rollouts.vllm": ["VLLMEngine", "VLLMServer"],
    },
)
