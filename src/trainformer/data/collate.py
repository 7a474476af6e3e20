"""Collating samples into batches of NumPy arrays, and padding the last batch.

A batch for a compiled step holds numbers only, and always the same number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import is_array
from trainformer.data.sharding import Shard, map_batch

#: The key of the mask in a padded batch: which rows are samples. The other rows repeat samples and do not count.
VALID = "_valid"
_ADVICE = "Leave it out of the samples, convert it, or pass a collate function."


def stack_samples(samples: Sequence[Any], name: str = "") -> Any:
    """Collate samples: dicts become a dict, tuples a tuple, of arrays whose first dimension is the sample.

    Anything NumPy can read is an array, tensors and images included. Shapes that differ between samples, and values
    that are not numbers, are errors that name the key (after `name`).

    >>> stack_samples([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}])
    {'x': array([[1, 2],
           [3, 4]]), 'y': array([0, 1])}
    """
    first = samples[0]
    if isinstance(first, Mapping):
        for other in samples:
            if not isinstance(other, Mapping) or set(other) != set(first):
                received = sorted(map(str, other)) if isinstance(other, Mapping) else _shown(other)
                what = f"{_described(name)} to have the keys {sorted(map(str, first))} everywhere"
                raise DataError(expected(what, received))
        return {key: stack_samples([sample[key] for sample in samples], f"{name}[{key!r}]") for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and any(is_array(part) for part in first)):
        if len({len(sample) for sample in samples}) != 1:
            raise DataError(expected(f"{_described(name)} to have equally many parts", _distinct(map(len, samples))))
        parts = [stack_samples([sample[i] for sample in samples], f"{name}[{i}]") for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return _array(samples, name)


def _array(values: Sequence[Any], name: str) -> np.ndarray:
    try:
        arrays = [np.asarray(value) for value in values]
    except (ValueError, TypeError, RuntimeError) as error:  # ragged inside, or a tensor on a device
        raise DataError(expected(f"{_described(name)} to be numbers or arrays", error, _ADVICE)) from error
    wrong = next((i for i, array in enumerate(arrays) if array.dtype.kind not in "biufcV"), None)
    if wrong is not None:
        raise DataError(expected(f"{_described(name)} to be numbers or arrays", _shown(values[wrong]), _ADVICE))
    if len({array.shape for array in arrays}) != 1:
        do = "Pad them in the dataset, or pass a collate function (`token_batch` for tokens)."
        shapes = _distinct(array.shape for array in arrays)
        raise DataError(expected(f"{_described(name)} to have one shape in all samples", shapes, do))
    return np.stack(arrays)


def _described(name: str) -> str:
    return f"sample{name}" if name else "samples"


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _distinct(values: Any) -> str:
    return ", ".join(map(str, dict.fromkeys(list(values)[:64])))


def pad_rows(data: Any, size: int, rows: int) -> dict[str, Any]:
    """Pad a batch of `size` samples to `rows` rows by repeating samples, and add the mask of valid rows.

    >>> pad_rows({"x": np.array([7, 8])}, size=2, rows=3)
    {'x': array([7, 8, 7]), '_valid': array([ True,  True, False])}
    """
    if not isinstance(data, Mapping):
        do = "Return dicts from the dataset or the collate function, or pass drop_last=True."
        raise BadArgument(expected("batches that are dicts, to mark which rows are padding", type(data).__name__, do))
    if VALID in data:
        return dict(data)
    have = next((len(value) for value in data.values() if is_array(value)), 0)
    if have > rows:
        raise DataError(expected(f"batches of at most {rows} rows", have, "Let the loader make smaller ones."))
    repeated = np.arange(rows) % max(have, 1)
    padded = map_batch(lambda value: value[repeated] if is_array(value) and len(value) == have < rows else value, data)
    return {**padded, VALID: np.arange(rows) < size}


def check_batching(batch_size: int | None, drop_last: bool, pad_last: bool, shard: Shard) -> None:
    """Raise for a batch size, or a combination of options, that makes no sense."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise BadArgument(expected("batch_size to be a positive integer", batch_size))
    if drop_last and pad_last:
        raise BadArgument("Expected drop_last or pad_last, received both. The last batch is either dropped or padded.")
    if pad_last and batch_size % shard.count:
        what = f"a batch_size that the {shard.count} processes can share equally, with pad_last"
        raise BadArgument(expected(what, batch_size, f"Pass a multiple of {shard.count}."))
