"""Whether an object is a task: its methods exist, take the arguments they are called with, and it has a model."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.hooks import check_arguments, unknown_hooks
from trainformer.tasks.base import TaskBase, provides

logger = logging.getLogger("trainformer")

_OTHER_NAMES = {  # of Lightning and HF
    "training_step": "train_step(batch)",
    "validation_step": "eval_step(batch)",
    "compute_loss": "train_step(batch)",
    "prediction_step": "predict_step(batch)",
}


def explain_missing(task: Any) -> str:
    """What to do about an object that is no task."""
    others = [f"Rename {name} to {ours}." for name, ours in _OTHER_NAMES.items() if callable(getattr(task, name, None))]
    if others:
        return " ".join(others)
    if isinstance(task, nn.Module):
        return "A model alone does not say what its loss is: write a class with these three, see trainformer.tasks."
    return "See trainformer.tasks."


def check_methods(task: Any) -> None:
    """Reject methods that cannot be called as the trainer calls them, and warn of hooks that nobody calls."""
    for name in ("train_step", "eval_step", "predict_step"):
        if callable(getattr(task, name, None)):
            check_arguments(task, name, ("batch",))
    for name, method in vars(TaskBase).items():
        if name.startswith("_") or not inspect.isfunction(method) or not provides(task, name):
            continue
        arguments = list(inspect.signature(method).parameters)[1:]
        keywords = {"train": True} if name == "prepare_dataset" else {}
        if callable(getattr(task, name)):
            check_arguments(task, name, [a for a in arguments if a not in keywords], keywords)
    known = [name for name in dir(TaskBase) if name.startswith("on_")]
    for name, hint in unknown_hooks(task, known).items():
        logger.warning("%s.%s is never called: tasks have no such hook. %s", type(task).__name__, name, hint)


def check_model(task: Any) -> None:
    """Reject a task whose `model` is missing or no module. Called when the task has seen its data."""
    name, model = type(task).__name__, getattr(task, "model", None)
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        do = f"Write self.model = {model.__name__}(...)."
        raise BadArgument(expected(f"{name}.model to be an nn.Module", f"the class {model.__name__}", do))
    if model is not None:
        raise BadArgument(expected(f"{name}.model to be an nn.Module", type(model).__name__))
    held = task.named_children() if isinstance(task, nn.Module) else vars(task).items()
    modules = [attribute for attribute, value in held if isinstance(value, nn.Module)]
    do = "Set self.model to the module to train."
    if modules:
        do = f"Write self.model instead of self.{modules[0]}, or add self.model = self.{modules[0]}."
        if len(modules) > 1:
            do = f"Put {', '.join(f'self.{m}' for m in modules)} into one nn.Module, and set self.model to it."
    raise BadArgument(expected(f"{name} to have a `model`, an nn.Module", "none", do))
