"""Ids of samples, by which predictions can be joined with other data: file names, ids of records, row numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.data.dataset import IndexedDataset
from trainformer.data.fetcher import unwrap_subsets
from trainformer.data.labels import HF_DATASET, is_instance_of

ID_KEYS = (
    "id",
    "idx",
    "uid",
    "uuid",
    "guid",
    "sample_id",
    "record_id",
    "image_id",
    "example_id",
    "file_name",
    "__key__",
)

# By name, since their modules import torch.
_IMAGE_FILES, _LABELLED_FILES = "trainformer.data.folder.ImageFiles", "trainformer.data.folder.LabelledFiles"
_TORCHVISION_FOLDER = "torchvision.datasets.folder.DatasetFolder"


def sample_ids(dataset: Any) -> Iterator[Any]:
    """The id of each sample, in order, without reading images.

    Files of a folder are named relative to it. Records have the value of their `id` (or `idx`, `uid`, ...), and samples
    of any other dataset that of its attribute `ids`. If there is none, it is the row number.

    >>> list(sample_ids([{"id": "a", "text": "x"}, {"id": "b", "text": "y"}])), next(sample_ids(["x", "y"]))
    (['a', 'b'], 0)
    """
    base, chosen = unwrap_subsets(dataset)
    known = _known(base)
    if known is None:
        return count()
    return iter(known) if chosen is None else (known[int(index)] for index in chosen)


def _known(dataset: Any) -> Sequence[Any] | None:
    root, ids = getattr(dataset, "root", None), getattr(dataset, "ids", None)
    if isinstance(ids, Sequence):
        return ids
    if is_instance_of(dataset, _IMAGE_FILES):
        return [os.path.relpath(file, dataset.root) for file in dataset.files]
    # torchvision's folders have the same attributes as ours.
    if is_instance_of(dataset, _LABELLED_FILES) or is_instance_of(dataset, _TORCHVISION_FOLDER):
        below = os.path.join(str(root), "")
        return [str(path).removeprefix(below) for path, _ in dataset.samples]
    if is_instance_of(dataset, HF_DATASET):
        key = next((key for key in ID_KEYS if key in dataset.column_names), None)
        return None if key is None else [_plain(value) for value in dataset.with_format(None)[key]]
    if isinstance(dataset, list | tuple | IndexedDataset) and len(dataset) and isinstance(dataset[0], Mapping):
        key = next((key for key in ID_KEYS if key in dataset[0]), None)
        return None if key is None else _RecordIds(dataset, key)
    return None


class _RecordIds(Sequence[Any]):
    """The ids of records, which may be read from a file one by one."""

    def __init__(self, records: Any, key: str) -> None:
        self._records = records
        self._key = key
        self._kind = type(_plain(records[0][key]))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        value = self._records[index].get(self._key)
        if value is None:
            do = "Give every record one, or none."
            raise DataError(expected(f"record {index} to have {self._key!r} as the first has", "none", do))
        value = _plain(value)
        if not isinstance(value, self._kind):
            do = "Write all of them as strings."
            raise DataError(expected(f"ids of one type, as {self._kind.__name__} of the first record", value, do))
        return value


def _plain(value: Any) -> str | int:
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)
