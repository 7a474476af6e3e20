"""The data half of `Trainer`: dataloaders, samplers, and which columns the model receives.

Users override any of it, with the effect known from HF. What is not overridden is read by the run itself, which
resumes at its position; an overridden loader or sampler is read batch by batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from trainformer.core.errors import BadArgument, expected
from trainformer.data.mixture.dataset import MixtureDataset
from trainformer.data.mixture.mixture import Mixture
from trainformer.data.mixture.order import MixtureSampler
from trainformer.distributed import TorchProcessGroup, make_strategy
from trainformer.hf.base_trainer import BaseTrainer
from trainformer.hf.collate import Collator, as_dataset, inner_model
from trainformer.hf.distributed import chosen_device, strategy_spec

#: Methods whose override means that the run reads the user's loader instead of the dataset.
_TRAIN_DATA = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader", "_remove_unused_columns")
_EVAL_DATA = ("_get_eval_sampler", "_get_dataloader", "_remove_unused_columns")


class PlainDataLoader(DataLoader):
    """A loader with nothing of the user's own: the run may read its dataset directly."""

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a batch, over all ranks."""
        return self.batch_size


class LoadingTrainer(BaseTrainer):
    """A trainer that makes dataloaders."""

    strategy: Any
    _process_group: TorchProcessGroup | None = None  # once it exists
    _signature_columns: list[str] | None = None
    label_names: list[str]
    _eval_loaders: Mapping[str, Any] = MappingProxyType({})  # those with persistent workers, by dataset

    def _overrides(self, *names: str) -> bool:
        """Whether a subclass of the user overrides one of these methods, or the trainer was given its own."""
        return any(
            name in vars(self) or not getattr(type(self), name).__module__.startswith("trainformer.") for name in names
        )

    # -- processes -----------------------------------------------------------------------------------------

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

    # -- dataloaders ---------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """A dataloader of the training data. Override it to use your own.

        Its batches are global: each rank computes its part. A dataloader with a `DistributedSampler` yields the
        batches of one rank instead.
        """
        size = self._train_batch_size
        return self._get_dataloader(self.train_dataset, "Training", size, self._get_train_sampler, is_training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A dataloader of the evaluation data, of another dataset, or of one of several by its name."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        kept = self._eval_loaders.get(key)
        if kept is not None and kept.dataset is as_dataset(data):
            return kept  # with its workers
        size = self.args.eval_batch_size
        loader = self._get_dataloader(data, "Evaluation", size, self._get_eval_sampler, dataloader_key=key)
        if self.args.dataloader_persistent_workers and not isinstance(loader.dataset, IterableDataset):
            self._eval_loaders = {**self._eval_loaders, key: loader}
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """A dataloader of the data to predict. Override it to use your own."""
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """A dataloader with the columns that the model accepts, and the batches of all ranks."""
        if dataset is None:
            name = {"Training": "train_dataset", "Evaluation": "eval_dataset"}.get(description, "test_dataset")
            raise BadArgument(f"Expected a {name}, received none. Pass it to the trainer.")
        args, data = self.args, as_dataset(dataset)
        if isinstance(data, Mixture):
            do = "The trainer reads it by itself: leave get_train_dataloader and the like as they are."
            raise BadArgument(expected("a dataset to make a dataloader of", "a Mixture", do))
        options: dict[str, Any] = {}
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["persistent_workers"] = args.dataloader_persistent_workers
            options["multiprocessing_context"] = args.dataloader_multiprocessing_context
            options["in_order"] = args.dataloader_in_order
        if not isinstance(data, IterableDataset):
            options["drop_last"] = args.dataloader_drop_last and is_training
            options["sampler"] = None if sampler_fn is None else sampler_fn(data)
        collate = self.data_collator
        if self._overrides("_remove_unused_columns") and hasattr(data, "column_names"):
            data = self._remove_unused_columns(data, description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description)
        mine = self._overrides(*(_TRAIN_DATA[1:] if is_training else _EVAL_DATA))
        kind = DataLoader if mine else PlainDataLoader
        if isinstance(options.get("sampler"), Sampler) and _yields_batches(options["sampler"]):
            options["batch_sampler"] = options.pop("sampler")
            options.pop("drop_last")
        else:
            options["batch_size"] = batch_size * self._num_replicas()
        return kind(
            data,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            generator=torch.Generator().manual_seed(args.seed),
            **options,
        )

    # -- samplers ------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The sampler of `train_sampling_strategy`; None for a stream. Override it to use your own."""
        data = self.train_dataset if train_dataset is None else train_dataset
        if data is None or is_stream(data):
            return None
        if self.args.train_sampling_strategy == "sequential":
            return TorchSequentialSampler(data)
        if self.args.train_sampling_strategy == "group_by_length":
            from transformers.trainer_pt_utils import LengthGroupedSampler

            size = self._train_batch_size * self.args.gradient_accumulation_steps
            names = getattr(self.processing_class, "model_input_names", None) or ["input_ids"]
            return LengthGroupedSampler(size, dataset=data, model_input_name=names[0])
        return RandomSampler(data, generator=torch.Generator().manual_seed(self.args.seed))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The sampler for evaluation: in order; None for a stream. Override it to use your own."""
        return None if eval_dataset is None or is_stream(eval_dataset) else TorchSequentialSampler(eval_dataset)

    @property
    def _train_batch_size(self) -> int:
        """Samples per device and micro-batch."""
        return self.args.train_batch_size

    # -- columns -------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Fill `_signature_columns`, the columns to keep: the parameters of the model's forward, and labels.

        Override it to keep other columns. An empty list keeps all.
        """
        if self._signature_columns is not None:
            return
        parameters = inspect.signature(inner_model(self.make_model()).forward).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [parameter.name for parameter in parameters if parameter.kind in kinds]
        labels = {"label", "label_ids", "labels", *self.label_names}
        self._signature_columns = [*named, *sorted(labels - set(named))] if named else []

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A dataset of `datasets` without the columns that the model does not accept."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        kept = [name for name in self._signature_columns or dataset.column_names if name in dataset.column_names]
        if not kept:
            what = f"a dataset with columns that the model accepts ({', '.join(self._signature_columns or [])})"
            raise BadArgument(expected(what, ", ".join(dataset.column_names), "Or set remove_unused_columns=False."))
        return dataset.remove_columns([name for name in dataset.column_names if name not in kept])

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """The collator, preceded by the removal of columns that the model does not accept."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return Collator(data_collator, set(self._signature_columns or ()) or None)

    def num_examples(self, dataloader: Any) -> int:
        """The samples of a dataloader; batches times batch size if the dataset has no length."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self._train_batch_size


def mixture_sampler(mixture: Mixture, args: Any, replicas: int) -> MixtureSampler | None:
    """What an epoch of a mixture draws, and so how long it is; None with streams."""
    loaded, size = mixture.load(as_dataset), args.per_device_train_batch_size * replicas
    if not isinstance(loaded, MixtureDataset):
        return None
    multiple = size if args.dataloader_drop_last else 1
    return loaded.sampler(step_size=size * args.gradient_accumulation_steps, multiple_of=multiple)


def is_stream(data: Any) -> bool:
    """Whether data can only be iterated."""
    return isinstance(as_dataset(data), IterableDataset)


def _yields_batches(sampler: Any) -> bool:
    from torch.utils.data import BatchSampler

    return isinstance(sampler, BatchSampler) or type(sampler).__name__ == "BatchRebalanceSampler"


def labels_of_model(model: nn.Module) -> list[str]:
    """The label parameters of a model's forward, as HF finds them; empty if there is none."""
    inner = inner_model(model)
    names = list(inspect.signature(inner.forward).parameters)
    labels = [name for name in names if "label" in name]
    positions: list[str] = [name for name in ("start_positions", "end_positions") if name in names]
    return [*labels, *positions] if "QuestionAnswering" in type(inner).__name__ else labels or positions
