"""The task protocol: model, loss, data and evaluation in one object.

A task does not train itself. The engine calls the two required methods, `train_step` and `eval_step`, and those
optional methods that the task defines (see `provides`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from trainformer.core import Loss, OptimizerConfig
from trainformer.data.metadata import DatasetInfo

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

__all__ = ["DatasetInfo", "Loss", "OptimizerConfig", "Task", "TaskBase", "provides"]


@runtime_checkable
class Task(Protocol):
    """The required members of a task. `TaskBase` documents the optional ones."""

    model: nn.Module

    def train_step(self, batch: Any) -> Tensor | Loss:
        """Return the loss of one batch: a scalar tensor (mean over samples) or `Loss(sum, weight)`."""
        ...

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the metrics of one batch.

        Each value is a scalar (mean over samples), a ``(sum, weight)`` pair, or a tensor with one row per sample.
        Rows are collected over the whole dataset and passed to `on_eval_end`.
        """
        ...


class TaskBase:
    """Optional base class with a no-op default for each optional method.

    A task does not have to inherit from it: any object with `model`, `train_step` and `eval_step` works.

    Some optional members have no default here, because their presence changes what the trainer does:
    ``predict_step(batch)`` returns rows for `Trainer.predict` (otherwise `eval_step` is used),
    ``configure_optimizers()`` declares several named optimizers (see docs/several-optimizers.md),
    ``set_train_mode(train)`` replaces ``model.train(train)``, and the class attribute ``open_set = True`` allows
    validation classes that do not occur in training. With ``wants_window = True``, ``step_totals(batch)`` returns a
    tensor of sums over a batch (without gradients); before the first `train_step` of a step,
    ``use_step_totals(totals)`` gets their sum over all its micro-batches and ranks (None after a trial step). So a loss
    may depend on a mean over the whole step and still not on how the step is divided.

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
    per_sample_losses: bool = False  # set if `train_step` is to return `Loss.per_sample`, which costs a little

    # -- setup ---------------------------------------------------------------------------------------------

    def inspect_dataset(self, dataset: Any) -> None:
        """Read what only the training records can tell, such as label names. Not called for loaders and streams."""

    def configure(self, info: DatasetInfo) -> None:
        """Build the model for the data: number of classes, input shape. Called once, after `inspect_dataset`."""

    def learned(self) -> dict[str, Any]:
        """Return, as JSON values, what the task found out about the data besides `DatasetInfo`.

        It is recorded with every checkpoint, so that the model can be built again where the data are not.
        """
        return {}

    def use_learned(self, learned: Mapping[str, Any]) -> None:
        """Take over what `learned` returned. Called before `configure`, instead of `inspect_dataset`."""

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Return trainer settings that suit this task. They apply only where the user passed nothing.

        `settings` holds the current settings, e.g. to derive a learning rate from the batch size; `chosen` holds the
        names of the settings that the user passed.
        """
        return {}

    def load_data(self, path: str) -> Dataset:
        """Load the dataset behind a path or name."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot load data by path. Pass a Dataset or DataLoader as `data`, "
            "or define load_data(self, path) on the task."
        )

    def convert_data(self, data: Any) -> Any:
        """Convert what was passed as data, such as a DataFrame, to a dataset. Anything else is returned unchanged."""
        return data

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Wrap a dataset with the transforms of this task; `train` enables augmentation."""
        return dataset

    def prepare_sources(self, sources: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wrap the sources of a `Mixture` for training, if `prepare_dataset` cannot be called for one at a time."""
        return {name: self.prepare_dataset(dataset, train=True) for name, dataset in sources.items()}

    def prediction_data(self, dataset: Any) -> Any:
        """Return the samples to predict for, if these are not those of the dataset (the end of a series)."""
        return dataset

    def merge_predictions(self, batches: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
        """Merge the rows of `predict_step`, if a sample has several (the windows of a long text): columns of values.

        `batches` are columns of rows in input order; the windows of a sample may be in two of them.
        """
        return batches

    def collate_fn(self, examples: list[Any]) -> Any:
        """Collate samples into a batch. Without it, torch's `default_collate` is used."""

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch of a user's DataLoader, if its tensors do not tell."""
        raise NotImplementedError

    def get_train_transforms(self) -> nn.Module | None:
        """Return a module that is applied to training inputs on the device."""
        return None

    def get_eval_transforms(self) -> nn.Module | None:
        """Return a module that is applied to evaluation and prediction inputs on the device."""
        return None

    # -- hooks ---------------------------------------------------------------------------------------------

    def on_train_begin(self) -> None:
        """Called before the first step."""

    def on_train_end(self) -> None:
        """Called after the last step."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Called before the first batch of an epoch."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        """Called after an epoch, with the metrics of its evaluation, if there was one."""

    def on_step_end(self, step: int, max_steps: int) -> None:
        """Called after each optimizer step (not each micro-batch). Update momentum networks and queues here.

        `step` counts from 1.
        """

    def on_step_skipped(self) -> None:
        """Called instead of `on_step_end` if the step is discarded or will be repeated. Drop collected state here."""

    def on_eval_begin(self, dataset: Any, val_set: str) -> None:
        """Called before each evaluation of a dataset, with what `prepare_dataset` returned for it (or the loader).

        `val_set` is the name of the validation set; empty if it has none.
        """

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float] | None:
        """Compute dataset-level metrics from the rows of `eval_step` (CPU tensors, in input order)."""
        return None

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics that follow from averaged ones, e.g. perplexity from the loss."""
        return {}

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        """Called after an evaluation, with its final metrics."""

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """Return records of the latest evaluation to write to the run folder, by kind, e.g. a confusion matrix."""
        return {}

    def training_records(self) -> dict[str, dict[str, Any]]:
        """Return records of the latest step to write to the run folder at each log point, by kind: sampled texts."""
        return {}

    def log(self, name: str, value: Any, weight: Any = None, **unknown: Any) -> None:
        """Log a value from inside `train_step` or `eval_step`: ``self.log("accuracy", correct.mean())``.

        It is logged as ``train/accuracy`` or ``val/accuracy``, averaged over micro-batches, ranks and the log interval
        or the dataset. `value` is a number or a scalar tensor, a mean over `weight` (default: the samples of the
        batch), or a pair ``(sum, weight)``. Nothing syncs with the device. See `trainformer.log_metric`.
        """
        from trainformer.backends.torch.logged_values import log_metric

        log_metric(name, value, weight, **unknown)

    # -- parameters, checks and state ----------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what the optimizer trains. Override it if the loss has parameters."""
        yield from self.model.parameters()

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """Yield trainable parameters that intentionally receive no gradient at the moment."""
        yield from ()

    def config_dict(self) -> dict[str, Any]:
        """Return what to record about the task in the run's config."""
        return {}

    def check_batch(self, batch: Any) -> list[str]:
        """Return the problems of a batch for `Trainer.check()`, e.g. labels out of range."""
        return []

    def export_module(self, model: nn.Module) -> nn.Module:
        """Return the module to deploy, given the (possibly averaged) model."""
        return model

    def save_assets(self, folder: Path) -> list[str]:
        """Write files that belong next to the weights (a config, a tokenizer) and return their names."""
        return []

    def model_state_dict(self) -> dict[str, Any]:
        """Return the part of the model's state dict that a checkpoint stores."""
        return self.model.state_dict()

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `model_state_dict`."""
        self.model.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return state outside `model`: loss parameters, queues, centers."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `load_state_dict` would fail. Called before anything is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""


def provides(task: object, name: str) -> bool:
    """Whether a task defines an optional method itself.

    Methods inherited from `TaskBase` or `Task` do not count: calling the no-op `collate_fn`, for example, would turn
    every batch into ``None``.

    >>> provides(TaskBase(), "collate_fn")
    False
    """
    method = getattr(task, name, None)
    if method is None:
        return False
    inherited = (getattr(TaskBase, name, None), getattr(Task, name, None))
    return getattr(method, "__func__", method) not in inherited
