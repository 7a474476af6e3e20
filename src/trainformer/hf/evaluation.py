"""What a trainer in HuggingFace's style does with data it is not trained on: loaders, metrics, predictions.

Users override most of this. An override counts wherever HuggingFace calls the method: that of `evaluate` also for the
evaluations during training, that of `get_eval_dataloader` for every evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainformer.callbacks.compat.huggingface import our_name
from trainformer.core.errors import BadArgument
from trainformer.hf.base_trainer import BaseTrainer
from trainformer.hf.collate import as_dataset
from trainformer.hf.prediction import EvalPrediction, PredictionOutput, arrays, label_arrays, logits_of
from trainformer.hf.task import ModelTask, takes


class EvaluatingTrainer(BaseTrainer):
    """A trainer that runs on a session; the half of it that measures."""

    _run: Any
    _eval_data: Any
    compute_metrics: Callable[[Any], Mapping[str, float]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    _is_asked_by_run = False  # an evaluation that the run asked for: the run itself tells everybody what comes out

    def _overrides(self, name: str) -> bool:
        raise NotImplementedError

    def _parts(self) -> int:
        """Into how many parts each batch is divided over processes."""
        raise NotImplementedError

    def total_of_ranks(self, samples: int) -> float:
        """The samples that all processes have evaluated; those that hold parts of one model see the same ones."""
        process_group = self._run.process_group
        return (
            process_group.all_reduce_sum([float(samples)])[0] * process_group.dp_world_size / process_group.world_size
        )

    def _task(self) -> ModelTask:
        assert self._run is not None
        return self._run.task

    # -- loaders -------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """A loader of the training data. Override it to bring another, which is then used as it is.

        Its batches are those of all processes together, and each computes its part. A loader with a
        `DistributedSampler` has those of one process.
        """
        shuffle = self.args.train_sampling_strategy == "random" and not is_stream(self.train_dataset)
        options = {"shuffle": shuffle, "drop_last": self.args.dataloader_drop_last}
        return self._loader(self.train_dataset, "train_dataset", self.args.per_device_train_batch_size, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A loader of the evaluation data. Override it to bring another, which is then used as it is."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        return self._loader(data, "eval_dataset", self.args.per_device_eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """A loader of data to predict for. Override it to bring another, which is then used as it is."""
        return self._loader(test_dataset, "test_dataset", self.args.per_device_eval_batch_size)

    def _loader(self, data: Any, name: str, size: int, **options: Any) -> DataLoader:
        if data is None:
            raise BadArgument(f"Expected a {name}, received none. Pass it to the trainer.")
        args, model = self.args, self.make_model()
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["persistent_workers"] = args.dataloader_persistent_workers
        return DataLoader(
            as_dataset(data),
            batch_size=size * self._parts(),
            collate_fn=ModelTask(self, model, self._label_names(model)).collate_fn,
            num_workers=args.dataloader_num_workers,
            generator=torch.Generator().manual_seed(args.seed),
            **options,
        )

    def _label_names(self, model: nn.Module) -> list[str]:
        if self.args.label_names:
            return list(self.args.label_names)
        named = [name for name in ("start_positions", "end_positions") if takes(model, name)]
        return named or ["labels"]

    # -- steps ---------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a batch over its supervised items."""
        raise NotImplementedError

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a batch; without labels there is no loss."""
        task = self._task()
        names = self._label_names(model)
        labels = [inputs.get(name) for name in names] if isinstance(inputs, Mapping) else [inputs[1]]
        if any(label is None for label in labels):
            outputs = model(**inputs)
            loss = None
        else:
            items = task.weight_of(inputs)
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
        if prediction_loss_only:
            return loss, None, None
        logits, targets = logits_of(outputs, model, ignore_keys or ()), label_arrays(labels)
        if self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, targets)
        return loss, logits, targets

    def metrics_of(self, rows: Mapping[str, Tensor]) -> Mapping[str, float]:
        """What `compute_metrics` says of the rows of an evaluation."""
        predictions, labels = arrays(rows, "logits"), arrays(rows, "labels")
        if self.compute_metrics is None or predictions is None or labels is None:
            return {}
        further = arrays(rows, "inputs"), arrays(rows, "losses")
        found = self.compute_metrics(EvalPrediction(predictions, labels, *further))
        return {name.removeprefix("eval_"): value for name, value in found.items()}

    # -- evaluation ----------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of the evaluation data, or of other data, with the model as it is now."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        if isinstance(data, dict):
            parts = {
                name: self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in data.items()
            }
            return {name: value for part in parts.values() for name, value in part.items()}
        if data is None and not self._overrides("get_eval_dataloader"):
            raise BadArgument("Expected an eval_dataset to evaluate on, received none. Pass it to the trainer or here.")
        with self._process_settings():
            self._prepare(None, data)
            measured = self._measured(data, ignore_keys)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        if self._is_asked_by_run:
            return metrics
        metrics["epoch"] = self.state.epoch
        self.log(metrics)
        self._dispatch_event("on_evaluate", metrics=metrics)
        return metrics

    def _eval_loop(self) -> dict[str, float]:
        return {f"eval_{name}": value for name, value in self._measured(self._eval_data).items()}

    def _measured(
        self, data: Any, ignore_keys: Collection[str] | None = None, loader: Callable[..., Any] | None = None
    ) -> dict[str, float]:
        """Metrics of data, without a prefix; what `loader` makes of them is evaluated, where the user overrides it."""
        assert self._run is not None
        most = self.args.max_eval_steps if self.args.max_eval_steps > 0 else None
        make = loader or self.get_eval_dataloader
        source = as_dataset(data)
        if self._overrides(make.__name__):
            source = make() if data is None or data is self.eval_dataset else make(data)
        with self._task().ignoring(ignore_keys or ()):
            metrics = self._run.evaluate_on(source, most=most)
        return {name.removeprefix("val/"): value for name, value in metrics.items()}

    def evaluates_as_usual(self) -> bool:
        """Whether an evaluation during training is one of the whole of one data set, by this class."""
        usual = not isinstance(self.eval_dataset, dict) and self.args.max_eval_steps <= 0
        return usual and not self._overrides("evaluate")

    def evaluate_all(self) -> dict[str, float]:
        """The evaluation during training where there are several data sets, a limit, or an `evaluate` of the user's."""
        with self._asked_by_run():
            found = self.evaluate()
        metrics = {name: value for name, value in (found or {}).items() if isinstance(value, Real)}
        return {our_name(name): value for name, value in metrics.items() if name != "epoch"}

    @contextmanager
    def _asked_by_run(self) -> Iterator[None]:
        self._is_asked_by_run = True
        try:
            yield
        finally:
            self._is_asked_by_run = False

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predictions for data, and metrics where they have labels."""
        with self._process_settings():
            self._prepare(None, test_dataset)
            with self._task().collecting() as rows:
                measured = self._measured(test_dataset, ignore_keys, self.get_test_dataloader)
                predictions, labels = arrays(rows, "logits"), arrays(rows, "labels")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self._dispatch_event("on_predict", metrics=metrics)
        return PredictionOutput(predictions, labels, metrics)


def is_stream(data: Any) -> bool:
    """Whether data can only be iterated."""
    return isinstance(as_dataset(data), IterableDataset)
