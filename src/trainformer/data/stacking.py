"""Batches of NumPy arrays: how samples become one, and how a batch that is too small is filled up.

Owns both. A batch for a compiled step must hold numbers only, and always as many rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import is_array

#: The key of a batch that says which of its rows are samples; the others repeat them, and count nothing.
VALID = "_valid"


def stack_samples(samples: Sequence[Any]) -> Any:
    """One batch of samples: dicts become a dict, tuples a tuple, of arrays whose first dimension is the sample.

    Anything that NumPy can read is an array, also tensors and images. What has another shape in every sample, and what
    is no number, is an error that names the key.

    >>> stack_samples([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}])
    {'x': array([[1, 2],
           [3, 4]]), 'y': array([0, 1])}
    """
    return _stacked(samples, "")


def _stacked(values: Sequence[Any], name: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        _insist_on_keys(values, name)
        return {key: _stacked([value[key] for value in values], f"{name}[{key!r}]") for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_stacked([value[i] for value in values], f"{name}[{i}]") for i in range(len(first))))
    if isinstance(first, tuple) or (isinstance(first, list) and any(is_array(part) for part in first)):
        if len({len(value) for value in values}) != 1:
            raise DataError(expected(f"{_called(name)} to have as many parts everywhere", _some(map(len, values))))
        return tuple(_stacked([value[i] for value in values], f"{name}[{i}]") for i in range(len(first)))
    return _array(values, name)


def _array(values: Sequence[Any], name: str) -> np.ndarray:
    try:
        arrays = [np.asarray(value) for value in values]
    except (ValueError, TypeError, RuntimeError) as error:  # ragged inside, a tensor on a device
        raise DataError(expected(f"{_called(name)} to be numbers or arrays", error, _ADVICE)) from error
    wrong = next((place for place, array in enumerate(arrays) if array.dtype.kind not in "biufcV"), None)
    if wrong is not None:
        raise DataError(expected(f"{_called(name)} to be numbers or arrays", _shown(values[wrong]), _ADVICE))
    if len({array.shape for array in arrays}) != 1:
        do = "Pad them in the data set, or pass a collate function (`token_batch` for tokens)."
        raise DataError(
            expected(f"{_called(name)} to have one shape in all samples", _some(a.shape for a in arrays), do)
        )
    return np.stack(arrays)


_ADVICE = "Leave it out of the samples, convert it, or pass a collate function."


def _called(name: str) -> str:
    return f"sample{name}" if name else "samples"


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _some(values: Any) -> str:
    return ", ".join(map(str, dict.fromkeys(list(values)[:64])))


def _insist_on_keys(values: Sequence[Mapping[str, Any]], name: str) -> None:
    keys = set(values[0])
    for other in values:
        if not isinstance(other, Mapping) or set(other) != keys:
            received = sorted(map(str, other)) if isinstance(other, Mapping) else _shown(other)
            raise DataError(expected(f"{_called(name)} to have the keys {sorted(map(str, keys))} everywhere", received))


def filled_up(data: Any, size: int, rows: int) -> dict[str, Any]:
    """A batch of `size` samples with as many rows as `rows`, the last ones repeated, and which of them are samples.

    >>> filled_up({"x": np.array([7, 8])}, size=2, rows=3)
    {'x': array([7, 8, 7]), '_valid': array([ True,  True, False])}
    """
    if not isinstance(data, Mapping):
        do = "Return dicts from the data set or the collate function, or pass drop_last=True."
        raise BadArgument(expected("batches that are dicts, to note which rows are padding", type(data).__name__, do))
    if VALID in data:
        return dict(data)
    have = next((len(value) for value in data.values() if is_array(value)), 0)
    if have > rows:
        raise DataError(expected(f"batches of at most {rows} rows", have, "Let the loader make smaller ones."))
    repeated = {key: _repeated(value, have, rows) for key, value in data.items()}
    return {**repeated, VALID: np.arange(rows) < size}


def _repeated(value: Any, have: int, rows: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _repeated(part, have, rows) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_repeated(part, have, rows) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not is_array(value) or len(value) != have or have == rows:
        return value
    return value[np.arange(rows) % have]
