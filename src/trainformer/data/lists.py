"""Image lists: a CSV, JSON or Parquet file with a column of paths (or of encoded images) and optionally labels.

Only the list is read up front; an image is decoded when its sample is read.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch.utils.data import Dataset

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.folder import decode_image, read_image
from trainformer.data.text.tables import read_csv

if TYPE_CHECKING:
    from PIL import Image

IMAGE_COLUMNS = (
    *("image", "img", "images", "path", "file", "filename", "file_name", "filepath", "file_path"),
    *("image_path", "img_path", "image_file", "image_name", "image_id", "name"),
)
LABEL_COLUMNS = (
    *("label", "labels", "target", "targets", "class", "class_name", "classname", "category", "fine_label"),
    *("label_name", "class_id", "category_id", "label_id", "y"),
)
_MAX_CHECKED = 10_000  # files checked up front: about 50 ms on a local disk
_NUMBER = re.compile(r"[+-]?\d+(\.0*)?")


class ImageList(Dataset):
    """Images from a list file: ``(image, label)``, or ``(image, None)`` for a list without labels.

    The file is `.csv`, `.tsv`, `.json` (a list of records), `.jsonl` or `.parquet`. Columns are found by common names
    unless `image_key` and `label_key` name them; `label_key=False` ignores labels. Image paths are relative to `root`
    (default: the folder of the list). Integer labels are used as they are; names are sorted and numbered from 0. A
    Parquet file may contain the images, as HF `datasets` writes it: they stay in memory, encoded.

    The first 10,000 files are checked at once, so that a wrong `root` is an error before training.
    """

    classes: list[str]
    class_to_idx: dict[str, int]
    targets: list[int]

    def __init__(
        self,
        path: str | Path,
        image_key: str | None = None,
        label_key: str | Literal[False] | None = None,
        root: str | Path | None = None,
        channels: int | None = 3,
    ) -> None:
        self.path = _existing_file(path)
        self.root = self.path.parent if root is None else Path(root).expanduser()
        self.channels = channels
        table = _read_table(self.path)
        if not table.size:
            raise DataError(f"Expected at least one image in the list '{self.path}', received an empty list.")
        self.image_key = _column(table.columns, image_key, IMAGE_COLUMNS, "image", self.path)
        self.label_key = None if label_key is False else _label_column(table.columns, label_key, self.path)
        labels: Sequence[int | None] = [None] * table.size
        if self.label_key is not None:
            self.targets, names = _numbered(table.columns[self.label_key], f"'{self.label_key}' of '{self.path}'")
            names = names or table.class_names.get(self.label_key)
            labels = self.targets
            # Absent rather than None for integer labels, so that hasattr() works.
            if names is not None:
                self.classes, self.class_to_idx = names, {name: number for number, name in enumerate(names)}
        self._encoded = _encoded_images(table.columns[self.image_key])
        locations = self._locations(table.columns[self.image_key])
        self.samples: list[tuple[str, int | None]] = list(zip(locations, labels, strict=True))
        if self._encoded is None:
            self._check_files(locations)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int | None]:
        place, label = self.samples[index]
        data = None if self._encoded is None else self._encoded.data(index)
        if data is None:
            return read_image(place, self.channels), label
        return decode_image(data, self.channels, f"the image {place} of '{self.path}'"), label

    def remap_classes(self, classes: Sequence[str]) -> ImageList:
        """A copy with labels that index another list of classes."""
        other = copy.copy(self)
        numbers = {name: index for index, name in enumerate(classes)}
        other.targets = [numbers[self.classes[label]] for label in self.targets]
        other.samples = [(place, label) for (place, _), label in zip(self.samples, other.targets, strict=True)]
        other.classes, other.class_to_idx = list(classes), numbers
        return other

    def _locations(self, column: Any) -> list[str]:
        """The path of every image, or a description of one that is stored in the list."""
        if self._encoded is None:
            return [os.path.join(self.root, path) for path in _paths(column, f"'{self.image_key}' of '{self.path}'")]
        locations = []
        for row in range(len(column)):
            name = self._encoded.path(row)
            if not self._encoded.has_data(row):
                if not name:
                    where = f"row {row} of '{self.path}'"
                    raise DataError(f"Expected an image in {where}, received neither its bytes nor a path.")
                name = os.path.join(self.root, name)
            locations.append(name or f"in row {row}")
        return locations

    def _check_files(self, paths: Sequence[str]) -> None:
        checked = paths[:_MAX_CHECKED]
        missing = [path for path in checked if not os.path.isfile(path)]
        if missing:
            shown = ", ".join(f"'{path}'" for path in missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise DataError(
                f"Expected the images listed in '{self.path}', received paths of which {len(missing)} of "
                f"{len(checked)} do not exist: {shown}. Pass root=..., the folder paths are relative to "
                f"(now '{self.root}'), or remove these rows."
            )


# -- columns -----------------------------------------------------------------------------------------------


def _column(columns: Mapping[str, Any], name: str | None, common: Sequence[str], what: str, path: Path) -> str:
    has = f"'{path}' has the columns: {', '.join(map(repr, columns))}."
    if name is not None:
        if name not in columns:
            raise DataError(
                expected(f"{what}_key to be a column", name, f"{did_you_mean(name, columns)} {has}".strip())
            )
        return name
    found = _common_column(columns, common)
    if found is None:
        raise DataError(
            f"Expected a column of {what}s with a common name ({', '.join(common[:6])}, ...), received none. {has} "
            f"Pass {what}_key='...'; the first row of a CSV file must name the columns."
        )
    return found


def _label_column(columns: Mapping[str, Any], name: str | None, path: Path) -> str | None:
    if name is None:
        return _common_column(columns, LABEL_COLUMNS)
    return _column(columns, name, LABEL_COLUMNS, "label", path)


def _common_column(columns: Iterable[str], common: Sequence[str]) -> str | None:
    by_name = {name.strip().lower(): name for name in reversed(list(columns))}
    return next((by_name[name] for name in common if name in by_name), None)


def _paths(column: Any, where: str) -> list[str]:
    paths = [value if isinstance(value, str) else "" for value in column]
    empty = [row for row, path in enumerate(paths) if not path.strip()]
    if empty:
        raise DataError(
            f"Expected the path of an image in every row of {where}, received {column[empty[0]]!r} in row {empty[0]} "
            f"({len(empty)} such rows). Rows count from 0, without the header."
        )
    remote = next((path for path in paths if "://" in path), None)
    if remote is not None:
        raise DataError(expected(f"paths of local files in {where}", remote, "Download the images first."))
    return [os.path.expanduser(path) for path in paths]


def _numbered(column: Any, where: str) -> tuple[list[int], list[str] | None]:
    """Labels as integers from 0, and the class names if the labels were names."""
    values = [value.strip() if isinstance(value, str) else value for value in column]
    missing = [row for row, value in enumerate(values) if value is None or value == ""]
    if missing:
        raise DataError(
            f"Expected a label in every row of {where}, received none in row {missing[0]} ({len(missing)} such rows). "
            "Rows count from 0, without the header. Fill them in, or pass label_key=False to ignore labels."
        )
    kinds = {str if isinstance(value, str) else type(value) for value in values}
    if str in kinds and len(kinds) > 1:
        name = next(value for value in values if isinstance(value, str))
        other = next(value for value in values if not isinstance(value, str))
        raise DataError(
            expected(f"labels of one kind in {where}", f"{name!r} and {other!r}", "Use names or integers for all.")
        )
    if str in kinds and not all(_NUMBER.fullmatch(value) for value in values):
        return _from_names(values)
    return _from_numbers(values, where), None


def _from_names(values: Sequence[str]) -> tuple[list[int], list[str]]:
    names = sorted(set(values))
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers[value] for value in values], names


def _from_numbers(values: Sequence[Any], where: str) -> list[int]:
    numbers = []
    for value in values:
        try:
            whole = float(value).is_integer() and float(value) >= 0
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise DataError(
                expected(f"integers from 0, or names, as labels in {where}", value, "Pass label_key='...'.")
            )
        numbers.append(int(value.partition(".")[0]) if isinstance(value, str) else int(value))
    return numbers


# -- images stored in the list ------------------------------------------------------------------------------


class _EncodedImages:
    """A column of encoded images, or of records {"bytes", "path"} as HF `datasets` writes them."""

    def __init__(self, column: Any) -> None:
        kind = column.type
        fields = [kind.field(i).name for i in range(kind.num_fields)]
        self._column = column
        self._in_records = "bytes" in fields
        self._has_paths = "path" in fields

    def data(self, row: int) -> bytes | None:
        """The encoded image, or None if there is only a path."""
        value = self._column[row]
        return (value["bytes"] if self._in_records and value.is_valid else value).as_py()

    def has_data(self, row: int) -> bool:
        value = self._column[row]
        return bool(value.is_valid and (not self._in_records or value["bytes"].is_valid))

    def path(self, row: int) -> str | None:
        value = self._column[row]
        return value["path"].as_py() if self._has_paths and value.is_valid else None


def _encoded_images(column: Any) -> _EncodedImages | None:
    """The images of a column, unless it holds paths."""
    kind = str(getattr(column, "type", ""))
    holds_images = kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes:" in kind)
    return _EncodedImages(column) if holds_images else None


# -- files -------------------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """Columns by name, the number of rows, and class names the file declares for a column."""

    columns: Mapping[str, Any]
    size: int
    class_names: Mapping[str, list[str]]


def _read_table(path: Path) -> _Table:
    suffix = path.suffix.lower()
    try:
        return _READERS[suffix](path)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"Expected a list that can be read as {suffix}, received '{path}': {error}.") from error


def _read_csv(path: Path) -> _Table:
    return _from_records(read_csv(path).records, path)


def _read_json_lines(path: Path) -> _Table:
    with open(path, encoding="utf-8-sig") as file:
        return _from_records([json.loads(line) for line in file if line.strip()], path)


def _read_json(path: Path) -> _Table:
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return _read_json_lines(path)  # often named .json too
    if isinstance(content, Mapping) and content and all(isinstance(column, list) for column in content.values()):
        lengths = {len(column) for column in content.values()}
        if len(lengths) == 1:
            return _Table(content, lengths.pop(), {})
    return _from_records(content, path)


def _from_records(records: Any, path: Path) -> _Table:
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise DataError(
            f"Expected '{path}' to contain one record per image, such as "
            '{"image": "cat/1.png", "label": "cat"}, received something else.'
        )
    names = list(dict.fromkeys(name for record in records for name in record))
    return _Table({name: [record.get(name) for record in records] for name in names}, len(records), {})


def _read_parquet(path: Path) -> _Table:
    parquet = require("pyarrow.parquet", "datasets", "to read Parquet files")
    arrow = require("pyarrow", "datasets", "to read Parquet files")
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"Expected a Parquet file, received '{path}': {error}.") from error
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name)
        is_image = str(column.type).startswith(("struct<", "binary", "large_binary"))
        columns[name] = column if is_image else column.to_pylist()
    return _Table(columns, table.num_rows, _declared_names(table.schema.metadata or {}))


def _declared_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Class names in the metadata HF `datasets` writes."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: list(kind["names"]) for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        return {}


_READERS: dict[str, Callable[[Path], _Table]] = {
    **dict.fromkeys((".csv", ".tsv", ".tab"), _read_csv),
    **dict.fromkeys((".jsonl", ".ndjson"), _read_json_lines),
    ".json": _read_json,
    **dict.fromkeys((".parquet", ".pq"), _read_parquet),
}


def is_list(path: str | Path) -> bool:
    """Whether a path has the extension of an image list.

    >>> is_list("train.csv"), is_list("train.tar")
    (True, False)
    """
    return Path(path).suffix.lower() in _READERS


def _existing_file(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if not is_list(path):
        raise BadArgument(expected(f"a list of images ({', '.join(_READERS)})", str(path)))
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else None
        names = sorted(other.name for other in folder.iterdir() if is_list(other)) if folder else []
        contents = f"'{folder}' has the lists: {', '.join(names[:8])}." if names else ""
        raise DataError(
            f"Expected a list of images, received '{path}', which does not exist. "
            f"{did_you_mean(path.name, names)} {contents}".replace("  ", " ").strip()
        )
    return path
