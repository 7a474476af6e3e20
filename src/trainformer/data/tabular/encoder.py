"""Encoding the columns of a table as numbers: standardised numbers and category indices, learned from training rows.

The encoder is plain data, so that it is part of a checkpoint and gives the same numbers at prediction.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.data.tabular.table import Table, column_named

logger = logging.getLogger("trainformer")

UNKNOWN, MISSING = 0, 1  # indices of a category that training did not have, and of a missing value
_MOST_DISTINCT = 0.5  # a share of distinct values above which a column looks like an identifier


@dataclass(frozen=True)
class Numeric:
    """A numeric column: its mean and standard deviation, and whether training rows had missing values."""

    name: str
    mean: float
    std: float
    has_missing: bool


@dataclass(frozen=True)
class Categorical:
    """A categorical column and its categories in training, sorted."""

    name: str
    categories: tuple[str, ...]


@dataclass(frozen=True)
class TableEncoder:
    """How columns become numbers.

    Numbers are standardised; a missing one becomes 0, the mean, and columns that had missing values in training get a
    second column that marks them. Categories are numbered from 2: 0 is a category that training did not have, and 1 a
    missing value.

    >>> rows = Table({"age": [30, 50, None], "city": ["Rome", "Oslo", "Rome"]})
    >>> encoder = TableEncoder.learn(rows, numeric=["age"], categorical=["city"])
    >>> numbers, categories = encoder.encode(Table({"age": [50, None], "city": ["Paris", None]}))
    >>> numbers.tolist(), categories.tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [[0], [1]])
    """

    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]

    @classmethod
    def learn(
        cls, table: Table, numeric: Sequence[str], categorical: Sequence[str], scale: bool = True
    ) -> TableEncoder:
        """Learn from the training rows."""
        numbers = []
        for name in numeric:
            values = numbers_of(table, name)
            known = values[~np.isnan(values)]
            if not known.size:
                raise DataError(expected(f"numbers in column {name!r} of {table.name}", "missing values only"))
            mean, std = (float(known.mean()), float(known.std())) if scale else (0.0, 1.0)
            numbers.append(Numeric(name, mean, std if std > 0 else 1.0, known.size < values.size))
        kinds = []
        for name in categorical:
            found = sorted({value for value in categories_of(table, name) if value is not None})
            if len(found) > max(20, _MOST_DISTINCT * len(table)):
                logger.warning(
                    "column %r has %d categories in %d rows: if it is an identifier, list it in `ignore`",
                    name, len(found), len(table),
                )  # fmt: skip
            kinds.append(Categorical(name, tuple(found)))
        return cls(tuple(numbers), tuple(kinds))

    @property
    def names(self) -> list[str]:
        """All columns."""
        return [*(column.name for column in self.numeric), *(column.name for column in self.categorical)]

    @property
    def width(self) -> int:
        """Number of numeric inputs, with the marks of missing values."""
        return len(self.numeric) + sum(column.has_missing for column in self.numeric)

    @property
    def cardinalities(self) -> list[int]:
        """Number of indices of each categorical column."""
        return [len(column.categories) + 2 for column in self.categorical]

    def encode(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (rows, width) as float32 and category indices (rows, columns) as int64."""
        absent = [name for name in self.names if name not in table.columns]
        if absent:
            do = "These columns were there in training."
            raise DataError(expected(f"the columns {', '.join(absent)} in {table.name}", list(table.columns), do))
        numbers, marks = [], []
        for column in self.numeric:
            values = numbers_of(table, column.name)
            missing = np.isnan(values)
            numbers.append(np.where(missing, 0.0, (values - column.mean) / column.std))
            if column.has_missing:
                marks.append(missing.astype(np.float64))
        indices = [_indices(categories_of(table, column.name), column.categories) for column in self.categorical]
        return _stacked([*numbers, *marks], len(table), np.float32), _stacked(indices, len(table), np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        columns = asdict(self)
        return {
            "numeric": [dict(column) for column in columns["numeric"]],
            "categorical": [{**column, "categories": list(column["categories"])} for column in columns["categorical"]],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TableEncoder:
        """The encoder of `state_dict`."""
        kinds = (Categorical(column["name"], tuple(column["categories"])) for column in state["categorical"])
        return cls(tuple(Numeric(**column) for column in state["numeric"]), tuple(kinds))


def numbers_of(table: Table, name: str) -> np.ndarray:
    """A numeric column; infinite values and text are errors that name the row."""
    values = column_named(table, name, "a feature")
    if not table.is_numeric(name):
        if all(value is None for value in values):
            return np.full(len(values), np.nan)
        wrong = next(index for index, value in enumerate(values) if value is not None)
        do = "List the column in `categorical`, or clean it."
        raise DataError(
            expected(f"numbers in column {name!r} of {table.name}", f"{values[wrong]!r} in row {wrong}", do)
        )
    infinite = np.flatnonzero(np.isinf(values))
    if infinite.size:
        what = f"finite numbers in column {name!r} of {table.name}"
        raise DataError(expected(what, f"{values[infinite[0]]} in row {infinite[0]}", "Mark missing values as NaN."))
    return values


def categories_of(table: Table, name: str) -> np.ndarray:
    """A column as strings, None for missing values; whole numbers have no decimals."""
    values = column_named(table, name, "a feature")
    if not table.is_numeric(name):
        return values
    texts = [None if np.isnan(v) else str(int(v)) if v.is_integer() else repr(float(v)) for v in values]
    return np.array(texts, dtype=object)


def _indices(values: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    place: dict[str | None, int] = {name: index + 2 for index, name in enumerate(categories)}
    place[None] = MISSING
    return np.array([place.get(value, UNKNOWN) for value in values], np.int64)


def _stacked(columns: Sequence[np.ndarray], rows: int, kind: Any) -> np.ndarray:
    return np.stack(columns, axis=1).astype(kind) if columns else np.zeros((rows, 0), kind)
