"""COCO annotations: a JSON file with images, boxes, polygons and run-length encoded masks.

Reads the file once and checks it; pictures stay on disk. Segmentation and detection are built on it.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainformer.core.errors import DataError, expected

_FILE_NAMES = ("*coco*", "*annotations*", "instances*", "train", "val", "test")  # of COCO files in a folder


class CocoImage(NamedTuple):
    """A picture and its annotations, as in the file."""

    id: int
    path: str
    size: tuple[int, int]  # height, width
    annotations: list[dict[str, Any]]


class CocoFile:
    """The contents of a COCO file. Categories are sorted by their id and numbered from 0.

    Pictures are looked for in `images`, or in the usual places: beside the file, in `images/` beside it or above, and
    in a folder named like the file (`train2017` for `instances_train2017.json`).
    """

    def __init__(self, file: str | Path, images: str | Path | None = None) -> None:
        self.file = Path(file).expanduser()
        data = _read(self.file)
        categories = sorted(data["categories"], key=lambda category: category["id"])
        self.classes = [str(category["name"]) for category in categories]
        self.index_of = {category["id"]: index for index, category in enumerate(categories)}
        known = {image["id"] for image in data["images"]}
        by_image: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for annotation in data.get("annotations", []):
            self._check_annotation(annotation, known)
            by_image[annotation["image_id"]].append(annotation)
        self.folder = self._image_folder(images, data["images"])
        self.images = [
            CocoImage(
                image["id"],
                str(self.folder / image["file_name"]),
                (image.get("height", 0), image.get("width", 0)),
                by_image[image["id"]],
            )
            for image in data["images"]
        ]

    def with_indices(self, index_of: Mapping[str, int]) -> CocoFile:
        """A copy whose categories have other indices, by name."""
        other = copy.copy(self)
        names = dict(enumerate(self.classes))
        other.index_of = {key: index_of[names[index]] for key, index in self.index_of.items()}
        return other

    def _check_annotation(self, annotation: Mapping[str, Any], known: set[Any]) -> None:
        missing = [key for key in ("image_id", "category_id") if key not in annotation]
        name = f"annotation {annotation.get('id', '?')} of '{self.file}'"
        if missing:
            raise DataError(expected(f"{name} to have image_id and category_id", sorted(annotation)))
        if annotation["image_id"] not in known:
            raise DataError(expected(f"{name} to belong to an image of the file", annotation["image_id"]))
        if annotation["category_id"] not in self.index_of:
            raise DataError(expected(f"{name} to have a category of the file", annotation["category_id"]))

    def _image_folder(self, given: str | Path | None, images: list[dict[str, Any]]) -> Path:
        parent, name = self.file.parent, images[0]["file_name"]
        if given is not None:
            places = [Path(given).expanduser()]
        else:
            split = self.file.stem.rpartition("_")[2]
            places = [parent, parent / "images", parent.parent / "images", parent.parent / split, parent / split]
            places += [parent.parent / "images" / split, parent.parent]
        for place in places:
            if (place / name).is_file():
                return place
        do = "Put the pictures there, or pass the folder: CocoDetection(file, images=folder)."
        raise DataError(
            f"Expected the picture {name!r} of '{self.file}' in {', '.join(repr(str(p)) for p in places)}, received no "
            f"such file. {do}"
        )


def find_coco(path: str | Path) -> Path | None:
    """The COCO file that a path means: itself, or the only one of a folder, by its name (`instances_val.json`, ...)."""
    path = Path(path).expanduser()
    if path.suffix.lower() == ".json":
        if not path.is_file():
            raise DataError(expected("a COCO file", f"'{path}', which does not exist"))
        return path
    if not path.is_dir():
        return None
    places = [place for place in (path, path / "annotations") if place.is_dir()]
    found = sorted({file for place in places for name in _FILE_NAMES for file in place.glob(f"{name}.json")})
    if len(found) > 1:
        names = ", ".join(str(file) for file in found)
        raise DataError(expected(f"one COCO file in '{path}'", names, "Pass the one you mean."))
    return found[0] if found else None


def rasterize(annotation: Mapping[str, Any], size: tuple[int, int], name: str) -> np.ndarray:
    """The pixels (H, W) of an annotation: polygons, or a run-length encoding with or without compression.

    >>> rle = {"segmentation": {"size": [2, 3], "counts": [1, 2, 3]}}
    >>> rasterize(rle, (2, 3), "x").astype(int).tolist()  # runs go down the columns
    [[0, 1, 0], [1, 0, 0]]
    """
    shape = annotation.get("segmentation")
    if isinstance(shape, list) and shape:
        # Fewer than three points have no area.
        return np.any([polygon_pixels(polygon, size) for polygon in shape if len(polygon) >= 6] or [np.zeros(size)], 0)
    if isinstance(shape, Mapping) and "counts" in shape:
        counts = shape["counts"]
        runs = decode_runs(counts) if isinstance(counts, str | bytes) else np.asarray(counts, np.int64)
        height, width = shape.get("size", size)
        if runs.sum() != height * width or (height, width) != tuple(size):
            received = f"{runs.sum()} pixels for an image of {size[0]} x {size[1]}"
            raise DataError(expected(f"a run-length encoded mask of the size of {name}", received))
        values = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        return values.reshape(width, height).T
    do = "Boxes alone suffice for ObjectDetection, but not for SemanticSegmentation."
    raise DataError(expected(f"annotation {annotation.get('id', '?')} of {name} to have a segmentation", shape, do))


def polygon_pixels(polygon: Sequence[float], size: tuple[int, int]) -> np.ndarray:
    """The pixels (H, W) whose centers are inside of a polygon [x1, y1, x2, y2, ...], by the even-odd rule.

    >>> polygon_pixels([1, 0, 3, 0, 3, 2, 1, 2], (2, 4)).astype(int).tolist()
    [[0, 1, 1, 0], [0, 1, 1, 0]]
    """
    height, width = size
    points = np.asarray(polygon, np.float64).reshape(-1, 2)
    ends = np.roll(points, -1, axis=0)
    rows = np.arange(height) + 0.5
    crossings = np.zeros((height, width + 1), np.int64)
    for (x1, y1), (x2, y2) in zip(points, ends, strict=True):
        crossed = np.flatnonzero((rows >= min(y1, y2)) & (rows < max(y1, y2)))
        x = x1 + (rows[crossed] - y1) * (x2 - x1) / (y2 - y1 or 1.0)
        crossings[crossed, np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)] += 1
    return crossings.cumsum(1)[:, :width] % 2 == 1


def decode_runs(text: str | bytes) -> np.ndarray:
    """Decode COCO's compressed run lengths: six bits per character, each run relative to the one before the last.

    >>> decode_runs("123").tolist()
    [1, 2, 3]
    """
    codes = text.encode() if isinstance(text, str) else text
    runs: list[int] = []
    value = shift = 0
    for code in codes:
        bits = code - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value = shift = 0
    return np.asarray(runs, np.int64)


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"Expected a COCO file, received '{file}', which cannot be read: {error}.") from error
    lists = ("images", "categories")
    if not isinstance(data, Mapping) or not all(isinstance(data.get(key), list) and data[key] for key in lists):
        received = sorted(data) if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise DataError(expected(f"'{file}' to be a COCO file with images and categories", received))
    bad = [image for image in data["images"] if not isinstance(image, Mapping) or "file_name" not in image]
    if bad or any("id" not in image for image in data["images"]):
        raise DataError(expected(f"each image in '{file}' to have id and file_name", (bad or ["one without id"])[0]))
    if any(not {"id", "name"} <= category.keys() for category in data["categories"]):
        raise DataError(f"Expected each category in '{file}' to have id and name, received one without.")
    return dict(data)
