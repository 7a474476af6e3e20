"""Tasks: what to train. Built-in tasks are imported on first use; other packages register theirs as entry points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.lazy import lazy_exports
from trainformer.core.plugins import load_plugin, plugin_names

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.tasks.base": ["DatasetInfo", "Loss", "OptimizerConfig", "Task", "TaskBase"],
        "trainformer.tasks.forecasting": ["TimeSeriesForecasting"],
        "trainformer.tasks.language.causal_lm": ["CausalLM"],
        "trainformer.tasks.language.cpo": ["CPO"],
        "trainformer.tasks.language.distillation": ["Distillation"],
        "trainformer.tasks.language.dpo": ["DPO"],
        "trainformer.tasks.language.embedding": ["TextEmbedding"],
        "trainformer.tasks.language.grpo": ["GRPO"],
        "trainformer.tasks.language.kto": ["KTO"],
        "trainformer.tasks.language.masked_lm": ["MaskedLM"],
        "trainformer.tasks.language.online_dpo": ["OnlineDPO"],
        "trainformer.tasks.language.reward_model": ["RewardModel"],
        "trainformer.tasks.language.seq2seq": ["Seq2Seq"],
        "trainformer.tasks.language.text_classification": ["TextClassification"],
        "trainformer.tasks.language.teacher_logits": ["save_teacher_logits"],
        "trainformer.tasks.language.token_classification": ["TokenClassification"],
        "trainformer.tasks.multimodal.clip": ["CLIP"],
        "trainformer.tasks.multimodal.vlm": ["VLM"],
        "trainformer.tasks.tabular.classification": ["TabularClassification"],
        "trainformer.tasks.tabular.regression": ["TabularRegression"],
        "trainformer.tasks.vision.classification": ["ImageClassification"],
        "trainformer.tasks.vision.detection": ["ObjectDetection"],
        "trainformer.tasks.vision.metric_learning": ["MetricLearning"],
        "trainformer.tasks.vision.segmentation": ["SemanticSegmentation"],
        "trainformer.tasks.vision.ssl.task": ["SSL"],
    },
)
_BUILT_IN = sorted(set(__all__) - {"DatasetInfo", "Loss", "OptimizerConfig", "Task", "TaskBase", "save_teacher_logits"})
__all__ = [*__all__, "find_task", "task_names"]


def task_names() -> list[str]:
    """Names of the built-in tasks and of those that installed packages register under ``trainformer.tasks``.

    >>> task_names()[:3]
    ['CLIP', 'CPO', 'CausalLM']
    """
    return [*_BUILT_IN, *(name for name in plugin_names("tasks") if name not in _BUILT_IN)]


def find_task(name: str) -> Callable[..., Any]:
    """The task class with this name; ``"SSL.mae"`` finds a class method that makes one. Built-in tasks come first.

    >>> find_task("CausalLM").__module__
    'trainformer.tasks.language.causal_lm'
    >>> find_task("SSL.mae").__name__
    'mae'
    """
    class_name, _, constructor = name.partition(".")
    task = __getattr__(class_name) if class_name in _BUILT_IN else load_plugin("tasks", class_name)
    if task is not None and constructor:
        task = getattr(task, constructor, None)
    if not callable(task):
        hint = did_you_mean(name, task_names()) or f"Tasks: {', '.join(task_names())}."
        raise BadArgument(expected("the name of a task", name, hint))
    found: Callable[..., Any] = task
    return found
