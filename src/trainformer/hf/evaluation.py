"""The evaluation half of `Trainer`: the evaluation loop, metrics and predictions.

Users override most of this. An override is used wherever HF calls the method: `evaluate` and `evaluation_loop` also
for evaluations during training, `get_eval_dataloader` for every evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.hf.collecting import EvalScope, join, map_tensors
from trainformer.hf.dataloaders import PlainDataLoader
from trainformer.hf.features import cast_for_evaluation
from trainformer.hf.outputs import EvalLoopOutput, EvalPrediction, PredictionOutput
from trainformer.hf.run import HfRun
from trainformer.hf.steps import SteppingTrainer


class EvaluatingTrainer(SteppingTrainer):
    """A trainer that evaluates and predicts with a run; `Trainer` adds training."""

    _run: HfRun | None
    _eval_data: Any
    compute_metrics: Callable[..., Mapping[str, Any] | None] | None
    _called_by_run = False  # during an evaluation that the run asked for, which sends the metrics to its loggers
    model_preparation_time: float | None = None

    def _ready_run(self, eval_dataset: Any = None) -> HfRun:
        """The current run; a new one if there is none."""
        self._prepare(None, self.eval_dataset if eval_dataset is None else eval_dataset)
        assert self._run is not None
        return self._run

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Evaluate the current model on the evaluation data, or on another dataset.

        Of a dict of datasets, each is evaluated, and its name becomes part of the prefix.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            found: dict[str, Any] = {}
            for name, part in data.items():
                one = name if eval_dataset is None else part
                found |= self.evaluate(one, ignore_keys=ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return found
        if data is None and not self._overrides("get_eval_dataloader"):
            raise BadArgument("Expected an eval_dataset to evaluate on, received none. Pass it to the trainer or here.")
        loader = self.get_eval_dataloader(eval_dataset)
        began = time.perf_counter()
        loss_only = True if self.compute_metrics is None else None
        output = self.evaluation_loop(
            loader, "Evaluation", loss_only, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = output.metrics
        metrics |= self._speed(metric_key_prefix, began, output.num_samples)
        with self._eval_mode():  # by which overrides of `log` know an evaluation
            self.log(metrics)
            metrics.setdefault("epoch", self.state.epoch)
            self._dispatch_event("on_evaluate", metrics=metrics)
        return metrics

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """The model in eval mode; each of its modules gets its own mode back."""
        trained = [module for module in self.make_model().modules() if module.training]
        self.make_model().eval()
        try:
            yield
        finally:
            for module in trained:
                module.training = True

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, Any]:
        """An evaluation during training. Override it to change what is evaluated then."""
        return self.evaluate(ignore_keys=ignore_keys_for_eval)

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predictions for a dataset, and metrics if it has labels."""
        loader = self.get_test_dataloader(test_dataset)
        began = time.perf_counter()
        output = self.evaluation_loop(
            loader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        output.metrics.update(self._speed(metric_key_prefix, began, output.num_samples))
        self._dispatch_event("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss, metrics and predictions of the batches of a dataloader, with `prediction_step`.

        `evaluate()` and `predict()` call it; override it to change both.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        by_batch = BatchMetrics(self) if self.args.batch_eval_metrics and self.compute_metrics is not None else None
        scope = EvalScope(
            loss_only,
            ignore_keys,
            concat=self.args.eval_do_concat_batches,
            keeps=by_batch is None or description == "Prediction",
            on_batch=by_batch and by_batch.add,
        )
        limit = self.args.max_eval_steps if self.args.max_eval_steps > 0 else None
        with self._process_settings():
            began = time.perf_counter()
            is_new = self._run is None
            run = self._ready_run(getattr(dataloader, "dataset", None))
            if is_new and self.model_preparation_time is None:
                self.model_preparation_time = round(time.perf_counter() - began, 4)
            run.eval_dataloader = dataloader
            if not self.is_in_train:
                cast_for_evaluation(run.task.model, self.args)
            with run.task.evaluating(scope):
                found = run.evaluate_on(self._source_of(dataloader, run), most=limit)
        if not run.process_group.is_single_process:
            scope.predictions.gather(run.process_group.all_gather_dp)
        metrics = by_batch.result() if by_batch is not None else self._compute_metrics(scope)
        metrics |= {name.removeprefix("val/"): value for name, value in found.items()}
        if self.model_preparation_time is not None:
            metrics["model_preparation_time"] = self.model_preparation_time
        prefix = f"{metric_key_prefix}_"
        named = {name if name.startswith(prefix) else prefix + name: value for name, value in metrics.items()}
        samples = int(run.process_group.all_reduce_sum([float(scope.samples)])[0])
        predictions, labels = scope.predictions.arrays("logits"), scope.predictions.arrays("labels")
        ranks = run.process_group
        return EvalLoopOutput(predictions, labels, named, samples * ranks.dp_world_size // ranks.world_size)

    def _source_of(self, dataloader: Any, run: HfRun) -> Any:
        """What the run reads: its own source or a dataset for a loader of ours, otherwise the loader itself."""
        if not isinstance(dataloader, PlainDataLoader):
            return dataloader
        return None if run.reads(dataloader.dataset) else dataloader.dataset

    def _compute_metrics(self, scope: EvalScope) -> dict[str, Any]:
        """What `compute_metrics` returns for all predictions, as plain Python values."""
        parts = {kind: scope.predictions.arrays(kind) for kind in ("logits", "labels", "inputs", "losses")}
        if self.compute_metrics is None or parts["logits"] is None or parts["labels"] is None:
            return {}
        found = EvalPrediction(parts["logits"], parts["labels"], parts["inputs"], parts["losses"])
        return plain_metrics(self.compute_metrics(found))

    def _speed(self, prefix: str, began: float, samples: int) -> dict[str, float]:
        """HF's duration and throughput."""
        seconds = max(time.perf_counter() - began, 1e-9)
        steps = -(-samples // (self.args.eval_batch_size * self._num_replicas()))
        return {
            f"{prefix}_runtime": round(seconds, 4),
            f"{prefix}_samples_per_second": round(samples / seconds, 3),
            f"{prefix}_steps_per_second": round(steps / seconds, 3),
        }

    def _eval_loop(self) -> dict[str, float]:
        loader = self.get_eval_dataloader(self._eval_data)
        loss_only = True if self.compute_metrics is None else None
        return self.evaluation_loop(loader, "Evaluation", loss_only).metrics


class BatchMetrics:
    """`compute_metrics` for each batch (`batch_eval_metrics`), with ``compute_result=True`` for the last one.

    A batch is held back until the next one arrives: only then it is known not to be the last.
    """

    def __init__(self, trainer: EvaluatingTrainer) -> None:
        self._trainer = trainer
        self._held: dict[str, Any] | None = None

    def add(self, **outputs: Any) -> None:
        """Compute the metrics of the batch before this one."""
        self._compute(is_last=False)
        self._held = map_tensors(lambda tensor: tensor.detach(), outputs)

    def result(self) -> dict[str, Any]:
        """The metrics of the evaluation, which the last call returns."""
        return plain_metrics(self._compute(is_last=True))

    def _compute(self, is_last: bool) -> Any:
        held, self._held = self._held, None
        if held is None or held["logits"] is None or held["labels"] is None:
            return None
        run = self._trainer._run
        if run is not None and not run.process_group.is_single_process:
            ranks = run.process_group.all_gather_dp(map_tensors(lambda tensor: tensor.cpu(), held))
            held = {kind: None if held[kind] is None else join([one[kind] for one in ranks]) for kind in held}
        found = EvalPrediction(held["logits"], held["labels"], held["inputs"], held["losses"])
        assert self._trainer.compute_metrics is not None
        return self._trainer.compute_metrics(found, compute_result=is_last)


def plain_metrics(metrics: Any) -> dict[str, Any]:
    """What `compute_metrics` returned as plain Python values; empty for None.

    >>> import numpy as np
    >>> plain_metrics({"accuracy": np.float32(0.5), "per_class": np.array([1, 0]), "note": "ok"})
    {'accuracy': 0.5, 'per_class': [1, 0], 'note': 'ok'}
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        do = "Return a dict from names to values."
        raise BadArgument(expected("compute_metrics to return a dict", type(metrics).__name__, do))
    return {str(name): _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(part) for part in value)
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    return value
