"""From what the user passes as data to sources of batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainformer.core.errors import BadArgument, DataError, TrainformerError, expected
from trainformer.core.types import DataSource
from trainformer.data.description import describe_training_data
from trainformer.data.hub import load_registered
from trainformer.data.labels import align_classes, is_stream, same_class_indices
from trainformer.data.loader import DatasetSource, loader_source, stream_source
from trainformer.data.metadata import DatasetInfo, extract_info
from trainformer.data.mixture.dataset import MixtureDataset
from trainformer.data.mixture.mixture import Mixture
from trainformer.data.mixture.stream import MixtureStream
from trainformer.data.sharding import WHOLE, Shard
from trainformer.data.source import DispatchedSource, SlicedSource
from trainformer.data.split import split_dataset
from trainformer.distributed import TorchProcessGroup
from trainformer.run.torch.data_checks import check_kind
from trainformer.run.torch.mixture import load_mixture, mixture_source
from trainformer.run.torch.record import RecordedData
from trainformer.run.torch.settings import RunSettings
from trainformer.run.validation_sets import validation_sets
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

    def reading(self) -> dict[str, Any]:
        """The arguments of every `DatasetSource`."""
        names = "seed", "num_workers", "pin_memory", "prefetch_factor", "worker_context", "skip_bad", "shard"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TrainingData:
    """Training and validation data as loaded, before the task has prepared them, with their metadata.

    `val_sets` are the validation sets by name; one without a name has the empty one.
    """

    train: Any
    val_sets: Mapping[str, Any]
    info: DatasetInfo
    comparable: bool = True  # whether a label means the same class in training and all validation data

    @property
    def val(self) -> Any:
        """The validation data, of several sets the first; None without."""
        return next(iter(self.val_sets.values()), None)


def load_training_data(task: Any, data: Any, val_data: Any, val_split: float | int | None, seed: int) -> TrainingData:
    """Load what was passed, split off the validation set, and extract the metadata."""
    if val_data is not None and val_split is not None:
        raise BadArgument("Expected val_data or val_split, received both. Pass the one you mean.")
    train = load_mixture(data, partial(load, task), is_loader) if isinstance(data, Mixture) else load(task, data)
    _reject_unnamed_sets(train, val_data)
    given = {name: _naming(name, load, task, part) for name, part in validation_sets(val_data).items()}
    if isinstance(train, RecordedData):
        info = train.record.info
    else:
        info = extract_info(train.dataset if isinstance(train, DataLoader) else train)
    if val_split is not None:
        if isinstance(train, MixtureDataset):
            do = "Split the sources yourself, and pass what you hold out as val_data."
            raise BadArgument(expected("val_data with a mixture", f"val_split={val_split}", do))
        if is_loader(train) or isinstance(train, IterableDataset | DataSource):
            do = "Pass a second loader or dataset as val_data."
            raise BadArgument(expected("val_split with a dataset that has a length", type(train).__name__, do))
        train, held_out = split_dataset(train, val_split, seed)
        given = {"": held_out}
        info = extract_info(train)
    val_sets = {
        name: _naming(name, align_classes, _non_empty(part, name), info.class_names, is_open(task))
        for name, part in given.items()
    }
    if not isinstance(train, RecordedData):
        info.extra = {**info.extra, "training_data": describe_training_data(data)}
    comparable = all(same_class_indices(part, info.class_names) for part in val_sets.values())
    return TrainingData(train, val_sets, info, comparable)


def _reject_unnamed_sets(train: Any, val_data: Any) -> None:
    """A list of tuples of arrays is a list of samples, unless they have one dimension more than those of training."""
    is_tuples = isinstance(val_data, list | tuple) and bool(val_data) and all(isinstance(p, tuple) for p in val_data)
    if not is_tuples or is_loader(train) or is_stream(train) or not len(train):
        return
    sample, first = train[0], val_data[0]
    if isinstance(sample, tuple) and len(sample) == len(first):
        dimensions = [(np.ndim(own), np.ndim(other)) for own, other in zip(sample, first, strict=True)]
        if all(other == own + 1 for own, other in dimensions):
            do = "Give them names: val_data={'clean': ..., 'shifted': ...}."
            raise BadArgument(expected("several datasets as val_data in a dict", f"a {type(val_data).__name__}", do))


def _naming(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; an error names the validation set."""
    try:
        return function(*arguments)
    except TrainformerError as error:
        if not name:
            raise
        raise type(error)(f"val_data[{name!r}]: {error}") from error


def _non_empty(data: Any, name: str) -> Any:
    if not is_loader(data) and not is_stream(data) and hasattr(data, "__len__") and len(data) == 0:
        which = f"val_data[{name!r}]" if name else "the validation data"
        raise DataError(expected(f"{which} to have at least one sample", "none", "Leave it out, or check its path."))
    return data


def is_open(task: Any) -> bool:
    """Whether a task can be evaluated on classes that it was not trained on."""
    return bool(getattr(task, "open_set", False))


def load(task: Any, data: Any) -> Any:
    """A dataset, loader or data source from a path or name, arrays, a dataset, a loader or a data source."""
    if isinstance(data, Mixture):
        do = "Evaluate on each source by itself: a mixture says how to draw training data."
        raise BadArgument(expected("data to evaluate", "a Mixture", do))
    if isinstance(data, (str, Path)):
        if (registered := load_registered(str(data))) is not None:
            return load(task, registered)
        if not provides(task, "load_data"):
            raise BadArgument(
                f"{type(task).__name__} cannot load data by path (received {str(data)!r}). Pass a Dataset or "
                "DataLoader, or define load_data(self, path) on the task."
            )
        return task.load_data(os.path.expanduser(data))
    if provides(task, "convert_data"):
        data = task.convert_data(data)
    check_kind(data)
    if isinstance(data, (torch.Tensor, np.ndarray)):
        data = (data,)
    if isinstance(data, tuple) and data and all(isinstance(d, (torch.Tensor, np.ndarray)) for d in data):
        tensors = [torch.as_tensor(d) for d in data]
        if len({len(t) for t in tensors}) != 1:
            raise DataError(expected("arrays of one length", [len(t) for t in tensors]))
        return TensorDataset(*tensors)
    if isinstance(data, Mapping):
        what = "data to be one dataset"
        raise BadArgument(expected(what, f"a dict with {', '.join(map(repr, list(data)[:4]))}", "Pass one of them."))
    if (
        isinstance(data, IterableDataset | DataSource)
        or is_loader(data)
        or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    ):
        return data
    kinds = "a path, a tuple of tensors, a Dataset, a DataLoader (or another iterable of batches), or a DataSource"
    do = "To use a trained model without its data, call trainformer.load(folder)." if data is None else ""
    raise BadArgument(expected(f"data to be {kinds}", type(data).__name__, do))


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
    collate = task.collate_fn if provides(task, "collate_fn") else None
    if isinstance(data, MixtureDataset | MixtureStream):
        _reject_sampler(options, train, "a mixture decides which samples are drawn")
        return mixture_source(task, data, options, train, collate)
    if provides(task, "prepare_dataset"):
        data = task.prepare_dataset(data, train=train)
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
            drop_last=options.drop_last and train,
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
        collate=collate,
        **options.reading(),
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
