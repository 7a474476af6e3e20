"""The evaluation half of `Trainer`: dataloaders, prediction steps, metrics and predictions.

Users override most of this. An override is used wherever HF calls the method: `evaluate` also for evaluations during
training, `get_eval_dataloader` for every evaluation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainformer.core.errors import BadArgument
from trainformer.distributed import TorchProcessGroup, make_strategy
from trainformer.hf.base_trainer import BaseTrainer
from trainformer.hf.collate import as_dataset
from trainformer.hf.distributed import chosen_device, strategy_spec
from trainformer.hf.outputs import PredictionOutput, arrays, labels_of, logits_of
from trainformer.hf.task import ModelTask, accepts, are_class_labels, default_loss

if TYPE_CHECKING:
    from trainformer.hf.run import HfRun

logger = logging.getLogger("trainformer")


class EvaluatingTrainer(BaseTrainer):
    """A trainer that evaluates and predicts with a run; `Trainer` adds training."""

    _run: HfRun | None
    _eval_data: Any
    compute_metrics: Callable[[Any], Mapping[str, float]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    strategy: Any
    _process_group: TorchProcessGroup | None = None  # once it exists
    _warned_of_smoothing = False
    _called_by_run = False  # during an evaluation that the run asked for, and whose metrics it logs itself

    def _overrides(self, name: str) -> bool:
        """Whether a subclass of the user overrides a method."""
        return not getattr(type(self), name).__module__.startswith("trainformer.")

    def _join_strategy(self) -> Any:
        """Join the process group, and return the specification of the strategy."""
        spec = strategy_spec(self.strategy, self.args)
        strategy = make_strategy(spec)
        strategy.setup_environment(chosen_device(self.args), self.args.ddp_timeout)
        self._process_group = strategy.process_group
        self.args.logging_dir = self._process_group.broadcast(self.args.logging_dir)  # contains the time
        return spec

    def _num_replicas(self) -> int:
        """The number of data-parallel ranks, each of which computes a part of every batch."""
        if self._process_group is None:
            self._join_strategy()
        assert self._process_group is not None
        return self._process_group.dp_world_size

    def _ready_run(self, eval_dataset: Any = None) -> HfRun:
        """The current run; a new one if there is none."""
        self._prepare(None, self.eval_dataset if eval_dataset is None else eval_dataset)
        assert self._run is not None
        return self._run

    # -- dataloaders ---------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """A dataloader of the training data. Override it to use your own.

        Its batches are global: each rank computes its part. A dataloader with a `DistributedSampler` yields the
        batches of one rank instead.
        """
        shuffle = self.args.train_sampling_strategy == "random" and not is_stream(self.train_dataset)
        options = {"shuffle": shuffle, "drop_last": self.args.dataloader_drop_last}
        return self._dataloader(self.train_dataset, "train_dataset", self.args.per_device_train_batch_size, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A dataloader of the evaluation data. Override it to use your own."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        return self._dataloader(data, "eval_dataset", self.args.per_device_eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """A dataloader of the data to predict. Override it to use your own."""
        return self._dataloader(test_dataset, "test_dataset", self.args.per_device_eval_batch_size)

    def _dataloader(self, data: Any, name: str, batch_size: int, **options: Any) -> DataLoader:
        if data is None:
            raise BadArgument(f"Expected a {name}, received none. Pass it to the trainer.")
        args, model = self.args, self.make_model()
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["persistent_workers"] = args.dataloader_persistent_workers
        return DataLoader(
            as_dataset(data),
            batch_size=batch_size * self._num_replicas(),
            collate_fn=ModelTask(self, model, self._label_names(model)).collate_fn,
            num_workers=args.dataloader_num_workers,
            generator=torch.Generator().manual_seed(args.seed),
            **options,
        )

    def _label_names(self, model: nn.Module) -> list[str]:
        if self.args.label_names:
            return list(self.args.label_names)
        return [name for name in ("start_positions", "end_positions") if accepts(model, name)] or ["labels"]

    # -- steps ---------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a batch over its `num_items_in_batch` supervised items. Override it to use your own."""
        name, smoothing = self._label_names(model)[0], self.args.label_smoothing_factor
        if smoothing and isinstance(inputs, Mapping) and not are_class_labels(name, inputs.get(name)):
            if not self._warned_of_smoothing:
                logger.warning("label_smoothing_factor has no effect: %s are not classes", name)
            self._warned_of_smoothing = True
        loss, outputs = default_loss(model, inputs, name, smoothing, self.loss_fn, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a batch; the loss is None without labels."""
        assert self._run is not None
        names = self._label_names(model)
        labels = [inputs.get(name) for name in names] if isinstance(inputs, Mapping) else [inputs[1]]
        if any(label is None for label in labels):
            outputs = model(**inputs)
            loss = None
        else:
            items = self._run.task.weight_of(inputs)
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
        if prediction_loss_only:
            return loss, None, None
        logits, targets = logits_of(outputs, model, ignore_keys or ()), labels_of(labels)
        if self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, targets)
        return loss, logits, targets

    # -- evaluation ----------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the current model on the evaluation data, or on another dataset."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        if isinstance(data, dict):
            metrics: dict[str, float] = {}
            for name, part in data.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if data is None and not self._overrides("get_eval_dataloader"):
            raise BadArgument("Expected an eval_dataset to evaluate on, received none. Pass it to the trainer or here.")
        with self._process_settings():
            found = self._evaluate_with(self._ready_run(data), data, ignore_keys)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        if self._called_by_run:
            return metrics
        metrics["epoch"] = self.state.epoch
        self.log(metrics)
        self._dispatch_event("on_evaluate", metrics=metrics)
        return metrics

    def _eval_loop(self) -> dict[str, float]:
        found = self._evaluate_with(self._ready_run(self._eval_data), self._eval_data)
        return {f"eval_{name}": value for name, value in found.items()}

    def _evaluate_with(
        self,
        run: HfRun,
        data: Any,
        ignore_keys: Collection[str] | None = None,
        get_dataloader: Callable[..., Any] | None = None,
    ) -> dict[str, float]:
        """Metrics without a prefix. Uses `get_dataloader` (default: `get_eval_dataloader`) if the user overrides it."""
        get_dataloader = get_dataloader or self.get_eval_dataloader
        source = as_dataset(data)
        if self._overrides(get_dataloader.__name__):
            source = get_dataloader() if data is None or data is self.eval_dataset else get_dataloader(data)
        limit = self.args.max_eval_steps if self.args.max_eval_steps > 0 else None
        with run.task.ignoring(ignore_keys or ()):
            metrics = run.evaluate_on(source, most=limit)
        return {name.removeprefix("val/"): value for name, value in metrics.items()}

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predictions for a dataset, and metrics if it has labels."""
        with self._process_settings():
            run = self._ready_run(test_dataset)
            with run.task.collecting() as rows:
                found = self._evaluate_with(run, test_dataset, ignore_keys, self.get_test_dataloader)
                predictions, labels = arrays(rows, "logits"), arrays(rows, "labels")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self._dispatch_event("on_predict", metrics=metrics)
        return PredictionOutput(predictions, labels, metrics)


def is_stream(data: Any) -> bool:
    """Whether data can only be iterated."""
    return isinstance(as_dataset(data), IterableDataset)
