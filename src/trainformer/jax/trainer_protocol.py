"""The interface of trainers on JAX, and what their `configure_*` methods return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class TrainerConfigureModelOutput(NamedTuple):
    """The model, and the state to train. `scheduler` is the learning rate as a function of the step."""

    model: Any
    state: Any
    tx: Any = None
    scheduler: Callable[[Any], Any] | None = None


class TrainerConfigureDataloaderOutput(NamedTuple):
    """Data loaders for training and evaluation: sources of ours, or any re-iterable of batches.

    With `max_training_steps` the run ends after that many optimizer steps, whatever the arguments say.
    """

    dataloader_train: Any
    dataloader_eval: Any = None
    max_training_steps: int | None = None


class TrainerConfigureFunctionOutput(NamedTuple):
    """The step functions of a run: ``(state, batch) -> (state, metrics)`` and ``(state, batch) -> metrics``."""

    train_step_fn: Callable[[Any, Any], Any]
    eval_step_fn: Callable[[Any, Any], Any] | None = None


class BaseTrainerProtocol(ABC):
    """What every trainer has; `BaseTrainer` implements it on the loop of this library.

    A class that derives from it directly brings its own loop.

    >>> from trainformer.jax import BaseTrainer
    >>> issubclass(BaseTrainer, BaseTrainerProtocol)
    True
    """

    @abstractmethod
    def configure_model(self) -> TrainerConfigureModelOutput:
        """The model and the state to train."""

    @abstractmethod
    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """The data loaders for training and evaluation."""

    @abstractmethod
    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """The step functions."""

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and return the final state."""

    @abstractmethod
    def evaluate(self, state: Any = None) -> dict[str, float]:
        """The metrics of a state on the evaluation data."""

    @abstractmethod
    def save_pretrained(self, ckpt_path: str | Path, state: Any = None) -> Any:
        """Write the state and the arguments to a folder."""
