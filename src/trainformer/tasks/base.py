"""The task: what is trained. Model, loss, data and evaluation in one object.

Owns the protocol between a task and everything above it. Nothing here trains: the engine calls the two required
methods, `train_step` and `eval_step`, and those of the optional ones that a task really defines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from trainformer.core import Loss
from trainformer.data.metadata import DatasetInfo

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

__all__ = ["DatasetInfo", "Loss", "Task", "TaskBase", "provides"]


@runtime_checkable
class Task(Protocol):
    """What every task must have. `TaskBase` documents the optional methods."""

    model: nn.Module

    def train_step(self, batch: Any) -> Tensor | Loss:
        """The loss of one batch: a scalar tensor (mean over the samples), or `Loss(sum, weight)`."""
        ...

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Metrics of one batch.

        Each value is a scalar (mean over the samples), a ``(sum, weight)`` pair, or a tensor with one row per
        sample, which is collected over the whole set and given to `on_eval_end`.
        """
        ...


class TaskBase:
    """Optional base class: every optional method of a task, with a default that changes nothing.

    A task need not inherit from this; a plain class with `model`, `train_step` and `eval_step` will do.

    >>> import torch
    >>> class Mean(TaskBase):
    ...     def __init__(self):
    ...         self.model = torch.nn.Linear(1, 1)
    ...     def train_step(self, batch):
    ...         return self.model(batch).mean()
    ...     def eval_step(self, batch):
    ...         return {"loss": self.train_step(batch)}
    >>> isinstance(Mean(), Task)
    True
    """

    model: nn.Module

    # -- set-up --------------------------------------------------------------------------------------------

    def configure(self, info: DatasetInfo) -> None:
        """Called once, before anything is built, with what the data say (number of classes, shape of inputs)."""

    def look_at(self, dataset: Any) -> None:
        """Called before `configure` with the training data, to learn what only their records tell. Not with streams."""

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Settings of the run that suit this task, by name. They count where the user did not choose.

        `settings` are the run's settings as they are, to derive from (a learning rate from the batch size, say), and
        `chosen` the names of those that the user passed.
        """
        return {}

    def load_data(self, path: str) -> Dataset:
        """The data set behind a path or name."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot load data by path. Pass a Dataset or DataLoader as `data`, "
            "or define load_data(self, path) on the task."
        )

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """The data set as this task wants to read it, with its transforms; `train` says whether to augment."""
        return dataset

    def collate_fn(self, examples: list[Any]) -> Any:
        """Make a batch of samples. Left alone, torch's default collation is used."""

    def count_samples(self, batch: Any) -> int:
        """Samples in a batch of the user's own loader, where its tensors do not tell."""
        raise NotImplementedError

    def get_train_transforms(self) -> nn.Module | None:
        """A module applied to the inputs of a training batch, on the device."""
        return None

    def get_eval_transforms(self) -> nn.Module | None:
        """The same for evaluation and prediction."""
        return None

    # -- during the run ------------------------------------------------------------------------------------

    def on_train_begin(self) -> None:
        """Before the first step."""

    def on_train_end(self) -> None:
        """After the last step."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before the first batch of an epoch."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        """After an epoch, with the metrics of the evaluation that belongs to it, if there was one."""

    def on_step_end(self, step: int, max_steps: int) -> None:
        """After each optimizer step (not each micro-batch): momentum networks, queues. `step` counts from 1."""

    def on_step_dropped(self) -> None:
        """Instead of `on_step_end`: what `train_step` saw since the last step is not used, and may come again."""

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float] | None:
        """Metrics of the whole set from the rows that `eval_step` returned (tensors on the CPU, in input order)."""
        return None

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Further metrics of an evaluation that follow from its means: a perplexity from a loss."""
        return {}

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        """After an evaluation, with its final metrics."""

    # -- what belongs to the task --------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Everything the optimizer may change. Override where the loss has parameters of its own."""
        yield from self.model.parameters()

    def config_dict(self) -> dict[str, Any]:
        """What to record of the task in the run's config."""
        return {}

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """Trainable parameters that get no gradient for the time being, on purpose."""
        yield from ()

    def check_batch(self, batch: Any) -> list[str]:
        """Problems of a batch that `Trainer.check()` should report (labels out of range, nothing supervised)."""
        return []

    def export_module(self, model: nn.Module) -> nn.Module:
        """The part of the model (perhaps an average of its weights) that is deployed."""
        return model

    def save_assets(self, folder: Path) -> list[str]:
        """Write what belongs beside the weights of a checkpoint (a config, a tokenizer); the names of the files."""
        return []

    def model_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the model, where that is not all of it."""
        return self.model.state_dict()

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Take back what `model_state` gave."""
        self.model.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """State of the task outside `model`: parameters of the loss, queues, centres."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `load_state_dict` could not take this, before anything else is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def provides(task: object, name: str) -> bool:
    """Whether a task defines an optional method itself.

    Methods inherited from `TaskBase` or `Task` do not count: their bodies do nothing, and calling such a
    `collate_fn` would turn every batch into ``None``.

    >>> provides(TaskBase(), "collate_fn")
    False
    """
    method = getattr(task, name, None)
    if method is None:
        return False
    inherited = (getattr(TaskBase, name, None), getattr(Task, name, None))
    return getattr(method, "__func__", method) not in inherited
