"""`Trainer`: the main way in. Thin: it holds the settings and hands everything to a session."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from trainformer.backends.torch.export import export_model
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.progress import ProgressBar
from trainformer.context import PipelineContext
from trainformer.engine import Control, RunState
from trainformer.session import RunSettings, Session
from trainformer.session.preflight import CheckReport, check_session
from trainformer.session.probe import Probe
from trainformer.tasks.base import provides


@dataclass(eq=False, repr=False)
class Trainer(RunSettings):
    """Trains any task.

    `data` and `val_data` are a path or name the task can load, a tuple of tensors, a `Dataset`, or a `DataLoader`
    (used as it is). Every other setting is a keyword argument; see `RunSettings` for all of them.

    >>> import torch
    >>> class Line:
    ...     def __init__(self):
    ...         self.model = torch.nn.Linear(1, 1)
    ...     def train_step(self, batch):
    ...         x, y = batch
    ...         return torch.nn.functional.mse_loss(self.model(x), y)
    ...     def eval_step(self, batch):
    ...         return {"loss": self.train_step(batch)}
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> trainer = Trainer(Line(), (x, 2 * x + 1), val_split=0.25, epochs=80, lr=0.1, log="none")
    >>> trainer.fit().evaluate()["val/loss"] < 0.01
    True
    """

    task: Any
    data: Any
    val_data: Any = None
    val_split: float | int | None = None
    callbacks: list[Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Trainer:
        """Remember which arguments were passed: a default passed on purpose is the user's choice too."""
        self = super().__new__(cls)
        try:
            self.__dict__["_passed"] = frozenset(inspect.signature(cls.__init__).bind(self, *args, **kwargs).arguments)
        except TypeError:
            self.__dict__["_passed"] = frozenset()  # __init__ is about to say what is wrong
        return self

    def __post_init__(self) -> None:
        callbacks = CallbackList(self.callbacks)
        console = Console()
        if _names_console(self.log) and not any(isinstance(cb, ProgressBar) for cb in callbacks):
            callbacks.add(ProgressBar(console))
        self._session = Session(
            self,
            self.task,
            self,
            data=self.data,
            val_data=self.val_data,
            val_split=self.val_split,
            callbacks=callbacks,
            passed=self.__dict__["_passed"],
            console=console,
        )
        self._session.connect()

    def __repr__(self) -> str:
        return f"Trainer({type(self.task).__name__}, step {self.state.step} of {self.max_steps_planned})"

    # -- doing ---------------------------------------------------------------------------------------------

    def fit(self) -> Trainer:
        """Train. Called again, it goes on: after more `epochs`, or from where it was stopped."""
        self._session.fit()
        return self

    def check(self, raise_on_failure: bool = True) -> CheckReport:
        """See in seconds whether this run will work; model, optimizer, random numbers and position stay as they are."""
        return check_session(self._session, raise_on_failure)

    def evaluate(self, data: Any = None, batch_size: int | None = None) -> dict[str, float]:
        """Metrics named ``val/...`` on the validation data, or on other data."""
        return self._session.evaluate_on(data, batch_size)

    def evaluate_trained(self) -> dict[str, float]:
        """The same for the weights being trained, on the validation data, where `evaluate` judges an average (EMA)."""
        return self._session.evaluate_trained()

    def predict(self, data: Any, batch_size: int | None = None) -> list[dict[str, Tensor]]:
        """What the task predicts: one dict per sample, in input order."""
        return self._session.predict(data, batch_size)

    def embed(self, data: Any = "val", most: int | None = None) -> dict[str, Tensor]:
        """Embeddings of data in evaluation mode: ``{"embedding": (N, D)}``, with ``"label"`` where there are labels.

        `data` is ``"train"``, ``"val"``, or anything that `predict` takes; `most` samples at most, evenly chosen.
        """
        return self._session.embed(data, most)

    def save(self, path: str | Path) -> str:
        """Write everything needed to go on exactly from here to one file; all or nothing."""
        return str(self._session.save_file(Path(path)))

    def load(self, path: str | Path, components: Collection[str] | None = None) -> Trainer:
        """Go on from a file that `save` wrote, from a checkpoint's folder, or from a run's folder.

        `components` loads only some parts, such as ``["model"]``. Nothing that is read is executed, and if anything
        does not fit, nothing is changed.
        """
        self._session.load(Path(path), components)
        return self

    def export(self, path: str | Path, format: str = "pytorch", input_shape: tuple[int, ...] | None = None) -> str:
        """Write the model for deployment: ``pytorch``, ``onnx``, ``torchscript`` or ``torch.export``.

        `input_shape` is that of one sample, without the batch; it is taken from the data where they have one.
        """
        shape = input_shape or getattr(self.task, "input_shape", None) or self._session.info.input_shape
        model = self._session.inference_model()
        if provides(self.task, "export_module"):
            model = self.task.export_module(model)
        return str(export_model(model, Path(path), format, shape))

    def stop(self, reason: str) -> None:
        """Ask the run to end after the current step."""
        self._session.stop(reason)

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Hand further metrics to the loggers, at the current step."""
        self._session.log(metrics, self.state.step)

    def judging(self) -> AbstractContextManager[None]:
        """Evaluation mode in this block, with the model to be judged (an average, if one is kept) in its place.

        What is drawn inside does not change how training goes on.
        """
        return self._session.judging()

    def sandbox(self) -> AbstractContextManager[Probe]:
        """A place for trial steps that leave no trace."""
        return self._session.sandbox()

    # -- looking -------------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """Where the run is."""
        return self._session.state

    @property
    def control(self) -> Control:
        """Requests to the loop: log, evaluate, save, stop."""
        return self._session.control

    @property
    def context(self) -> PipelineContext:
        """Config with provenance, and state that components share."""
        return self._session.context

    @property
    def best_metrics(self) -> dict[str, float]:
        """Metrics of the best evaluation, as told by `monitor_metric`."""
        return self.state.best_metrics

    @property
    def active_optimizer(self) -> Any:
        """The optimizer at work; the field `optimizer` is what was asked for."""
        return self._session.backend.optimizer

    @property
    def active_schedule(self) -> Any:
        """The learning-rate schedule at work."""
        return self._session.backend.schedule

    @property
    def grad_norm(self) -> Any:
        """Norm of the last gradients before clipping, still on the device."""
        return self._session.backend.grad_norm

    @property
    def logger(self) -> Any:
        """The loggers of the run."""
        return self._session.loggers

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run, once it has begun."""
        return None if self._session.folder is None else self._session.folder.path

    @property
    def max_steps_planned(self) -> int | None:
        """Optimizer steps of the whole run, where that is known."""
        return self._session.total_steps()

    @property
    def labels_comparable(self) -> bool:
        """Whether a label of the validation data means the class it means in training, as far as names tell."""
        return self._session.labels_comparable

    def was_set(self, name: str) -> bool:
        """Whether the user set a setting, to whatever value."""
        return name in self.__dict__["_passed"]

    # -- names that callbacks written for the reference plan use -------------------------------------------

    _ctx = property(lambda self: self.context)
    _step = property(lambda self: self.state.step)
    _epoch = property(lambda self: self.state.epoch)
    _max_steps = property(lambda self: self.max_steps_planned or 0)
    _logger = property(lambda self: self.logger)
    _optimizer = property(lambda self: self.active_optimizer)
    _scheduler = property(lambda self: self.active_schedule)
    _callbacks = property(lambda self: self._session.callbacks)
    _should_stop = property(
        lambda self: self.control.should_stop,
        lambda self, value: self.stop("a callback set _should_stop") if value else self.control.reset(),
    )


def _names_console(log: Any) -> bool:
    names = log if isinstance(log, (list, tuple)) else [log]
    return "console" in names
