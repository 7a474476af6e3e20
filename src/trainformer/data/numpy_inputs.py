"""What a user may pass as data where batches are NumPy arrays, and the source that suits it.

Owns telling the kinds of input apart. Reading each of them is left to the readers of `data` and to the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.data.dataset import Arrays, is_array
from trainformer.data.fetcher import Collate
from trainformer.data.hub import one_split
from trainformer.data.labels import is_stream
from trainformer.data.numpy_loader import NumpySource
from trainformer.data.numpy_streams import BatchSource, StreamSource
from trainformer.data.sharding import ALL, Shard
from trainformer.data.text.sources import load_text


def as_data(data: Any) -> Any:
    """Data as a data set or a stream: of a path or name, arrays, records, or what is one already.

    - a path or name that `load_text` knows: JSON Lines, JSON, CSV, Parquet, a folder of texts, `"hf:name"`, ...;
    - an array, a tuple of arrays, a dict of arrays of one length; lists of numbers are arrays there;
    - a list of samples, HF `datasets`, a grain `MapDataset`, or anything else with a length and an index;
    - a stream: HF's `IterableDataset`, grain's `IterDataset`, any iterable that can be iterated again, or a function
      that opens one.

    >>> as_data({"x": [[1.0], [2.0]], "y": [[0], [1]]})[1]
    {'x': array([2.]), 'y': array([1])}
    """
    if isinstance(data, str | Path):
        return load_text(data)
    if isinstance(data, Mapping):
        is_arrays = bool(data) and all(is_array(value) or isinstance(value, list | tuple) for value in data.values())
        return Arrays(dict(data)) if is_arrays else as_data(one_split(data, None))
    if is_array(data) or (isinstance(data, tuple) and data and all(map(is_array, data))):
        return Arrays(data)
    if (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or hasattr(data, "__iter__") or callable(data):
        return data
    raise BadArgument(
        expected(
            "data to be a path, arrays, a list of samples, a data set, or an iterable of samples", type(data).__name__
        )
    )


def numpy_source(
    data: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    collate: Collate | None = None,
    drop_last: bool = False,
    pad_last: bool = False,
    skip_bad: bool = False,
    shard: Shard = ALL,
    threads: int = 0,
    kept: int = 0,
    batched: bool | None = None,
) -> NumpySource | StreamSource | BatchSource:
    """The source for anything that `as_data` knows. `batched` says whether an iterable gives batches, not samples.

    Where that is not said, a `DataLoader` of torch or grain gives batches, and everything else samples. A stream has
    the order it has: `shuffle` is for data with a length. `kept` is for streams alone, `skip_bad` and `threads` for
    data with a length.
    """
    data = as_data(data)
    if batched or (batched is None and is_loader(data)):
        if collate is not None or drop_last:
            given = "collate" if collate is not None else "drop_last"
            raise BadArgument(expected(f"no {given} with a loader, which makes its own batches", given))
        return BatchSource(data, batch_size, seed=seed, pad_last=pad_last, shard=shard, kept=kept)
    if is_stream(data):
        return StreamSource(
            data,
            batch_size,
            seed=seed,
            collate=collate,
            drop_last=drop_last,
            pad_last=pad_last,
            shard=shard,
            kept=kept,
        )
    return NumpySource(
        data,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        collate=collate,
        drop_last=drop_last,
        pad_last=pad_last,
        skip_bad=skip_bad,
        shard=shard,
        threads=threads,
    )


def is_loader(data: Any) -> bool:
    """Whether something is a loader of torch or grain, which gives batches."""
    kinds = ((kind.__module__.split(".")[0], kind.__name__) for kind in type(data).__mro__)
    return any(package in ("torch", "grain") and name == "DataLoader" for package, name in kinds)
