"""What callbacks and users see of a trainer on JAX, besides what every trainer has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.batch_sizes import BatchSizes
from trainformer.run.api import TrainerApi


class JaxTrainerApi(TrainerApi):
    """Base of `BaseTrainer`: its settings, optimizer and learning rate under the names that callbacks know."""

    arguments: TrainingArguments
    batch_sizes: BatchSizes
    tx: Any
    scheduler: Any

    @property
    def task(self) -> Any:
        """Where callbacks find the model."""
        return self

    @property
    def training_batch_size(self) -> int:
        """Rows of an optimizer step, over all devices."""
        return self.batch_sizes.total

    @property
    def evaluation_batch_size(self) -> int:
        """Rows of an evaluation batch, over all devices."""
        return self.batch_sizes.evaluation

    @property
    def is_process_zero(self) -> bool:
        """Whether this is the process that prints and logs."""
        return self.is_main

    @property
    def optimizer(self) -> Any:
        """The optax optimizer; its name is in ``arguments.optimizer``."""
        return self.tx

    @property
    def lr(self) -> float:
        """The `learning_rate` argument."""
        return self.arguments.learning_rate

    def was_set(self, name: str) -> bool:
        """Whether the user passed a setting."""
        return name in self._run.passed

    def __getattr__(self, name: str) -> Any:
        """The settings of the run, under the names that all entry points share."""
        run = self.__dict__.get("_run")
        if run is None or name not in run.settings.defaults():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(run.settings, name)

    @property
    def active_optimizer(self) -> Any:
        """The optax optimizer."""
        return self.tx

    @property
    def active_scheduler(self) -> Any:
        """The learning rate of the last step with the `get_last_lr()` of torch's schedulers, which callbacks call."""
        schedule, step = self.scheduler, self.state.step

        def get_last_lr() -> list[float]:
            return [] if schedule is None else [float(schedule(max(0, step - 1)))]

        return SimpleNamespace(get_last_lr=get_last_lr)
