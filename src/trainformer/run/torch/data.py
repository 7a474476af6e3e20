"""From what the user passes as data to sources of batches."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import DataSource
from trainformer.data.hub import load_registered
from trainformer.data.labels import align_classes, same_class_indices
from trainformer.data.loader import DatasetSource, loader_source, stream_source
from trainformer.data.metadata import DatasetInfo, extract_info
from trainformer.data.sharding import WHOLE, Shard
from trainformer.data.source import DispatchedSource, SlicedSource
from trainformer.data.split import split_dataset
from trainformer.distributed import TorchProcessGroup
from trainformer.run.torch.data_checks import check_kind
from trainformer.run.torch.settings import RunSettings
from trainformer.tasks.base import provides


@dataclass(frozen=True)
class LoadOptions:
    """How batches are loaded."""

    batch_size: int
    seed: int
    num_workers: int | None
    pin_memory: bool
    prefetch_factor: int | None = None
    worker_context: str | None = None
    skip_bad: bool = False
    sampler: Any = None  # for training only, like the next
    drop_last: bool = False
    accumulation: int = 1
    shard: Shard = WHOLE
    dispatch: Any = None  # the process group to which rank 0 dispatches what it reads; None: each rank reads its own


@dataclass(frozen=True)
class TrainingData:
    """Training and validation data as loaded, before the task has prepared them, with their metadata."""

    train: Any
    val: Any
    info: DatasetInfo
    comparable: bool = True  # whether a label means the same class in both


def load_training_data(task: Any, data: Any, val_data: Any, val_split: float | int | None, seed: int) -> TrainingData:
    """Load what was passed, split off the validation set, and extract the metadata."""
    if val_data is not None and val_split is not None:
        raise BadArgument("Expected val_data or val_split, received both. Pass the one you mean.")
    train, val = load(task, data), load(task, val_data) if val_data is not None else None
    info = extract_info(train.dataset if isinstance(train, DataLoader) else train)
    if val_split is not None:
        if is_loader(train) or isinstance(train, IterableDataset | DataSource):
            do = "Pass a second loader or dataset as val_data."
            raise BadArgument(expected("val_split with a dataset that has a length", type(train).__name__, do))
        train, val = split_dataset(train, val_split, seed)
        info = extract_info(train)
    val = align_classes(val, info.class_names, is_open(task))
    return TrainingData(train, val, info, same_class_indices(val, info.class_names))


def is_open(task: Any) -> bool:
    """Whether a task can be evaluated on classes that it was not trained on."""
    return bool(getattr(task, "open_set", False))


def load(task: Any, data: Any) -> Any:
    """A dataset, loader or data source from a path or name, arrays, a dataset, a loader or a data source."""
    if isinstance(data, (str, Path)):
        if (registered := load_registered(str(data))) is not None:
            return load(task, registered)
        if not provides(task, "load_data"):
            raise BadArgument(
                f"{type(task).__name__} cannot load data by path (received {str(data)!r}). Pass a Dataset or "
                "DataLoader, or define load_data(self, path) on the task."
            )
        return task.load_data(os.path.expanduser(data))
    check_kind(data)
    if isinstance(data, (torch.Tensor, np.ndarray)):
        data = (data,)
    if isinstance(data, tuple) and data and all(isinstance(d, (torch.Tensor, np.ndarray)) for d in data):
        tensors = [torch.as_tensor(d) for d in data]
        if len({len(t) for t in tensors}) != 1:
            raise DataError(expected("arrays of one length", [len(t) for t in tensors]))
        return TensorDataset(*tensors)
    if (
        isinstance(data, IterableDataset | DataSource)
        or is_loader(data)
        or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    ):
        return data
    kinds = "a path, a tuple of tensors, a Dataset, a DataLoader (or another iterable of batches), or a DataSource"
    raise BadArgument(expected(f"data to be {kinds}", type(data).__name__))


def is_loader(data: Any) -> bool:
    """Whether something yields batches: a DataLoader, or an iterable that is not a dataset."""
    if isinstance(data, DataLoader):
        return True
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, Iterable) and not indexable and not isinstance(data, IterableDataset | DataSource)


def make_source(task: Any, data: Any, options: LoadOptions, train: bool) -> DataSource:
    """Batches of loaded data, prepared by the task for training or evaluation."""
    if options.dispatch is None:
        return _own_source(task, data, options, train)
    whole = _own_source(task, data, replace(options, shard=WHOLE), train)
    if getattr(whole, "is_sharded", False):
        what = "data that rank 0 reads for all ranks (dispatch_batches=True)"
        do = "Leave out its DistributedSampler, or dispatch_batches."
        raise BadArgument(expected(what, "a loader that gives each rank data of its own", do))
    return DispatchedSource(whole, options.dispatch)


def _own_source(task: Any, data: Any, options: LoadOptions, train: bool) -> DataSource:
    if isinstance(data, DataSource):
        _reject_sampler(options, train, "a data source has an order and batches of its own")
        is_sharded = getattr(data, "is_sharded", False)
        return data if options.shard.is_whole or is_sharded else SlicedSource(data, options.shard)
    if is_loader(data):
        _reject_sampler(options, train, "a loader has a sampler and batches of its own; set them there")
        count = task.count_samples if provides(task, "count_samples") else None
        return loader_source(data, options.seed, count, options.shard)
    if provides(task, "prepare_dataset"):
        data = task.prepare_dataset(data, train=train)
    collate = task.collate_fn if provides(task, "collate_fn") else None
    if isinstance(data, IterableDataset):
        _reject_sampler(options, train, "a dataset without a length cannot be sampled from")
        workers = options.num_workers or 0
        if hasattr(data, "reseed"):
            data.reseed(options.seed)
        return stream_source(
            data,
            options.batch_size,
            seed=options.seed,
            collate=collate,
            num_workers=workers,
            shard=options.shard,
        )
    sampler = None
    if train and options.sampler is not None:
        from trainformer.data.samplers import make_sampler

        size, accumulation = options.batch_size, options.accumulation
        sampler = make_sampler(options.sampler, data, batch_size=size, seed=options.seed, accumulation=accumulation)
    return DatasetSource(
        data,
        options.batch_size,
        shuffle=train,
        sampler=sampler,
        drop_last=options.drop_last and train,
        seed=options.seed,
        collate=collate,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        prefetch_factor=options.prefetch_factor,
        worker_context=options.worker_context,
        skip_bad=options.skip_bad,
        shard=options.shard,
    )


def _reject_sampler(options: LoadOptions, train: bool, why: str) -> None:
    if train and options.sampler is not None:
        raise BadArgument(expected("no sampler", options.sampler, f"Leave it out: {why}."))


def load_options(
    settings: RunSettings, device: torch.device, process_group: TorchProcessGroup, batch_size: int | None = None
) -> LoadOptions:
    """How batches are loaded; `batch_size` overrides that of training."""
    return LoadOptions(
        batch_size=batch_size or settings.batch_size,
        seed=settings.seed,
        num_workers=settings.num_workers,
        pin_memory=device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
        prefetch_factor=settings.prefetch_factor,
        worker_context=settings.worker_context,
        skip_bad=settings.bad_samples == "skip",
        sampler=settings.sampler,
        drop_last=settings.drop_last,
        accumulation=settings.accumulation_steps,
        shard=Shard(process_group.dp_rank, process_group.dp_world_size),
        dispatch=process_group if settings.dispatch_batches and not process_group.is_single_process else None,
    )
