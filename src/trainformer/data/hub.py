"""Datasets by name: from the Hugging Face hub, from a folder `save_to_disk` wrote, or from another package.

What the rows mean (images, text) is up to the callers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require
from trainformer.core.plugins import load_plugin

# What comes before the first colon of a name that trainformer itself resolves.
BUILTIN_PREFIXES = frozenset({"hf", "torchvision", "stream", "digits", "fashion-mnist", "python-stdlib"})


def load_registered(name: str) -> Any | None:
    """Data from a loader that another package registers for this name or URL scheme; None if there is none.

    The entry point group is `trainformer.data_sources`. An entry point `mydb` is called with the whole string for
    `"mydb"`, `"mydb:table"` and `"mydb://table"`, and returns anything `Trainer` accepts as data: a dataset, a
    DataLoader, or a `DataSource`. Existing paths and built-in names come first.

    >>> load_registered("digits") is load_registered("no/such/folder") is None
    True
    """
    prefix = name.partition(":")[0]
    if prefix in BUILTIN_PREFIXES or os.path.exists(os.path.expanduser(name)):
        return None
    loader = load_plugin("data_sources", prefix)
    if loader is None:
        return None
    data = loader(name)
    if data is None or isinstance(data, str | Path):
        raise DataError(expected(f"the data source '{prefix}' to return data for '{name}'", data))
    return data


def check_is_dataset(name: str) -> None:
    """Refuse the names of formats: `datasets` would take the files of this folder, and unpickle them for `pandas`."""
    formats = require("datasets.packaged_modules", "datasets", "to load data")._PACKAGED_DATASETS_MODULES
    if name in formats:
        raise DataError(expected("the name of a dataset on the Hugging Face hub", name, "It is that of a format."))


def load_from_hub(name: str, split: str | None, configuration: str | None = None) -> Any:
    """One split of a dataset of the Hugging Face hub: the given one, else the only one, else `"train"`."""
    datasets = require("datasets", "datasets", "to load data from the Hugging Face hub")
    check_is_dataset(name)
    what = f"'{name}', split {split!r}," if split else f"'{name}'"
    try:
        loaded = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # of the network, the hub, the file system, or a missing split: many types
        raise DataError(
            f"Expected the dataset {what} of the Hugging Face hub, received {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Check the name and the connection. Datasets in the cache load offline; a "
            "folder written by save_to_disk can be passed as a path."
        ) from error
    return select_split(loaded, None, f"'hf:{name}:{{}}'", prefer_train=True)


def is_hf_saved(path: Path) -> bool:
    """Whether HF `datasets` wrote this folder with `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def load_hf_saved(path: Path, split: str | None = None) -> Any:
    """The dataset HF's `save_to_disk` wrote. One of several splits must be named: none is the default."""
    datasets = require("datasets", "datasets", "to load a dataset written by save_to_disk")
    return select_split(datasets.load_from_disk(str(path)), split, f"'{path}/{{}}'", prefer_train=False)


def select_split(loaded: Any, split: str | None, form: str = "data[{!r}]", prefer_train: bool = False) -> Any:
    """The named or only split of a `DatasetDict`; a plain dataset as it is. `form` shows users how to name a split."""
    if not isinstance(loaded, Mapping):
        if split is not None and str(getattr(loaded, "split", None)) != split:
            raise DataError(expected("no split, since the dataset has none", split))
        return loaded
    wanted = split or ("train" if prefer_train and "train" in loaded else None)
    if wanted is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if wanted not in loaded:
        advice = f"Pass one of them: {', '.join(form.format(name) for name in loaded)}."
        raise DataError(expected("one split", split or list(loaded), advice))
    return loaded[wanted]


def has_state(stream: Any) -> bool:
    """Whether a stream or loader saves and restores its complete position.

    An HF `IterableDataset` that shuffles in a buffer does not: its `state_dict` lacks the buffer.
    """
    if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
        return False
    return not _has_shuffle_buffer(getattr(stream, "_ex_iterable", None))


def _has_shuffle_buffer(step: Any) -> bool:
    inner = [getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or [])]
    is_buffer = type(step).__name__.startswith("BufferShuffled")
    return is_buffer or any(_has_shuffle_buffer(part) for part in inner if part is not None)
