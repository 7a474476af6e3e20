"""Evaluation, prediction and embedding: which data, which model, in eval mode.

`Inference` runs a task over a source without training it; `Evaluation` decides which data are meant and loads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from trainformer.backends.torch import TorchBackend, capture_random, restore_random
from trainformer.backends.torch.optimizers import modules_of
from trainformer.callbacks.base import CallbackList
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import DataSource, DeviceBatch, EvalResult
from trainformer.data.labels import align_classes, is_stream
from trainformer.data.order import seed_generators
from trainformer.engine.evaluation import evaluate
from trainformer.engine.metric_values import as_metrics, check_unique
from trainformer.run.logging import eval_progress
from trainformer.run.torch.data import TrainingData, is_loader, is_open, load, load_options, make_source
from trainformer.run.torch.settings import RunSettings
from trainformer.tasks.base import provides

logger = logging.getLogger("trainformer")

#: Maps a batch to tensors with one row per sample.
Inputs = Callable[[Any], dict[str, Tensor]]


class Inference:
    """Runs a task in eval mode. Training continues afterwards as if nothing had happened."""

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
        with self.eval_mode(model), eval_progress(self.callbacks, self.owner, source.batches_per_epoch) as advance:
            process_group = self.backend.process_group
            metrics, rows = evaluate(
                self.backend, batches, self.backend.eval_step, self.reduces_rows, advance, process_group
            )
            if rows:
                metrics |= as_metrics(self.task.on_eval_end(rows), f"{type(self.task).__name__}.on_eval_end")
            if provides(self.task, "derive_metrics"):
                derived = self.task.derive_metrics(dict(metrics))
                metrics |= as_metrics(derived, f"{type(self.task).__name__}.derive_metrics")
        check_unique(metrics)
        if not metrics and most is None:
            logger.warning("the evaluation gave no metrics: does eval_step or on_eval_end return any?")
        return {name if name.startswith("val/") else f"val/{name}": value for name, value in metrics.items()}

    def predict(self, source: DataSource) -> list[dict[str, Tensor]]:
        """One dict per sample, in input order."""
        rows = self.rows(source)
        return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]

    def rows(self, source: DataSource, inputs: Inputs | None = None, most: int | None = None) -> dict[str, Tensor]:
        """Predictions for a source, or for its first `most` batches: one row per sample, in input order.

        `inputs` maps each batch to further columns.
        """

        def step(batch: DeviceBatch) -> EvalResult:
            result = self._predict_batch(batch)
            if inputs is not None:
                taken = inputs(batch.data)
                result.rows.update({name: rows[: batch.size].detach().cpu() for name, rows in taken.items()})
            return result

        with self.eval_mode(), eval_progress(self.callbacks, self.owner, source.batches_per_epoch) as advance:
            process_group = self.backend.process_group
            _, rows = evaluate(
                self.backend,
                islice(source.batches(0), most),
                step,
                keep_rows=True,
                on_batch=advance,
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
        """The model to evaluate: one that a callback provides (an EMA), else the one that is trained."""
        offers = [cb.inference_model() for cb in self.callbacks if hasattr(cb, "inference_model")]
        model: nn.Module = next((m for m in reversed(offers) if m is not None), self.task.model)
        return model

    @contextmanager
    def eval_mode(self, model: nn.Module | None = None) -> Iterator[None]:
        """Eval mode with the model to evaluate and its own random numbers.

        Evaluations must not change the random numbers that training draws. Each module gets its own mode back
        afterwards: evaluating in the middle of training must not leave dropout off.
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


class Evaluation:
    """Evaluates, predicts and embeds. `val_source` are the validation batches, if there are any."""

    def __init__(self, inference: Inference, settings: RunSettings, loaded: TrainingData) -> None:
        self.inference = inference
        self.task = inference.task
        self.settings = settings
        self.loaded = loaded
        self.val_source = None if loaded.val is None else self._source(loaded.val)
        self._sampled: tuple[int, DataSource] | None = None  # the last sampled subset

    def validate(self, most: int | None = None, model: nn.Module | None = None) -> dict[str, float]:
        """Metrics on the validation data or its first `most` batches, with the usual model or another."""
        assert self.val_source is not None
        return self.inference.evaluate(self.val_source, most=most, model=model)

    def evaluate(self, data: Any = None, batch_size: int | None = None, most: int | None = None) -> dict[str, float]:
        """Metrics on the validation data, or on other data, with classes numbered as in training."""
        if data is not None:
            labelled = align_classes(load(self.task, data), self.loaded.info.class_names, is_open(self.task))
            return self.inference.evaluate(self._source(labelled, batch_size), most=most)
        if self.val_source is None:
            raise DataError(
                "There is no validation data to evaluate on. Pass val_data or val_split to the trainer, "
                "or data to evaluate()."
            )
        return self.validate(most)

    def predict(self, data: Any, batch_size: int | None = None) -> list[dict[str, Tensor]]:
        """One dict per sample, in input order."""
        # Every input must have a row: unreadable samples raise here, whatever training does with them.
        return self.inference.predict(self._source(load(self.task, data), batch_size, skip_bad=False))

    def embed(self, data: Any, max_samples: int | None = None) -> dict[str, Tensor]:
        """Embeddings (and labels) of data: "train", "val", or anything that can be predicted for."""
        known = {"train": self.loaded.train, "val": self.loaded.val}
        chosen = known[data] if isinstance(data, str) and data in known else load(self.task, data)
        if chosen is None:
            raise DataError("There is no validation data to embed. Pass val_data or val_split, or data to embed().")
        rows = self.inference.rows(self._source(_subset(chosen, max_samples)))
        if "embedding" not in rows:
            raise BadArgument(
                f"{type(self.task).__name__} gives no embeddings: its predict_step returns {', '.join(rows)}. Return "
                "the embeddings of a batch as 'embedding', and the labels as 'label' where there are any."
            )
        return rows

    def sample_predictions(self, max_samples: int, inputs: Inputs) -> dict[str, Tensor]:
        """Inputs and predictions of up to `max_samples` samples of the validation data, evenly chosen."""
        if self.loaded.val is None:
            raise DataError("There is no validation data. Pass val_data or val_split to the trainer.")
        if self._sampled is None or self._sampled[0] != max_samples:
            self._sampled = max_samples, self._source(_subset(self.loaded.val, max_samples))
        rows = self.inference.rows(self._sampled[1], inputs, max_samples)
        return {name: values[:max_samples] for name, values in rows.items()}

    def _source(self, data: Any, batch_size: int | None = None, **options: Any) -> DataSource:
        """Batches of loaded data in order; `options` override those of the run."""
        size = batch_size or self.settings.eval_batch_size
        backend = self.inference.backend
        usual = load_options(self.settings, backend.device, backend.process_group, size)
        return make_source(self.task, data, replace(usual, **options), train=False)


def _subset(data: Any, most: int | None) -> Any:
    """At most `most` samples, evenly spaced: a dataset may be sorted by class."""
    if most is None or is_loader(data) or is_stream(data) or len(data) <= most:
        return data
    places = torch.linspace(0, len(data) - 1, most, dtype=torch.float64).round().long().tolist()
    return Subset(data, places)
