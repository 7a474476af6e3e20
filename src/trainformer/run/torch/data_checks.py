"""Plausible mistakes in what is passed as data: rejected if it cannot work, warned of if it is probably not meant."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.fetcher import unwrap_subsets
from trainformer.data.labels import targets_of
from trainformer.data.metadata import DatasetInfo
from trainformer.run.torch.settings import RunSettings

logger = logging.getLogger("trainformer")

_OF_LOADERS = ("batch_size", "num_workers", "drop_last", "prefetch_factor", "worker_context")
_OF_OPTIMIZERS = ("lr", "weight_decay")
_MOST_ARRAYS, _MOST_CHANNELS = 4, 4


def check_kind(data: Any) -> None:
    """Reject what looks like data and is none: a class, two arrays in a list, columns in a dict."""
    if isinstance(data, type):
        do = f"Write {data.__name__}(...)."
        raise BadArgument(expected("a dataset", f"the class {data.__name__}", do))
    if isinstance(data, list) and 1 < len(data) <= _MOST_ARRAYS and all(_rows(part) is not None for part in data):
        shapes = [tuple(part.shape) for part in data]
        # Samples may have a first dimension in common, too: the channels of images.
        if len({shape[0] for shape in shapes}) == 1 and len(set(shapes)) > 1 and shapes[0][0] > _MOST_CHANNELS:
            what = f"a list of {len(data)} arrays of {shapes[0][0]} rows"
            do = "Pass a tuple: (inputs, targets). A list is a dataset, whose items are samples."
            raise BadArgument(expected("a tuple of arrays", what, do))
    if isinstance(data, Mapping) and data and all(_rows(part) is not None for part in data.values()):
        do = "Pass a tuple of arrays, or datasets.Dataset.from_dict(data) for samples that are dicts."
        raise BadArgument(expected("a dataset", f"a dict of arrays ({', '.join(map(str, data))})", do))
    if not hasattr(data, "__len__") and hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        raise BadArgument(expected("a dataset with a length", f"{type(data).__name__} without __len__", "Define it."))


def check_reusable(val_data: Any) -> None:
    """Reject validation data that can be read only once: every later evaluation would be empty."""
    if isinstance(val_data, Iterator):
        do = "Pass a dataset, a DataLoader, or an object whose __iter__ starts over."
        raise BadArgument(
            expected("validation data that can be read again", f"a {type(val_data).__name__} (used up once)", do)
        )


def check_batches(data: Any, name: str) -> None:
    """Reject a loader without batches, such as one with drop_last and fewer samples than a batch."""
    if isinstance(data, DataLoader) and _length(data) == 0:
        size, samples = data.batch_size, _length(data.dataset)
        why = f"{samples} samples, batches of {size} and drop_last=True" if data.drop_last else "an empty DataLoader"
        raise DataError(expected(f"{name} to have at least one batch", why, "Use a smaller batch_size or more data."))


def warn_about_ignored(settings: RunSettings, data: Any, passed: frozenset[str]) -> None:
    """Warn of settings that were passed and have no effect, since an object that was also passed has its own."""
    if passed >= frozenset(settings.values()):
        return  # another entry point fills in all of them
    if isinstance(data, DataLoader) and data.batch_size is not None:
        own = [n for n in _OF_LOADERS if n in passed and getattr(data, n, None) != getattr(settings, n)]
        if own:
            logger.warning("%s no effect: the DataLoader has its own.", _settings(settings, own))
    if isinstance(settings.optimizer, torch.optim.Optimizer):
        own = [name for name in _OF_OPTIMIZERS if name in passed]
        if own:
            kind = type(settings.optimizer).__name__
            logger.warning("%s no effect: the %s that was passed has its own.", _settings(settings, own), kind)


def warn_about_data(train: Any, val: Any, info: DatasetInfo) -> None:
    """Warn of validation data that is also trained on, and of a loader that reads one class after the other."""
    if val is not None and _base(train) is _base(val) and _is_whole(train) and _is_whole(val):
        logger.warning(
            "the validation data is the training data: its metrics do not tell how well the model generalises."
        )
    elif val is not None:
        shared = _files(train) & _files(val)
        if shared:
            example = min(shared)
            logger.warning("%d files are in the training and the validation data, such as %s.", len(shared), example)
    counts = info.class_counts
    if counts is not None and info.class_names is None and len(counts) > 1 and counts[0] == 0 < counts[1]:
        logger.warning("no sample has label 0: classes count from 0. Subtract 1 if the labels count from 1.")
    if isinstance(_sampler(train), SequentialSampler):
        labels = targets_of(train.dataset).labels
        if labels is not None and len(labels) > (train.batch_size or 1) and _is_sorted(labels):
            logger.warning(
                "the training DataLoader reads the data in order, and it is sorted by class: each batch has one class "
                "or two. Pass shuffle=True to the DataLoader."
            )


def _is_sorted(labels: np.ndarray) -> bool:
    return len(np.unique(labels)) > 1 and bool((np.diff(labels) >= 0).all())


def describe_sample(dataset: Any, index: int) -> str:
    """A sample by its index, and by its file if the dataset lists them; of a loader, by its place in the epoch."""
    if isinstance(dataset, DataLoader) and not isinstance(_sampler(dataset), SequentialSampler):
        return f"sample {index} of the epoch, in the order of the DataLoader"
    base = unwrap_subsets(_base(dataset))[0]
    for name in ("samples", "imgs", "files", "paths"):
        listed = getattr(base, name, None)
        if isinstance(listed, list) and len(listed) > index % max(1, _length(base) or 1):
            entry = listed[index % (_length(base) or 1)]
            path = entry[0] if isinstance(entry, tuple) else entry
            if isinstance(path, (str, os.PathLike)):
                return f"sample {index} ({path})"
    return f"sample {index}"


def _rows(array: Any) -> int | None:
    is_array = isinstance(array, (torch.Tensor, np.ndarray)) and array.ndim > 0
    return len(array) if is_array else None


def _settings(settings: RunSettings, names: list[str]) -> str:
    given = " and ".join(f"{name}={getattr(settings, name)!r}" for name in names)
    return f"{given} {'has' if len(names) == 1 else 'have'}"


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _base(data: Any) -> Any:
    return data.dataset if isinstance(data, DataLoader) else data


def _sampler(data: Any) -> Any:
    """The sampler of a DataLoader; None for other data, and for a batch sampler that chooses by itself."""
    batches = getattr(data, "batch_sampler", None) if isinstance(data, DataLoader) else None
    return batches.sampler if type(batches) is BatchSampler else None


def _is_whole(data: Any) -> bool:
    """Whether all samples of a dataset are read, as far as can be told."""
    return not isinstance(data, DataLoader) or isinstance(_sampler(data), (SequentialSampler, RandomSampler))


def _files(data: Any) -> set[str]:
    """Paths of the samples of a dataset that lists them."""
    samples = getattr(_base(data), "samples", None)
    if not isinstance(samples, list) or not all(isinstance(s, tuple) and s and isinstance(s[0], str) for s in samples):
        return set()
    return {path for path, *_ in samples}
