"""Suiting the settings of a run to its task and its data, where the user chose nothing.

Owns who may change a setting before the run begins: a loader of the user's with a batch size of its own, and the task
with its `training_defaults`. What the user named stays as it is. Every function returns what it changed.
"""

from __future__ import annotations

from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.data.labels import is_stream
from trainformer.run.torch.data import is_loader
from trainformer.run.torch.settings import RunSettings
from trainformer.tasks.base import provides


def check_task(task: Any) -> None:
    """Refuse what is no task, before anything is asked of it."""
    missing = [name for name in ("train_step", "eval_step") if not callable(getattr(task, name, None))]
    if missing or isinstance(task, type):
        what = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        raise BadArgument(
            expected("a task: an object with `model`, `train_step` and `eval_step`", what, "See trainformer.tasks.")
        )


def suit_to_loader(settings: RunSettings, data: Any, passed: frozenset[str]) -> dict[str, Any]:
    """A loader of the user's has a batch size of its own, from which others may derive."""
    size = getattr(data, "batch_size", None)
    if not is_loader(data) or not isinstance(size, int) or "batch_size" in passed:
        return {}
    settings.batch_size = size
    return {"batch_size": size}


def suit_to_task(settings: RunSettings, task: Any, passed: frozenset[str]) -> dict[str, Any]:
    """Settings that the user left alone, as the task wants them."""
    if not provides(task, "training_defaults"):
        return {}
    wanted = task.training_defaults(settings, passed)
    unknown = sorted(set(wanted) - set(RunSettings.defaults()))
    if unknown:
        raise BadArgument(expected("training_defaults to name settings of the run", ", ".join(unknown)))
    suited = {name: value for name, value in wanted.items() if name not in passed}
    for name, value in suited.items():
        setattr(settings, name, value)
    settings.validate()
    return suited


def without_vain_sampler(settings: RunSettings, suited: dict[str, Any], train_data: Any) -> dict[str, Any]:
    """What was suited, less a sampler that the task wished for where nobody can sample."""
    if "sampler" not in suited or can_be_indexed(train_data):
        return suited
    settings.sampler = None
    return {name: value for name, value in suited.items() if name != "sampler"}


def can_be_indexed(data: Any) -> bool:
    """Whether there are samples to choose from, and not only batches or a stream to read."""
    return not (is_loader(data) or is_stream(data))
