"""Evaluation and prediction with a task: which model is judged, in which mode, and what becomes of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import Tensor, nn

from trainformer.backends.torch import TorchBackend, capture_random, restore_random
from trainformer.backends.torch.optimizers import modules_of
from trainformer.callbacks.base import CallbackList
from trainformer.core.errors import BadArgument
from trainformer.core.types import DataSource, DeviceBatch, EvalResult
from trainformer.data.order import seed_generators
from trainformer.engine.evaluation import evaluate
from trainformer.run.progress import showing_progress
from trainformer.tasks.base import provides

#: Takes from a batch tensors with one row per sample.
Inputs = Callable[[Any], dict[str, Tensor]]


class Inference:
    """Runs a task without training it. Training goes on afterwards as if nothing had happened."""

    def __init__(self, owner: Any, task: Any, backend: TorchBackend, callbacks: CallbackList, seed: int) -> None:
        self.owner = owner
        self.task = task
        self.backend = backend
        self.callbacks = callbacks
        self.seed = seed
        self.reduces_rows = provides(task, "on_eval_end")

    def evaluate(self, source: DataSource, most: int | None = None, model: nn.Module | None = None) -> dict[str, float]:
        """Metrics named ``val/...`` of the whole source, or of its first `most` batches."""
        batches = islice(source.batches(0), most)
        with self.apart(model), showing_progress(self.callbacks, self.owner, source.batches_per_epoch) as tell:
            process_group = self.backend.process_group
            metrics, rows = evaluate(
                self.backend, batches, self.backend.eval_step, self.reduces_rows, tell, process_group
            )
            if rows:
                metrics |= {name: float(value) for name, value in (self.task.on_eval_end(rows) or {}).items()}
            if provides(self.task, "derive_metrics"):
                metrics |= self.task.derive_metrics(metrics)
        return {name if name.startswith("val/") else f"val/{name}": value for name, value in metrics.items()}

    def predict(self, source: DataSource) -> list[dict[str, Tensor]]:
        """One dict per sample, in input order."""
        rows = self.rows(source)
        return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]

    def rows(self, source: DataSource, inputs: Inputs | None = None, most: int | None = None) -> dict[str, Tensor]:
        """What is predicted for the source, or its first `most` batches: one row per sample, in input order.

        `inputs` takes from each batch what is to stand beside the predictions.
        """

        def step(batch: DeviceBatch) -> EvalResult:
            result = self._predict_batch(batch)
            if inputs is not None:
                taken = inputs(batch.data)
                result.rows.update({name: rows[: batch.size].detach().cpu() for name, rows in taken.items()})
            return result

        with self.apart(), showing_progress(self.callbacks, self.owner, source.batches_per_epoch) as tell:
            process_group = self.backend.process_group
            _, rows = evaluate(
                self.backend,
                islice(source.batches(0), most),
                step,
                keep_rows=True,
                on_batch=tell,
                process_group=process_group,
            )
        return rows

    def _predict_batch(self, batch: DeviceBatch) -> EvalResult:
        function = self.task.predict_step if hasattr(self.task, "predict_step") else self.task.eval_step
        result = self.backend.infer(function, batch)
        if not result.rows:
            raise BadArgument(
                f"{type(self.task).__name__} has no predict_step, and its eval_step returns no per-sample rows, so "
                "there is nothing to predict. Define predict_step(batch) returning tensors with one row per sample."
            )
        return result

    def model(self) -> nn.Module:
        """The model to be judged: an average that a callback keeps, else the one that is trained."""
        offers = [cb.inference_model() for cb in self.callbacks if hasattr(cb, "inference_model")]
        return next((m for m in reversed(offers) if m is not None), self.task.model)

    @contextmanager
    def apart(self, model: nn.Module | None = None) -> Iterator[None]:
        """Evaluation mode, the model to be judged, and random numbers of its own.

        What an evaluation draws must not change how training goes on, however often one evaluates. Each module gets its
        own mode back: whoever looks at a model in the middle of a run must not leave it without dropout.
        """
        trained, random = self.task.model, capture_random()
        parts = [part for module in modules_of(self.task).values() for part in module.modules() if part.training]
        try:
            self.task.model = self.model() if model is None else model
            self.backend.evaluating()
            seed_generators(self.seed)
            yield
        finally:
            self.task.model = trained
            for part in parts:
                part.training = True
            restore_random(random)
