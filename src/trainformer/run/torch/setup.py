"""Steps of the set-up of a torch run; `run.torch.run.TorchRun.__init__` has their order.

Only settings that the user left alone are adapted to the task and the data.
"""

from __future__ import annotations

from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.data.labels import is_stream
from trainformer.distributed import Strategy
from trainformer.distributed.process_group import Launch
from trainformer.run.torch.data import TrainingData, is_loader
from trainformer.run.torch.settings import RunSettings
from trainformer.tasks.base import provides


def check_task(task: Any) -> None:
    """Reject an object that is not a task."""
    missing = [name for name in ("train_step", "eval_step") if not callable(getattr(task, name, None))]
    if missing or isinstance(task, type):
        what = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        do = "See trainformer.tasks."
        raise BadArgument(expected("a task: an object with `model`, `train_step` and `eval_step`", what, do))


def configure_task(task: Any, loaded: TrainingData) -> None:
    """Let the task inspect the training data and build what depends on it, such as the head of its model."""
    if provides(task, "inspect_dataset") and is_map_style(loaded.train):
        task.inspect_dataset(loaded.train)
    if provides(task, "configure"):
        task.configure(loaded.info)


def check_launch(strategy: Strategy) -> None:
    """Raise if several processes were launched, and each would train on its own in the same folder."""
    world_size = Launch.find().world_size
    if type(strategy) is Strategy and world_size > 1:
        raise BadArgument(
            f"Expected a strategy for the {world_size} processes that were launched together, received 'single': each "
            "of them would train the whole model on its own and write to the same folder. Pass strategy='auto', or "
            "launch one process."
        )


def adapt_settings(settings: RunSettings, task: Any, data: Any, passed: frozenset[str]) -> dict[str, Any]:
    """Apply the batch size of the user's DataLoader, and the task's `training_defaults`. Returns what was changed."""
    adapted: dict[str, Any] = {}
    size = getattr(data, "batch_size", None)
    if is_loader(data) and isinstance(size, int) and "batch_size" not in passed:
        adapted["batch_size"] = settings.batch_size = size
    if not provides(task, "training_defaults"):
        return adapted
    wanted = task.training_defaults(settings, passed)
    unknown = sorted(set(wanted) - set(RunSettings.defaults()))
    if unknown:
        raise BadArgument(expected("training_defaults to name settings of the run", ", ".join(unknown)))
    for name, value in wanted.items():
        if name not in passed:
            adapted[name] = value
            setattr(settings, name, value)
    settings.validate()
    return adapted


def is_map_style(data: Any) -> bool:
    """Whether samples can be read by index: neither a loader of batches nor a stream."""
    return not (is_loader(data) or is_stream(data))
