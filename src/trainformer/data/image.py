"""Image datasets: loading by path or name, and a wrapper that yields ``(tensor, label)`` from any of them.

Transforms run once per sample, on the CPU, and draw from torch's global generator, which the loader seeds for every
sample. The task normalises on the device.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainformer.core.errors import DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.builtin import builtin_names, load_builtin
from trainformer.data.fetcher import is_in_memory, tensors_of, unwrap_subsets
from trainformer.data.folder import ImageFiles, ImageFolder, has_class_folders, has_images
from trainformer.data.hub import is_hf_saved, load_from_hub, load_hf_saved
from trainformer.data.labels import LABEL_KEYS_OF_RECORDS, label_column, targets_of
from trainformer.data.lists import IMAGE_COLUMNS, LABEL_COLUMNS, ImageList, is_list
from trainformer.data.pixels import ImageTensors, channels_in, image_tensor, tensor_channels, with_channels
from trainformer.data.tar_shards import is_shard_path
from trainformer.data.webdataset import LABEL_KEYS, WebDataset

_MAX_SCANNED_BYTES = 4 << 30
_IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x", "input")


class ImageDataset(Dataset):
    """Any image dataset as ``(tensor, label)``, or the tensor alone if there is no label.

    Samples of the source may be tuples, dicts or bare images; images may be PIL images, arrays or tensors. `transform`
    is called with a PIL image or a tensor with `channels` channels, and returns either. The result is a (C, H, W)
    tensor, uint8 unless the transform made it float. A query flag (`is_query` of a dict, or a boolean third item) is
    passed on as a third item.

    >>> data = ImageDataset([(torch.zeros(8, 8, dtype=torch.uint8), 3)], channels=3)
    >>> image, label = data[0]
    >>> tuple(image.shape), label
    ((3, 8, 8), 3)
    """

    def __init__(self, source: Any, transform: Callable[[Any], Any] | None = None, channels: int | None = None) -> None:
        self.source = source
        self.transform = transform
        self.channels = channels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Any] | tuple[Tensor, Any, bool] | Tensor:
        sample = self.source[index]
        image, label = split_sample(sample)
        image = with_channels(image, self.channels)
        if self.transform is not None:
            image = self.transform(image)
        tensor = image_tensor(image)
        if label is None:
            return tensor  # None cannot be collated; unlabelled images make batches of images
        is_query = query_flag(sample)
        return (tensor, label) if is_query is None else (tensor, label, is_query)

    @property
    def targets(self) -> Any:
        """Labels of all samples, without reading an image."""
        return self._known("labels")

    @property
    def classes(self) -> list[str]:
        """Class names of the source."""
        return self._known("names")

    @property
    def in_memory(self) -> bool:
        """Whether reading needs no decoding, so that worker processes would not pay off."""
        return is_in_memory(self.source)

    def _known(self, what: str) -> Any:
        value = getattr(targets_of(self.source), what)
        if value is None:  # so that hasattr() works
            raise AttributeError(f"{type(self.source).__name__} has no {what}")
        return value


def load_images(path_or_name: str | Path, *, labels: bool | None = None, channels: int | None = 3) -> Any:
    """Images by path or name:

    - a folder of images, with one folder per class or without classes;
    - a list of images: `.csv`, `.tsv`, `.json`, `.jsonl`, `.parquet` (see `ImageList`);
    - tar shards: a file, a pattern such as `"train-{000..012}.tar"`, or a folder of them (see `WebDataset`); up to
      4 GiB are scanned for their length and classes;
    - a folder written by HF's `save_to_disk`, or a dataset of the hub: `"hf:name"`, `"hf:name:split"`;
    - a torchvision dataset: `"torchvision:CIFAR10"`, `"torchvision:CIFAR10:test"`, with its files in
      `$TRAINFORMER_DATA` or the folder `data`; nothing is downloaded;
    - a built-in dataset: `"digits"`, `"fashion-mnist"`, `"fashion-mnist:test"` (write `"./digits"` for a folder).

    `labels=True` requires labels, `False` ignores them, `None` uses them if there are any. Images from files are
    converted to `channels` channels (None: as they are); built-in datasets are gray.
    """
    if isinstance(path_or_name, str):
        if path_or_name in builtin_names():
            return load_builtin(path_or_name)
        kind, _, name = path_or_name.partition(":")
        if kind in _NAMED and not os.path.exists(path_or_name):
            return _NAMED[kind](name, labels, channels)
    if is_list(path_or_name):
        images = ImageList(path_or_name, label_key=False if labels is False else None, channels=channels)
        if labels and images.label_key is None:
            raise DataError(f"Expected a column of labels in '{path_or_name}', received none with a common name.")
        return images
    _refuse_misspelt_name(path_or_name)
    path = Path(path_or_name).expanduser()
    if is_hf_saved(path):
        return hf_images(load_hf_saved(path), labels=labels, channels=channels)
    if is_shard_path(path) and not (path.is_dir() and has_images(path)):
        stream = WebDataset(path_or_name, channels=channels, label_key=() if labels is False else LABEL_KEYS)
        is_small = sum(os.path.getsize(shard) for shard in stream.shards) <= _MAX_SCANNED_BYTES
        return stream.scan() if is_small else stream
    if labels is None:
        labels = has_class_folders(path_or_name)
    return ImageFolder(path_or_name, channels) if labels else ImageFiles(path_or_name, channels)


def _refuse_misspelt_name(name: str | Path) -> None:
    if isinstance(name, str) and os.sep not in name and not os.path.exists(os.path.expanduser(name)):
        kind, colon, rest = name.partition(":")
        kinds = {f"{known}:{rest}": known for known in _NAMED} if colon and kind not in builtin_names() else {}
        close = did_you_mean(name, [*builtin_names(), *kinds])
        if close:
            do = f"{close} Built-in datasets: {', '.join(map(repr, builtin_names()))}."
            raise DataError(expected("a folder of images or a built-in dataset", name, do))


# -- HF datasets -------------------------------------------------------------------------------------------


def _load_from_hub(spec: str, labels: bool | None, channels: int | None) -> Any:
    name, _, split = spec.partition(":")
    return hf_images(load_from_hub(name, split or None), labels=labels, channels=channels)


def hf_images(dataset: Any, *, labels: bool | None = None, channels: int | None = 3) -> Any:
    """An HF dataset reduced to the columns `image` and `label`, whatever their names.

    Labels that are names become classes. Images are decoded when read, and stay PIL images.
    """
    features = dataset.features
    images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    common = (name for name in IMAGE_COLUMNS if name in (images or features))
    image = next(common, images[0] if len(images) == 1 else None)
    if image is None:
        what = "one column of images" if images else "a column of images"
        raise DataError(expected(what, images or list(features), "Rename the column you mean to 'image'."))
    label = None if labels is False else label_column(features)
    if label is None and labels is not False:
        names = (name for name in LABEL_COLUMNS if getattr(features.get(name), "dtype", None) == "string")
        label = next(names, None)
        if label is not None:
            dataset = dataset.class_encode_column(label)
    if label is None and labels:
        raise DataError(expected("a column of labels", list(features), "Rename the column you mean to 'label'."))
    names_now = {"image": image} | ({} if label is None else {"label": label})
    dataset = dataset.select_columns(list(names_now.values()))
    renamed = {old: new for new, old in names_now.items() if old != new}
    dataset = dataset.rename_columns(renamed) if renamed else dataset
    return dataset.with_transform(partial(_with_channels_each, channels=channels))


def _with_channels_each(rows: dict[str, list[Any]], channels: int | None) -> dict[str, list[Any]]:
    if "image" in rows:
        rows["image"] = [with_channels(image, channels) for image in rows["image"]]
    return rows


# -- torchvision -------------------------------------------------------------------------------------------


def _load_from_torchvision(spec: str, labels: bool | None, channels: int | None) -> Any:
    module = require("torchvision.datasets", "vision", "to load torchvision datasets")
    name, _, split = spec.partition(":")
    known = {other.lower(): other for other in module.__all__}
    if name.lower() not in known:
        raise DataError(expected("the name of a torchvision dataset", name, did_you_mean(name, module.__all__)))
    kind = getattr(module, known[name.lower()])
    root = os.environ.get("TRAINFORMER_DATA") or "data"
    options = _torchvision_options(kind, split, {"root": root, "transform": partial(with_channels, channels=channels)})
    try:
        return kind(**options)
    except ValueError as error:  # it lists the valid splits
        raise DataError(f"Expected a split of torchvision's {kind.__name__}, received {split!r}. {error}") from error
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"Expected the files of torchvision's {kind.__name__} below '{root}', received: {error} Get them once with "
            f"torchvision.datasets.{kind.__name__}({root!r}, ..., download=True) where it has that argument, or set "
            "TRAINFORMER_DATA to the folder they are in."
        ) from error


def _torchvision_options(kind: Any, split: str, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a dataset's constructor, which differ between datasets; the train split by default."""
    parameters = inspect.signature(kind).parameters
    chosen = {name: value for name, value in options.items() if name in parameters}
    if "train" in parameters:
        if split not in ("", "train", "test"):
            raise DataError(expected(f"the split 'train' or 'test' of torchvision's {kind.__name__}", split))
        chosen["train"] = split != "test"
    elif split and "split" in parameters:
        chosen["split"] = split
    elif split:
        raise DataError(expected(f"no split, since torchvision's {kind.__name__} has none", split))
    needed = [p for p in parameters.values() if p.default is p.empty]
    missing = [p.name for p in needed if p.name not in chosen and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if missing:
        raise DataError(
            f"Expected a torchvision dataset that needs only its name, received {kind.__name__}, which "
            f"needs {', '.join(missing)}. Construct it yourself and pass it as data."
        )
    return chosen


_NAMED: dict[str, Callable[[str, bool | None, int | None], Any]] = {
    "hf": _load_from_hub,
    "torchvision": _load_from_torchvision,
}


def split_sample(sample: Any) -> tuple[Any, Any]:
    """Image and label of a sample or batch (a tuple, a mapping, or an image alone); a missing label is None.

    >>> split_sample({"img": "pixels", "label": 3})
    ('pixels', 3)
    >>> split_sample(("pixels", 3))
    ('pixels', 3)
    """
    if isinstance(sample, Mapping):
        image = next((key for key in _IMAGE_KEYS if key in sample), None)
        if image is None:
            raise DataError(expected(f"a sample with one of the keys {', '.join(_IMAGE_KEYS)}", list(sample)))
        label = next((key for key in LABEL_KEYS_OF_RECORDS if key in sample), None)
        return sample[image], None if label is None else sample[label]
    if isinstance(sample, tuple | list):
        if not sample:
            raise DataError(expected("a sample (image, label)", sample))
        return sample[0], sample[1] if len(sample) > 1 else None
    return sample, None


def query_flag(sample: Any) -> bool | None:
    """Whether a sample is a query (as opposed to the gallery); None if it does not say.

    >>> query_flag(("pixels", 3, True)), query_flag({"image": "pixels", "is_query": 0}), query_flag(("pixels", 3, "x"))
    (True, False, None)
    """
    if isinstance(sample, Mapping):
        flag = sample.get("is_query")
        return None if flag is None else bool(flag)
    if isinstance(sample, tuple | list) and len(sample) == 3:
        flag = sample[2]
        if isinstance(flag, bool | np.bool_) or (isinstance(flag, Tensor) and flag.dtype == torch.bool):
            return bool(flag)
    return None


def images_in_memory(dataset: Any, channels: int | None = None) -> ImageTensors | None:
    """The images of a `TensorDataset` of uint8 images, or of a subset of one; None for other datasets."""
    base, chosen = unwrap_subsets(dataset)
    tensors = tensors_of(base)
    if tensors is None or len(tensors) > 2 or tensors[0].dtype != torch.uint8 or tensors[0].ndim not in (3, 4):
        return None
    images, *labels = tensors if chosen is None else [tensor[torch.from_numpy(chosen)] for tensor in tensors]
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif channels_in(images.shape[1:]) != images.shape[1]:
        images = images.permute(0, 3, 1, 2).contiguous()  # channels last, as arrays have them
    names = targets_of(base).names
    return ImageTensors(tensor_channels(images, channels), labels[0] if labels else None, names)
