"""Data sets of HF `datasets`: loading them from its hub or from a folder that it saved, and choosing one split.

What is made of the rows, images or texts, and how users name a data set, is left to those who load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require


def load_from_hub(name: str, split: str | None, configuration: str | None = None) -> Any:
    """A split of a data set of the Hugging Face hub: the one that is named, else the only one or that for training."""
    datasets = require("datasets", "datasets", "to load data from the Hugging Face hub")
    what = f"'{name}', split {split!r}," if split else f"'{name}'"
    try:
        loaded = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # of the network, the hub, the file system, or a split that is none: many types
        raise DataError(
            f"Expected the data set {what} of the Hugging Face hub, received {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Is the name right, and can the hub be reached? What was loaded once is found "
            "without it; a folder written by save_to_disk can be passed as a path."
        ) from error
    return one_split(loaded, None, f"'hf:{name}:{{}}'", prefer_train=True)


def is_saved_by_hf(path: Path) -> bool:
    """Whether HF `datasets` wrote this folder with `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def load_saved(path: Path, split: str | None = None) -> Any:
    """What HF `datasets` saved in a folder. Two folders on disk are as likely to be meant one as the other."""
    datasets = require("datasets", "datasets", "to load a data set that it saved")
    return one_split(datasets.load_from_disk(str(path)), split, f"'{path}/{{}}'", prefer_train=False)


def one_split(loaded: Any, split: str | None, form: str = "data[{!r}]", prefer_train: bool = False) -> Any:
    """Of several splits the one that is named or must be meant; `form` is how users name one."""
    if not isinstance(loaded, Mapping):
        if split is not None and str(getattr(loaded, "split", None)) != split:
            raise DataError(expected("no split, since the data set has none", split))
        return loaded
    wanted = split or ("train" if prefer_train and "train" in loaded else None)
    if wanted is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if wanted not in loaded:
        advice = f"Pass one of them: {', '.join(form.format(name) for name in loaded)}."
        raise DataError(expected("one split", split or list(loaded), advice))
    return loaded[wanted]


def has_shuffle_buffer(stream: Any) -> bool:
    """Whether a stream of HF `datasets` shuffles samples in a buffer, which is not in the state it saves.

    Such a stream cannot go on where it was: what was in the buffer would be lost.
    """
    steps = [getattr(stream, "_ex_iterable", None)]
    while steps:
        step = steps.pop()
        if type(step).__name__.startswith("BufferShuffled"):
            return True
        steps += [getattr(step, "ex_iterable", None)] if hasattr(step, "ex_iterable") else []
        steps += list(getattr(step, "ex_iterables", None) or [])
    return False
