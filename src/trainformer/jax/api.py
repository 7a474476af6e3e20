"""What callbacks and users see of a trainer on JAX, besides what every trainer has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trainformer.backends.jax.averaging import StateAverage
from trainformer.backends.jax.gradient_norms import GradientNorms
from trainformer.backends.jax.precision import resolve_dtype
from trainformer.backends.jax.probes import LinearProbe, knn_accuracy
from trainformer.backends.jax.profiling import Trace
from trainformer.backends.jax.sharding import data_shards
from trainformer.backends.jax.state import TrainState
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import Subset
from trainformer.data.numpy_loader import NumpySource, as_data
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.batch_sizes import BatchSizes
from trainformer.jax.validation import prepared, stacked
from trainformer.run.api import TrainerApi
from trainformer.run.jax.dry_run import DryRun
from trainformer.run.jax.run import JaxRun


class JaxTrainerApi(TrainerApi):
    """Base of `BaseTrainer`: its model, settings and learning rate under the names that callbacks know."""

    _run: JaxRun
    arguments: TrainingArguments
    batch_sizes: BatchSizes
    mesh: Mesh
    tx: Any
    scheduler: Any
    _model: Any

    @property
    def task(self) -> Any:
        """Where callbacks find the model."""
        return self

    @property
    def model(self) -> Any:
        """The module with the current weights; before there is a state, the `model` argument."""
        is_built = self._model is None and "_run" in self.__dict__
        return self.model_state.model if is_built else self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    @property
    def model_state(self) -> Any:
        """The state that is trained."""
        return self._run.backend.state

    _model_state = model_state  # its name in EasyDeL

    @property
    def param_dtype(self) -> Any:
        """The dtype of the stored weights."""
        return resolve_dtype(self.arguments.param_dtype)

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
        """The `learning_rate` argument, or what a callback has set instead."""
        return self.arguments.learning_rate

    @lr.setter
    def lr(self, lr: float) -> None:
        self.arguments = self.arguments.replace(learning_rate=lr)

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
    def active_scheduler(self) -> ActiveSchedule:
        """The learning-rate schedule in use."""
        return ActiveSchedule(self)

    def optimizer_at(self, learning_rate: Any) -> Any:
        """The optimizer of the arguments with a constant learning rate, which may be a traced array."""
        return self.arguments.get_optimizer(learning_rate)

    def check_varies_lr(self, who: str) -> None:
        """Raise if `learning_rate` does not determine the learning rate of the run."""
        arguments, do = self.arguments, "Leave it out."
        if self._run.backend.learning_rate is None:
            received: Any = "a model_state with its own optimizer"
        elif isinstance(arguments.optimizer, optax.GradientTransformation):
            received = "an optax optimizer with its own"
            do = "Pass the name of an optimizer, or a function of the learning rate such as optax.adamw."
        elif callable(arguments.scheduler):
            received = "a scheduler that is a function of the step"
        else:
            return
        raise BadArgument(expected(f"a run whose learning rate follows from learning_rate, for {who}", received, do))

    # -- evaluation and prediction -----------------------------------------------------------------------------

    def eval_mode(self) -> AbstractContextManager[None]:
        """Inside this block `model_state` is the state to evaluate: the average of an EMA, if there is one."""
        return self._run.inference.eval_mode()

    def evaluate_without_ema(self, names: Sequence[str] = ()) -> dict[str, float]:
        """Evaluate the trained weights on the validation data, even if evaluations use an EMA of them."""
        run = self._run
        metrics: dict[str, float] = {}
        for name in names or run.val_sources:
            metrics |= run.validate(name, run.backend.state)
        return metrics

    def embed(self, data: Any = "val", max_samples: int | None = None) -> dict[str, np.ndarray]:
        """What `predict_step` returns for a dataset: ``{"embedding": (N, D)}``, plus ``"label"`` if there are labels.

        `data` is ``"train"``, ``"val"``, ``"val/NAME"`` with several validation sets, or a dataset. `max_samples`
        evenly spaced samples.
        """
        return self._run.inference.embed(self._in_order(data, max_samples))

    def sample_images(self, max_samples: int, val_set: str | None = None) -> dict[str, np.ndarray]:
        """Up to `max_samples` evenly spaced validation images (N, H, W, C) with `true` class and predictions."""
        name = next(iter(self._run.val_sources), "") if val_set is None else val_set
        return self._run.inference.sample_images(self._in_order(f"val/{name}" if name else "val", max_samples))

    def _in_order(self, data: Any, max_samples: int | None) -> NumpySource:
        """Batches of a dataset in order, of one size; every process reads all of it."""
        run, dataset = self._run, data
        if isinstance(data, str):
            named = {f"val/{name}" if name else "val": source for name, source in run.val_sources.items()}
            known = {"train": run.train_source, **named}
            if data not in known:
                raise BadArgument(expected("the data to embed", data, f"There is {', '.join(known)}."))
            dataset = getattr(known[data], "dataset", None)
        else:
            dataset = as_data(prepared(self, data, False))
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            received = "a loader or a stream" if dataset is None else type(dataset).__name__
            raise DataError(expected("a dataset with a length and an index to predict for", received))
        if max_samples is not None and len(dataset) > max_samples:
            dataset = Subset(dataset, np.linspace(0, len(dataset) - 1, max_samples).round().astype(int).tolist())
        size = -(-self.batch_sizes.evaluation // data_shards(self.mesh)) * data_shards(self.mesh)
        return NumpySource(dataset, size, seed=self.arguments.seed, collate=stacked(self._collate()), pad_last=True)

    # -- what the built-in callbacks need, which trainers on torch provide as well -----------------------------

    #: Class names are not known: training and validation labels are taken to be numbered alike.
    same_classes = True

    def average_weights(self, modules: Sequence[str] | None = None) -> StateAverage:
        """An average of the weights, or of those of some modules, which equals them until it is updated."""
        backend = self._run.backend
        if not isinstance(backend.state, TrainState):
            raise BadArgument(expected("a TrainState to average the weights of", type(backend.state).__name__))
        with backend.run_context():
            return StateAverage(lambda: backend.state, modules)

    def learning_rates(self) -> list[float]:
        """The learning rate of the last step; several if the state of the optimizer holds several."""
        return self._run.backend.learning_rates(self.state.step)

    def gradient_norms(self, every: int) -> GradientNorms:
        """Records the gradient norms of each step from now on, which are computed inside the compiled step."""
        return self._run.backend.gradient_norms()

    def step_features(self) -> tuple[Any, Any] | None:
        """What `predict_step` returns for the latest training batch: embeddings and labels; None without them."""
        return self._run.inference.step_features()

    def knn_accuracy(self, queries: Mapping[str, Any], gallery: Mapping[str, Any], k: int, temperature: float) -> float:
        """Accuracy of a weighted vote of the `k` nearest rows; both as `embed` returns them."""
        return knn_accuracy(queries, gallery, k, temperature)

    def linear_probe(self, lr: float, momentum: float, weight_decay: float) -> LinearProbe:
        """A linear classifier, to be trained on features of single steps."""
        return LinearProbe(lr, momentum, weight_decay, self.mesh)

    def start_trace(self, folder: Path) -> Trace:
        """Start JAX's profiler; the trace is written to the folder when it is stopped."""
        return Trace(folder, lambda: jax.block_until_ready(self._run.backend.state))

    def sandbox(self) -> AbstractContextManager[DryRun]:
        """For trial steps that leave no trace."""
        return self._run.sandbox()


class ActiveSchedule:
    """The schedule of a run, with the methods of torch's schedulers that callbacks call."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def get_last_lr(self) -> list[float]:
        """The learning rate of the last step."""
        trainer = self._trainer
        return [] if trainer.scheduler is None else [float(trainer.scheduler(max(0, trainer.state.step - 1)))]

    def rescale(self, lr: float) -> None:
        """Use the schedule of another `learning_rate`. The train step is compiled again."""
        trainer = self._trainer
        trainer.check_varies_lr("a callback that changes it")
        trainer.lr = lr
        trainer.tx, trainer.scheduler = trainer.arguments.get_optimizer_and_scheduler(trainer.max_training_steps)
        backend = trainer._run.backend
        backend.learning_rate = trainer.scheduler
        backend.state = backend.state.replace(tx=trainer.tx)
