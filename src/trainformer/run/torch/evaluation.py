"""Evaluation, prediction and embedding: which data, which model, in eval mode.

`Inference` runs a task over a source without training it; `Evaluation` decides which data are meant and loads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, Subset

from trainformer.backends.torch import TorchBackend, capture_random, restore_random
from trainformer.backends.torch.optimizers import modules_of
from trainformer.callbacks.base import CallbackList
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import DataSource, DeviceBatch, EvalResult
from trainformer.data.ids import sample_ids
from trainformer.data.labels import align_classes, is_stream
from trainformer.data.order import seed_generators
from trainformer.engine.evaluation import evaluate
from trainformer.engine.metric_values import as_metrics, check_unique
from trainformer.run.api import BatchLoader
from trainformer.run.logging import eval_progress
from trainformer.run.predictions import Columns, named_columns, rows_of
from trainformer.run.torch.data import TrainingData, is_loader, is_open, load, load_options, make_source
from trainformer.run.torch.settings import RunSettings
from trainformer.run.validation_sets import metric_name, validation_sets
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

    def evaluate(
        self,
        source: DataSource,
        name: str = "",
        most: int | None = None,
        model: nn.Module | None = None,
        quiet: bool = False,
    ) -> dict[str, float]:
        """Metrics of the whole source, or of its first `most` batches; `name` is that of the validation set.

        With `quiet`, callbacks do not hear of the progress.
        """
        batches = islice(source.batches(0), most)
        listeners = () if quiet else self.callbacks
        with self.eval_mode(model), eval_progress(listeners, self.owner, source.batches_per_epoch) as advance:
            process_group = self.backend.process_group
            if provides(self.task, "on_eval_begin"):
                self.task.on_eval_begin(BatchLoader(source, 1).dataset, name)
            metrics, rows = evaluate(
                self.backend, batches, self.backend.eval_step, self.reduces_rows, advance, process_group
            )
            if rows:
                metrics |= as_metrics(self.task.on_eval_end(rows), f"{type(self.task).__name__}.on_eval_end")
            if provides(self.task, "derive_metrics"):
                derived = self.task.derive_metrics(dict(metrics))
                metrics |= as_metrics(derived, f"{type(self.task).__name__}.derive_metrics")
        check_unique(metrics)
        if name and not metrics:
            raise DataError(f"Expected the validation set {name!r} to have metrics, received none: it has no batches.")
        if not metrics and most is None:
            logger.warning("the evaluation gave no metrics: does eval_step or on_eval_end return any?")
        return {metric_name(metric, name): value for metric, value in metrics.items()}

    def predict(self, source: DataSource, ids: Iterator[Any]) -> list[dict[str, Any]]:
        """One dict per sample, in input order."""
        batches: Iterable[Any] = [self.rows(source)]
        if provides(self.task, "merge_predictions"):
            batches = self.task.merge_predictions(batches)
        return [
            {"id": next(ids), **dict(zip(rows, row, strict=True))}
            for rows in batches
            for row in zip(*rows.values(), strict=True)
        ]

    def batches(self, source: DataSource) -> Iterator[dict[str, Tensor]]:
        """Predictions batch by batch, in input order, the same on every rank. One batch is in memory at a time."""
        process_group = self.backend.process_group
        with self.eval_mode(), eval_progress(self.callbacks, self.owner, source.batches_per_epoch) as advance:
            for batch in self.backend.feed(source.batches(0), train=False):
                rows = self._predict_batch(batch).rows
                if not process_group.is_single_process:
                    parts = process_group.all_gather_dp(rows)
                    rows = {name: self.backend.join_rows([part[name] for part in parts]) for name in rows}
                if advance is not None:
                    advance(batch.size)
                yield rows

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
    """Evaluates, predicts and embeds. `val_sources` are the validation batches by the name of the set."""

    def __init__(self, inference: Inference, settings: RunSettings, loaded: TrainingData) -> None:
        self.inference = inference
        self.task = inference.task
        self.settings = settings
        self.loaded = loaded
        self.val_sources = {name: self._source(data) for name, data in loaded.val_sets.items()}
        self._sampled: dict[tuple[str, int], DataSource] = {}  # the sampled subset of each validation set

    def validate(
        self,
        names: Iterable[str] = (),
        most: int | None = None,
        model: nn.Module | None = None,
        quiet: bool = False,
    ) -> dict[str, float]:
        """Metrics on the validation sets or their first `most` batches, with the usual model or another."""
        metrics: dict[str, float] = {}
        for name in names or self.val_sources:
            metrics |= self.inference.evaluate(self.val_sources[name], name, most, model, quiet)
        return metrics

    def can_repeat(self, names: Iterable[str] = ()) -> bool:
        """Whether these sets are datasets, or DataLoaders of datasets, which begin again whenever they are read."""
        sets = self.loaded.val_sets
        chosen = [sets[name] for name in names or sets]
        datasets = [data.dataset if isinstance(data, DataLoader) else data for data in chosen]
        return not any(is_loader(data) or is_stream(data) or isinstance(data, DataSource) for data in datasets)

    def evaluate(self, data: Any = None, batch_size: int | None = None, most: int | None = None) -> dict[str, float]:
        """Metrics on the validation data, or on other data, with classes numbered as in training."""
        if data is not None:
            metrics: dict[str, float] = {}
            for name, part in validation_sets(data, "data").items():
                labelled = align_classes(load(self.task, part), self.loaded.info.class_names, is_open(self.task))
                metrics |= self.inference.evaluate(self._source(labelled, batch_size), name, most=most)
            return metrics
        if not self.val_sources:
            raise DataError(
                "There is no validation data to evaluate on. Pass val_data or val_split to the trainer, "
                "or data to evaluate()."
            )
        return self.validate(most=most)

    def predict(self, data: Any, batch_size: int | None = None, **options: Any) -> list[dict[str, Any]]:
        """One dict per sample, in input order. `options` are those of a task that generates."""
        if self._generates(options):
            rows = [row for columns in self._generated(data, batch_size, options) for row in rows_of(columns)]
            return [{name: value for name, value in row.items() if name != "index"} for row in rows]
        return self.inference.predict(*self._inputs(data, batch_size))

    def predicted_columns(self, data: Any, batch_size: int | None = None, **options: Any) -> Iterator[Columns]:
        """Predictions with ids and class names, batch by batch. `options` are those of a task that generates."""
        if self._generates(options):
            return self._generated(data, batch_size, options)
        source, ids = self._inputs(data, batch_size)
        return named_columns(self.task, self.inference.batches(source), ids)

    def _generates(self, options: Mapping[str, Any]) -> bool:
        """Whether predictions are texts that the task generates for records."""
        generates = hasattr(self.task, "predict_records") and not hasattr(self.task, "predict_step")
        if options and not generates:
            what = f"no options of generate for {type(self.task).__name__}"
            raise BadArgument(expected(what, ", ".join(options)))
        return generates

    def _generated(self, data: Any, batch_size: int | None, options: Mapping[str, Any]) -> Iterator[Columns]:
        """The texts that a task generates for records. Every rank generates all of them."""
        records = self.task.load_prompts(data)
        size = batch_size or self.settings.eval_batch_size or self.settings.batch_size
        with (
            self.inference.eval_mode(),
            eval_progress(self.inference.callbacks, self.inference.owner, -(-len(records) // size)) as advance,
        ):
            rows = self.task.predict_records(records, size, **options)
            for index, (name, row) in enumerate(zip(sample_ids(records), rows, strict=False)):
                if advance is not None:
                    advance(1)
                yield {key: [value] for key, value in {"index": index, "id": name, **row}.items()}

    def _inputs(self, data: Any, batch_size: int | None) -> tuple[DataSource, Iterator[Any]]:
        """The batches of data to predict for, and the ids of the samples."""
        loaded = load(self.task, data)
        # Every input must have a row: unreadable samples raise here, whatever training does with them.
        if provides(self.task, "prediction_data"):
            loaded = self.task.prediction_data(loaded)
        source = self._source(loaded, batch_size, skip_bad=False)
        in_order = isinstance(loaded, DataLoader) and isinstance(loaded.sampler, SequentialSampler)
        return source, sample_ids(loaded.dataset if in_order else loaded)

    def embed(self, data: Any, max_samples: int | None = None) -> dict[str, Tensor]:
        """Embeddings (and labels) of data: "train", "val", "val/NAME", or anything that can be predicted for."""
        named = {f"val/{name}" if name else "val": part for name, part in self.loaded.val_sets.items()}
        known = {"train": self.loaded.train, **named}
        if isinstance(data, str) and data == "val" and "val" not in known:
            if not named:
                raise DataError("There is no validation data to embed. Pass val_data or val_split, or data to embed().")
            raise BadArgument(expected("the validation set to embed", data, f"There is {', '.join(named)}."))
        chosen = known[data] if isinstance(data, str) and data in known else load(self.task, data)
        rows = self.inference.rows(self._source(_subset(chosen, max_samples)))
        if "embedding" not in rows:
            raise BadArgument(
                f"{type(self.task).__name__} gives no embeddings: its predict_step returns {', '.join(rows)}. Return "
                "the embeddings of a batch as 'embedding', and the labels as 'label' where there are any."
            )
        return rows

    def sample_predictions(self, max_samples: int, inputs: Inputs, val_set: str | None = None) -> dict[str, Tensor]:
        """Inputs and predictions of up to `max_samples` samples of a validation set, evenly chosen."""
        sets = self.loaded.val_sets
        if not sets:
            raise DataError("There is no validation data. Pass val_data or val_split to the trainer.")
        name = next(iter(sets)) if val_set is None else val_set
        if name not in sets:
            raise BadArgument(expected(f"one of the validation sets {', '.join(sets)}", name))
        if (name, max_samples) not in self._sampled:
            self._sampled[name, max_samples] = self._source(_subset(sets[name], max_samples))
        rows = self.inference.rows(self._sampled[name, max_samples], inputs, max_samples)
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
