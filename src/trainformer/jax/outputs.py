"""What the `configure_*` methods of a trainer return. Each can be unpacked like a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class TrainerConfigureModelOutput(NamedTuple):
    """The model, and the state it is trained from. `scheduler` is the learning rate as a function of the step."""

    model: Any
    state: Any
    tx: Any = None
    scheduler: Callable[[Any], Any] | None = None


class TrainerConfigureDataloaderOutput(NamedTuple):
    """Batches to train and to evaluate on: sources of ours, or any iterables of batches that can be iterated again.

    With `max_training_steps` the run ends after so many optimizer steps, whatever the arguments say.
    """

    dataloader_train: Any
    dataloader_eval: Any = None
    max_training_steps: int | None = None


class TrainerConfigureFunctionOutput(NamedTuple):
    """The two functions of a run: ``(state, batch) -> (state, metrics)`` and ``(state, batch) -> metrics``."""

    train_step_fn: Callable[[Any, Any], Any]
    eval_step_fn: Callable[[Any, Any], Any] | None = None
