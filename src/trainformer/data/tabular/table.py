"""Tables in memory: named columns of numbers or categories, from files, frames, arrays and samples.

Numbers are float64 with NaN for missing values; categories are strings with None. Nothing is guessed about numbers: an
integer column stays numeric unless it is named as categorical.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.dataset import IndexedDataset, normalize_index

_CSV, _PARQUET = {".csv": ",", ".tsv": "\t"}, {".parquet", ".pq"}
# What pandas reads as missing in a CSV file, and the question mark of the UCI repository.
_MISSING = frozenset(
    {"", "NA", "N/A", "n/a", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "None", "<NA>", "#N/A", "?"}
)
_NO_CATEGORY = (Mapping, list, tuple, set, np.ndarray, bytes, datetime.date, datetime.time, datetime.timedelta)


class Table(IndexedDataset):
    """Columns of one length in memory. A sample is a dict.

    >>> table = Table({"age": [31, 45], "city": ["Rome", None]})
    >>> table[1], table.is_numeric("age")
    ({'age': 45.0, 'city': None}, True)
    """

    in_memory = True
    targets: np.ndarray  # class indices, set by a task that classifies, with the names of the classes
    classes: list[str]

    def __init__(self, columns: Mapping[str, Any], name: str = "the table") -> None:
        self.name = name
        self.columns: dict[str, np.ndarray] = {}
        self.unusable: dict[str, DataError] = {}  # columns that are neither numbers nor categories: dates, lists
        for key, values in columns.items():
            try:
                self.columns[str(key)] = _column(values, f"column {str(key)!r} of {name}")
            except DataError as error:
                self.columns[str(key)], self.unusable[str(key)] = _objects(values), error
        lengths = {key: len(values) for key, values in self.columns.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(expected(f"columns of one length in {name}", lengths or "no column"))
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = normalize_index(index, len(self))
        return {
            key: values[row].item() if self.is_numeric(key) else values[row] for key, values in self.columns.items()
        }

    def is_numeric(self, column: str) -> bool:
        """Whether a column holds numbers."""
        return self.columns[column].dtype.kind == "f"

    def take(self, rows: np.ndarray) -> Table:
        """A copy with these rows."""
        other = Table({key: values[rows] for key, values in self.columns.items()}, self.name)
        other.unusable = self.unusable
        for key in ("targets", "classes"):
            if hasattr(self, key):
                setattr(other, key, self.targets[rows] if key == "targets" else self.classes)
        return other

    def remap_classes(self, classes: Sequence[str]) -> Table:
        """A copy whose class indices refer to another list of classes."""
        other = Table(self.columns, self.name)
        place = {name: index for index, name in enumerate(classes)}
        other.targets = np.array([place[self.classes[label]] for label in self.targets], np.int64)
        other.classes = list(classes)
        return other


# -- where tables come from ------------------------------------------------------------------------------------------


def load_table(data: Any) -> Any:
    """A table from a path, a sample, a frame (pandas, polars, Arrow), an HF dataset, a list of dicts, or (X, y) arrays.

    The columns of arrays are called x0, x1, ... and target. Other data are returned as they are.

    >>> len(load_table("wine"))
    178
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, str | Path):
        return _from_path(data)
    if isinstance(data, tuple | np.ndarray) or hasattr(data, "tensors") or hasattr(data, "detach"):
        return _from_arrays(data)
    if isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        names = list(dict.fromkeys(key for row in data for key in row))
        return Table({name: [row.get(name) for row in data] for name in names}, "the list of rows")
    found: Any = getattr(data, "column_names", None)  # Arrow and HF datasets
    if found is None:
        found = getattr(data, "columns", None)
    if found is None or callable(found) or not hasattr(data, "__getitem__"):
        return data
    return Table({str(name): data[name] for name in _unique(list(found))}, f"the {type(data).__name__}")


def sample_names() -> list[str]:
    """Names of the samples, which come with scikit-learn.

    >>> sample_names()
    ['breast-cancer', 'diabetes', 'wine']
    """
    return sorted(_SAMPLES)


def _from_path(path_or_name: str | Path) -> Table:
    if isinstance(path_or_name, str) and path_or_name in _SAMPLES:
        return _SAMPLES[path_or_name]()
    path = Path(path_or_name).expanduser()
    suffix = path.suffix.lower()
    if not path.is_file():
        hint = did_you_mean(str(path_or_name), _SAMPLES)
        do = f"{hint} Samples: {', '.join(map(repr, sample_names()))}.".strip()
        raise DataError(expected("a file, or the name of a sample", f"'{path}', which does not exist", do))
    if suffix in _CSV:
        return _from_csv(path, _CSV[suffix])
    if suffix in _PARQUET:
        parquet = require("pyarrow.parquet", "datasets", "to read Parquet")
        try:
            return load_table(parquet.read_table(path))
        except OSError as error:
            raise DataError(f"Expected a Parquet file, received '{path}', which cannot be read: {error}") from error
    known = ", ".join([*_CSV, *sorted(_PARQUET)])
    raise DataError(expected(f"a table: a file that ends in {known}", str(path), "Or pass a DataFrame."))


def _from_csv(path: Path, delimiter: str) -> Table:
    """The columns of a CSV file: numeric if all values that are not missing are numbers."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names = _unique(next(reader, []))
            rows = []
            for row in reader:
                if row and len(row) != len(names):
                    what = f"{len(names)} values in line {reader.line_num} of '{path}', one per column"
                    raise DataError(expected(what, len(row)))
                if row:
                    rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Expected a CSV file in UTF-8, received '{path}', which cannot be read: {error}") from error
    if not rows:
        raise DataError(expected(f"rows in '{path}'", "none"))
    columns = {}
    for place, name in enumerate(names):
        values = [None if row[place].strip() in _MISSING else row[place].strip() for row in rows]
        columns[name] = _numbers(values) if _are_numbers(values) else values
    return Table(columns, f"'{path}'")


def _unique(names: Sequence[Any]) -> Sequence[Any]:
    repeated = sorted({str(name) for name in names if list(map(str, names)).count(str(name)) > 1})
    if repeated or not names:
        raise DataError(expected("columns with names of their own", repeated or "no column"))
    return names


def _are_numbers(values: Sequence[str | None]) -> bool:
    try:
        return any(value is not None for value in values) and all(v is None or math.isfinite(float(v)) for v in values)
    except ValueError:
        return False


def _numbers(values: Sequence[str | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _from_arrays(data: Any) -> Table:
    parts = getattr(data, "tensors", data if isinstance(data, tuple) else (data,))
    arrays = [np.asarray(part.detach().cpu() if hasattr(part, "detach") else part) for part in parts]
    if len(arrays) > 2 or arrays[0].ndim != 2:
        do = "Pass (X, y) with X of shape (rows, columns), or a DataFrame."
        raise DataError(expected("one array of features and one of targets", [array.shape for array in arrays], do))
    columns = {f"x{place}": arrays[0][:, place] for place in range(arrays[0].shape[1])}
    if len(arrays) == 2:
        targets = arrays[1]
        if targets.ndim == 1 or targets.shape[1] == 1:
            columns["target"] = targets.reshape(len(targets))
        else:
            columns |= {f"target{place}": targets[:, place] for place in range(targets.shape[1])}
    return Table(columns, "the arrays")


# -- columns ---------------------------------------------------------------------------------------------------------


def _column(values: Any, name: str) -> np.ndarray:
    """Float64 for numbers (NaN: missing), an array of strings and None for anything else."""
    if hasattr(values, "to_pylist"):
        values = values.to_pylist()  # Arrow: missing integers would become NaN in a float column of their own making
    array = values.to_numpy() if hasattr(values, "to_numpy") else values
    if not isinstance(array, np.ndarray):
        array = _objects(array)
    if array.ndim != 1:
        raise DataError(expected(f"{name} to have one value per row", f"shape {array.shape}"))
    if array.dtype.kind in "mM":
        do = "Replace dates by numbers (year, month, seconds, ...), or list the column in `ignore`."
        raise DataError(expected(f"{name} to hold numbers or categories", str(array.dtype), do))
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if array.dtype == object and all(_is_missing(value) or _is_number(value) for value in array):
        numbers = [math.nan if _is_missing(value) else float(value) for value in array]
        if not all(map(math.isnan, numbers)):
            return np.array(numbers, np.float64)
    strange = next((value for value in array if isinstance(value, _NO_CATEGORY)), None)
    if strange is not None:
        do = "Convert the column, or list it in `ignore`."
        raise DataError(expected(f"{name} to hold numbers or categories", f"a {type(strange).__name__}", do))
    return np.array([None if _is_missing(value) else str(value) for value in array], dtype=object)


def _objects(values: Any) -> np.ndarray:
    listed = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool | np.bool_)


def _is_missing(value: Any) -> bool:
    """None, NaN, and pandas' NA and NaT."""
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    )


# -- samples ---------------------------------------------------------------------------------------------------------


def _sample(name: str) -> Table:
    """A dataset of scikit-learn; targets of classification are the names of the classes."""
    module = require("sklearn.datasets", "samples", f"for the sample {name!r}")
    data = getattr(module, f"load_{name.replace('-', '_')}")()
    columns = {str(key).replace(" ", "_"): data.data[:, place] for place, key in enumerate(data.feature_names)}
    classes = getattr(data, "target_names", None)
    target = data.target if classes is None else np.asarray(classes, dtype=object)[data.target]
    return Table({**columns, "target": target}, f"the sample {name!r}")


_SAMPLES: dict[str, Callable[[], Table]] = {
    name: partial(_sample, name) for name in ("diabetes", "wine", "breast-cancer")
}


def column_named(table: Table, name: str, role: str) -> np.ndarray:
    """A column, or an error that suggests similar names."""
    if name not in table.columns:
        hint = did_you_mean(name, table.columns) or f"Columns: {', '.join(table.columns)}."
        raise BadArgument(expected(f"{role} to be a column of {table.name}", name, hint))
    if name in table.unusable:
        raise table.unusable[name]
    return table.columns[name]
