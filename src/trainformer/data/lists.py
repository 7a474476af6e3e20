"""Image lists: a CSV, JSON or Parquet file with a column of paths (or of encoded images) and optionally labels.

Only the list is read up front; an image is decoded when its sample is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.folder import LabelledFiles, decode_image, read_image
from trainformer.data.text.tables import read_csv
from trainformer.utils.files import decode_json, decode_record

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


class ImageList(LabelledFiles):
    """Images from a list file: ``(image, label)``, or ``(image, None)`` for a list without labels.

    The file is `.csv`, `.tsv`, `.json` (a list of records), `.jsonl` or `.parquet`. Columns are found by common names
    unless `image_key` and `label_key` name them; `label_key=False` ignores labels. Image paths are relative to `root`
    (default: the folder of the list). Integer labels are used as they are; names are sorted and numbered from 0. A
    Parquet file may contain the images, as HF `datasets` writes it: they stay in memory, encoded.

    The first 10,000 files are checked at once, so that a wrong `root` is an error before training.
    """

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
        suffix = self.path.suffix.lower()
        try:
            columns, class_names = _READERS[suffix](self.path)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            what = f"a list that can be read as {suffix}"
            raise DataError(f"Expected {what}, received '{self.path}': {error}.") from error
        size = len(next(iter(columns.values()), ()))
        if not size:
            raise DataError(f"Expected at least one image in the list '{self.path}', received an empty list.")
        self.image_key = _column(columns, image_key, IMAGE_COLUMNS, "image", self.path)
        found = None if label_key is False else _column(columns, label_key, LABEL_COLUMNS, "label", self.path)
        self.label_key = found
        labels: Sequence[int | None] = [None] * size
        if self.label_key is not None:
            self.targets, names = _numbered(columns[self.label_key], f"'{self.label_key}' of '{self.path}'")
            names = names or class_names.get(self.label_key)
            labels = self.targets
            # Absent rather than None for integer labels, so that hasattr() works.
            if names is not None:
                self.classes, self.class_to_idx = names, {name: number for number, name in enumerate(names)}
        column = columns[self.image_key]
        kind = str(getattr(column, "type", ""))
        holds_images = kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes:" in kind)
        self._encoded = column if holds_images else None  # the images, unless the column has their paths
        if holds_images:
            locations = self._stored_locations(column)
        else:
            paths = _paths(column, f"'{self.image_key}' of '{self.path}'")
            locations = [os.path.join(self.root, path) for path in paths]
            self._check_files(locations)
        self.samples = list(zip(locations, labels, strict=True))

    def __getitem__(self, index: int) -> tuple[Image.Image, int | None]:
        place, label = self.samples[index]
        data = None if self._encoded is None else _stored_image(self._encoded[index])[0]
        if data is None or not data.is_valid:
            return read_image(place, self.channels), label
        return decode_image(data.as_py(), self.channels, f"the image {place} of '{self.path}'"), label

    def _stored_locations(self, column: Any) -> list[str]:
        """A description of every image that is stored in the list, or its path."""
        locations = []
        for row, value in enumerate(column):
            data, path = _stored_image(value)
            name = None if path is None else path.as_py()
            if data is None or not data.is_valid:
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


def _column(columns: Mapping[str, Any], name: str | None, common: Sequence[str], what: str, path: Path) -> Any:
    """The named column, else one with a common name; None if there are no labels."""
    has = f"'{path}' has the columns: {', '.join(map(repr, columns))}."
    if name is not None:
        if name not in columns:
            do = f"{did_you_mean(name, columns)} {has}".strip()
            raise DataError(expected(f"{what}_key to be a column", name, do))
        return name
    by_name = {name.strip().lower(): name for name in reversed(list(columns))}
    found = next((by_name[name] for name in common if name in by_name), None)
    if found is None and what == "image":
        raise DataError(
            f"Expected a column of {what}s with a common name ({', '.join(common[:6])}, ...), received none. {has} "
            f"Pass {what}_key='...'; the first row of a CSV file must name the columns."
        )
    return found


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
        both = f"{name!r} and {other!r}"
        raise DataError(expected(f"labels of one kind in {where}", both, "Use names or integers for all."))
    if str in kinds and not all(_NUMBER.fullmatch(value) for value in values):
        names = sorted(set(values))
        indices = {name: index for index, name in enumerate(names)}
        return [indices[value] for value in values], names
    numbers = []
    for value in values:
        try:
            whole = float(value).is_integer() and float(value) >= 0
        except (TypeError, ValueError):
            whole = False
        if not whole:
            what = f"integers from 0, or names, as labels in {where}"
            raise DataError(expected(what, value, "Pass label_key='...'."))
        numbers.append(int(value.partition(".")[0]) if isinstance(value, str) else int(value))
    return numbers, None


def _stored_image(value: Any) -> tuple[Any, Any]:
    """The Arrow scalars (or None) of bytes and path: of an encoded image, or of a record as HF `datasets` writes it."""
    if not str(value.type).startswith("struct<"):
        return value, None
    return (value.get("bytes"), value.get("path")) if value.is_valid else (None, None)


# -- files -------------------------------------------------------------------------------------------------


# Columns by name, and class names the file declares for a column.
_Table = tuple[Mapping[str, Any], Mapping[str, list[str]]]


def _read_json_lines(path: Path) -> _Table:
    with open(path, encoding="utf-8-sig") as file:
        return _from_records([_record(line, number) for number, line in enumerate(file, 1) if line.strip()], path)


def _record(line: str, number: int) -> Any:
    try:
        return decode_record(line)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(f"line {number}: {error.msg}", "", 0) from error


def _read_json(path: Path) -> _Table:
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = decode_record(text)
    except json.JSONDecodeError as error:
        if not error.doc:  # it is JSON, but no valid data
            raise
        return _read_json_lines(path)  # often named .json too
    columns = list(content.values()) if isinstance(content, Mapping) else []
    if all(isinstance(column, list) for column in columns) and len(set(map(len, columns))) == 1:
        return content, {}
    return _from_records(content, path)


def _from_records(records: Any, path: Path) -> _Table:
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise DataError(
            f"Expected '{path}' to contain one record per image, such as "
            '{"image": "cat/1.png", "label": "cat"}, received something else.'
        )
    names = list(dict.fromkeys(name for record in records for name in record))
    return {name: [record.get(name) for record in records] for name in names}, {}


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
    try:  # the metadata HF `datasets` writes
        features = decode_json(table.schema.metadata[b"huggingface"])["info"]["features"]
        names = {name: list(kind["names"]) for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        names = {}
    return columns, names


_READERS: dict[str, Callable[[Path], _Table]] = {
    **dict.fromkeys((".csv", ".tsv", ".tab"), lambda path: _from_records(read_csv(path).records, path)),
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
