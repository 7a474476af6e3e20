"""Labels of texts and tokens: inferring the problem and the classes from a dataset, and encoding labels.

The problem is single-label or multi-label classification, or regression. The training data defines the classes; an
unknown label is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from trainformer.core.errors import BadArgument, DataError, check_choice, check_count, did_you_mean, expected
from trainformer.data.labels import is_instance_of
from trainformer.data.text.fields import expected_value
from trainformer.data.text.token_records import from_int32, to_int32

Problem = Literal["single", "multi", "regression"]
PROBLEM_TYPES = {  # transformers' names
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
_MOST_CLASSES = 100_000  # with more, the labels are probably identifiers or texts


@dataclass(frozen=True)
class Labels:
    """A problem with its classes (or regression targets), and the class counts if known.

    `multi_hot` means that a sample's labels are given as one 0 or 1 per class.

    >>> labels = Labels("single", 2, ("bad", "good"))
    >>> labels.decode([labels.encode("good"), labels.encode(0)])
    array([1, 0])
    """

    problem: Problem
    count: int
    names: tuple[str, ...] | None = None
    multi_hot: bool = False
    counts: tuple[int, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def width(self) -> int:
        """Number of int32 values of an encoded label."""
        return {"single": 1, "multi": -(-self.count // 4), "regression": self.count}[self.problem]

    def encode(self, label: Any) -> np.ndarray:
        """Encode a label as int32 values; None is a missing label."""
        if self.problem == "single":
            return np.asarray([-1 if label is None else self.index(label)], dtype=np.int32)
        if self.problem == "regression":
            return to_int32(np.asarray(self._numbers(label), dtype=np.float32))
        if label is None:
            return np.full(self.width, -1, dtype=np.int32)
        marks = np.zeros(self.count, dtype=np.uint8)
        marks[self._indices(label)] = 1
        return to_int32(marks)

    def decode(self, rows: Sequence[np.ndarray]) -> np.ndarray | None:
        """Decode the labels of a batch: class indices (B,), or floats (B, classes); None if one is missing."""
        if self.problem == "regression":
            values = np.stack([from_int32(row, np.float32) for row in rows])
            return None if np.isnan(values).any() else values.copy()
        stacked = np.stack(rows)
        if (stacked < 0).any():
            return None
        if self.problem == "single":
            return stacked[:, 0].astype(np.int64)
        marks = np.stack([from_int32(row, np.uint8)[: self.count] for row in rows])
        return marks.astype(np.float32)

    def index(self, label: Any) -> int:
        """Return the index of a class, given its name or index."""
        if isinstance(label, float) and label.is_integer():  # pandas turns integers into floats if values are missing
            label = int(label)
        if isinstance(label, str) or (self._names_are_numbers() and _is_integer(label)):
            return self._index_of_name(str(label).strip())
        if not _is_integer(label):
            raise DataError(expected_value("a label that is the name or the number of a class", label))
        if not 0 <= int(label) < self.count:
            do = "Classes count from 0." if self.names is None else f"Classes are: {_some(self.names)}."
            raise DataError(expected(f"a label from 0 to {self.count - 1}", int(label), do))
        return int(label)

    def name(self, index: int) -> str:
        """Return the name of a class; unnamed classes are called as in transformers."""
        return f"LABEL_{index}" if self.names is None else self.names[index]

    def _index_of_name(self, label: str) -> int:
        if self.names is None:
            if label.isdecimal() and int(label) < self.count:
                return int(label)
            raise DataError(expected_value(f"a label from 0 to {self.count - 1}", label, "Pass class_names."))
        try:
            return self.names.index(label)
        except ValueError:
            hint = did_you_mean(label, self.names) or f"Known classes: {_some(self.names)}."
            raise DataError(expected_value("a label that occurs in the training data", label, hint)) from None

    def _names_are_numbers(self) -> bool:
        return self.names is not None and all(name.lstrip("-").isdecimal() for name in self.names)

    def _indices(self, label: Any) -> list[int]:
        several = _listed(label)
        if not self.multi_hot:
            return [self.index(one) for one in several]
        if len(several) != self.count or any(mark not in (0, 1) for mark in several):
            raise DataError(expected_value(f"{self.count} values of 0 or 1, one for each class", several))
        return [index for index, mark in enumerate(several) if mark]

    def _numbers(self, label: Any) -> list[float]:
        if label is None:
            return [math.nan] * self.count
        try:
            numbers = [float(one) for one in _listed(label)]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != self.count or not all(map(math.isfinite, numbers)):
            what = "a finite number" if self.count == 1 else f"{self.count} finite numbers"
            raise DataError(expected_value(f"{what} as label", label))
        return numbers


def read_labels(
    values: Iterable[Any],
    problem: Problem | None = None,
    names: Sequence[str] | None = None,
    count: int | None = None,
    known: Sequence[str] | None = None,
) -> Labels:
    """Infer the problem and the classes from all labels of a dataset. `problem`, `names` and `count` override it.

    Names are sorted (numbers by value), or in the order of `known` (a pretrained model's classes) if it has them all.

    >>> read_labels(["good", "bad", "good"])
    Labels(problem='single', count=2, names=('bad', 'good'), multi_hot=False)
    >>> read_labels([[0, 2], [], [1]]).count, read_labels([0.5, 1.25]).problem
    (3, 'regression')
    """
    seen = _LabelStatistics(regression=problem == "regression")
    negative: tuple[int, Any] | None = None
    for number, value in enumerate(values):
        seen.add(value)
        if negative is None and isinstance(value, int | float) and value < 0:
            negative = number, value
    problem = problem or seen.problem()
    if negative is not None and problem == "single":
        do = "Give every class a number from 0 on, and leave out records without a label."
        raise DataError(f"Record {negative[0]}: {expected('labels from 0 on', negative[1], do)}")
    if problem == "regression":
        return Labels("regression", count or seen.longest or 1, None if names is None else tuple(names))
    multi_hot = problem == "multi" and seen.is_multi_hot()
    found = seen.classes()
    texts = [label for label in found if isinstance(label, str)]
    _check_kinds(found, texts)
    if names is None and texts and not multi_hot:
        unique = sorted({str(label) for label in found}, key=_by_value)
        names = known if known is not None and set(unique) <= set(known) else unique
    largest = max((int(label) for label in found if not isinstance(label, str)), default=-1)
    size = max(seen.longest if multi_hot else largest + 1, count or 0)
    if names is None and known is not None and size in (0, len(known)):
        names = known
    size = size if names is None else len(names)
    if not seen.total and names is None and count is None:
        do = "Give each record a 'label'."
        raise DataError(expected("records with labels in the training data", "none", do))
    labels = Labels(problem, size, None if names is None else tuple(names), multi_hot)
    return replace(labels, counts=_class_counts(labels, seen))


def _check_kinds(found: Collection[Any], texts: list[str]) -> None:
    """Reject empty names, and names next to numbers: each would be a class of its own."""
    if any(not text.strip() for text in texts):
        raise DataError(expected("a label in every record", "an empty one", "Fill it in, or remove the record."))
    name = next((text for text in texts if not text.strip().lstrip("-").isdecimal()), None)
    number = next((label for label in found if not isinstance(label, str)), None)
    if name is not None and number is not None:
        both = f"{name!r} and {number!r}"
        raise DataError(expected("labels of one kind", both, "Use names or integers for all."))


def check_classes(labels: Labels, num_classes: int | None) -> None:
    """Check that there are at least two classes, and as many as `num_classes`."""
    if labels.problem == "regression":
        return
    if num_classes is not None and labels.count != num_classes:
        do = "Leave num_classes out to take it from the data."
        what = f"num_classes={labels.count}, as many as there are names or labels"
        raise BadArgument(expected(what, num_classes, do))
    if labels.problem == "single" and labels.count < 2:
        what = "none" if not labels.count else f"{labels.count} ({labels.name(0)})"
        raise DataError(expected("at least two classes", what, "Are the labels in the data?"))


def check_names(problem: Any, names: Any, count: Any) -> None:
    """Validate the class arguments that do not depend on the data."""
    if problem is not None:
        check_choice("problem", problem, get_args(Problem))
    if names is not None:
        listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        if not listed or not names or len(set(names)) != len(names):
            raise BadArgument(expected("class_names to be a list of different names", names))
    if count is not None:
        check_count("num_classes", count)
    if names is not None and count is not None and len(names) != count:
        raise BadArgument(expected(f"num_classes={len(names)}, as many as class_names", count, "Leave it out."))


class _LabelStatistics:
    """Types, values and lengths of all labels of a dataset."""

    def __init__(self, regression: bool) -> None:
        self.regression = regression
        self.kinds: set[str] = set()
        self.values: Counter[Any] = Counter()
        self.lengths: set[int] = set()
        self.repeats = False
        self.total = 0

    def add(self, value: Any) -> None:
        if value is None:
            return
        self.total += 1
        several = _as_list(value)
        if several is not None:
            self.kinds.add("list")
            self.lengths.add(len(several))
            self.repeats |= len(set(several)) < len(several)
            self.kinds |= {"marks" for one in several if isinstance(one, float | bool | np.floating | np.bool_)}
        if self.regression:
            return
        for one in _listed(value):
            plain = one.item() if isinstance(one, np.generic) else one
            if several is None:
                self.kinds.add(_kind(plain))
            self.values[plain] += 1
        if len(self.values) > _MOST_CLASSES and "float" not in self.kinds:
            do = "Is the label a text, or an identifier? For numbers pass problem='regression'."
            raise DataError(expected_value(f"at most {_MOST_CLASSES:,} classes", value, do))

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def problem(self) -> Problem:
        if "list" in self.kinds:
            return "multi"
        return "regression" if "float" in self.kinds else "single"

    def is_multi_hot(self) -> bool:
        """Whether lists hold a 0 or 1 per class: class indices would not occur twice in one list."""
        same = len(self.lengths) == 1 and self.longest > 1 and set(self.values) <= {0, 1}
        return same and ("marks" in self.kinds or self.repeats)

    def classes(self) -> list[Any]:
        for label in self.values:
            if not isinstance(label, str | int | float) or (isinstance(label, float) and not label.is_integer()):
                raise DataError(expected_value("labels that are names or numbers of classes", label))
            if not isinstance(label, str) and label < 0:
                do = "Give every class a number from 0 on, and leave out records without a label."
                raise DataError(expected("labels from 0 on", int(label), do))
        return list(self.values)


def _kind(value: Any) -> str:
    """The type of a label; numbers in text form, as in tables, are numbers."""
    if isinstance(value, str):
        return "float" if not _parses(value, int) and _parses(value, float) else "name"
    return "float" if isinstance(value, float) else "number"


def _parses(text: str, kind: type) -> bool:
    try:
        return math.isfinite(kind(text))
    except ValueError:
        return False


def _class_counts(labels: Labels, seen: _LabelStatistics) -> tuple[int, ...] | None:
    """How often each class occurs; None if there are unknown labels (reading the records raises the error)."""
    if labels.problem != "single" or not seen.total:
        return None
    counts = [0] * labels.count
    try:
        for value, times in seen.values.items():
            counts[labels.index(value)] += times
    except DataError:
        return None
    return tuple(counts)


def _as_list(value: Any) -> list[Any] | None:
    if isinstance(value, np.ndarray) or is_instance_of(value, "torch.Tensor"):
        return value.tolist() if value.ndim else None
    return list(value) if isinstance(value, list | tuple | set) else None


def _listed(value: Any) -> list[Any]:
    several = _as_list(value)
    return [value] if several is None else several


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer | np.bool_)


def _by_value(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if _parses(name, int) else (1, 0, name)


def _some(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
