"""Pictures with boxes: COCO and Pascal VOC files, HF datasets and lists in memory, and the dataset that prepares them.

A target is ``{"boxes", "labels"}``: boxes as (x1, y1, x2, y2) in pixels, labels from 0. `iscrowd` marks boxes that only
evaluation knows (and ignores), `area` is the area that COCO's sizes refer to.
"""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainformer.core.errors import DataError, expected
from trainformer.data.coco import CocoFile, find_coco
from trainformer.data.fetcher import is_in_memory, unwrap_subsets
from trainformer.data.folder import read_image, relative_names
from trainformer.data.hub import is_hf_saved, load_from_hub, load_hf_saved
from trainformer.data.image import load_images
from trainformer.data.pixels import image_tensor, with_channels
from trainformer.data.shapes import SHAPE_CLASSES, is_shapes, shape_pictures

BOX_LAYOUT = (
    "Pass a COCO file (instances.json), a folder of Pascal VOC (JPEGImages/ and Annotations/), or samples (image, "
    '{"boxes": [[x1, y1, x2, y2], ...], "labels": [0, ...]}).'
)
_IMAGE_KEYS = ("image", "img", "pixel_values", "images")
_OUTSIDE = 2.0  # pixels that a box may reach beyond its picture: annotations are rounded

Target = dict[str, Any]


class BoxedImages(Dataset):
    """Base of the datasets of pictures with boxes: ``(image, target)``."""

    classes: list[str]
    files: list[str]
    channels: int | None = 3

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, Target]:
        return read_image(self.files[index], self.channels), self.target(index)

    @property
    def ids(self) -> list[str]:
        """Names of the files, relative to their folder."""
        return relative_names(self.files)

    def target(self, index: int) -> Target:
        """The boxes of a picture."""
        raise NotImplementedError


class CocoDetection(BoxedImages):
    """The boxes of a COCO file. Categories are sorted by id and numbered from 0."""

    def __init__(self, file: str | Path, images: str | Path | None = None, channels: int | None = 3) -> None:
        self.coco, self.channels = CocoFile(file, images), channels
        self.classes = self.coco.classes
        self.files = [image.path for image in self.coco.images]

    def remap_classes(self, classes: Sequence[str]) -> CocoDetection:
        """The same data with labels that index another list of classes."""
        other = copy.copy(self)
        other.classes = list(classes)
        other.coco = self.coco.with_indices({name: index for index, name in enumerate(classes)})
        return other

    def target(self, index: int) -> Target:
        image = self.coco.images[index]
        for annotation in image.annotations:
            if len(annotation.get("bbox", ())) != 4:
                what = f"annotation {annotation.get('id', '?')} of '{image.path}' to have a bbox [x, y, width, height]"
                raise DataError(expected(what, annotation.get("bbox")))
        boxes = np.array([a["bbox"] for a in image.annotations], np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return {
            "boxes": boxes,
            "labels": [self.coco.index_of[a["category_id"]] for a in image.annotations],
            "iscrowd": [int(a.get("iscrowd", 0)) for a in image.annotations],
            "area": [a.get("area", a["bbox"][2] * a["bbox"][3]) for a in image.annotations],
        }


class VocDetection(BoxedImages):
    """A folder of Pascal VOC: `JPEGImages/` and `Annotations/`. Objects marked as difficult are treated as crowds."""

    def __init__(self, root: str | Path, channels: int | None = 3) -> None:
        self.root, self.channels = Path(root).expanduser(), channels
        self.annotations = sorted((self.root / "Annotations").glob("*.xml"))
        if not self.annotations:
            raise DataError(expected(f"XML files in '{self.root / 'Annotations'}'", "none", BOX_LAYOUT))
        parsed = [self._parse(path) for path in self.annotations]
        self.files = [file for file, _ in parsed]
        self._objects = [objects for _, objects in parsed]
        self.classes = sorted({name for objects in self._objects for name, _, _ in objects})

    def _parse(self, path: Path) -> tuple[str, list[tuple[str, list[float], bool]]]:
        try:
            tree = ElementTree.parse(path).getroot()
            objects = []
            for thing in tree.iter("object"):
                box = thing.find("bndbox")
                edges = [float(box.findtext(key)) for key in ("xmin", "ymin", "xmax", "ymax")]  # type: ignore
                corner = [edges[0] - 1, edges[1] - 1, edges[2], edges[3]]  # pixels are counted from 1, both included
                objects.append((str(thing.findtext("name")), corner, thing.findtext("difficult") == "1"))
        except (ElementTree.ParseError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"Expected an annotation of Pascal VOC, received '{path}': {error}.") from error
        name = tree.findtext("filename") or f"{path.stem}.jpg"
        file = self.root / "JPEGImages" / Path(name).name
        if not file.is_file():
            raise DataError(expected(f"the picture of '{path}'", f"no file '{file}'"))
        return str(file), objects

    def target(self, index: int) -> Target:
        objects = self._objects[index]
        place = {name: number for number, name in enumerate(self.classes)}
        return {
            "boxes": [box for _, box, _ in objects],
            "labels": [place[name] for name, _, _ in objects],
            "iscrowd": [int(difficult) for _, _, difficult in objects],
        }

    def remap_classes(self, classes: Sequence[str]) -> VocDetection:
        """The same data with labels that index another list of classes."""
        other = copy.copy(self)
        other.classes = list(classes)
        return other


class BoxedArrays(BoxedImages):
    """Pictures and targets in memory."""

    in_memory = True

    def __init__(self, images: Sequence[Any], targets: Sequence[Target], classes: Sequence[str]) -> None:
        self.images, self.targets_in_memory, self.classes = images, targets, list(classes)

    @property
    def ids(self) -> list[str]:
        return [str(index) for index in range(len(self))]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Target]:
        return self.images[index], self.target(index)

    def target(self, index: int) -> Target:
        return self.targets_in_memory[index]


def load_detection(path_or_name: str | Path, channels: int | None = 3) -> Any:
    """Pictures with boxes by path or name; pictures alone if there are no boxes.

    - the sample `"shapes"` (`"shapes:test"`);
    - a COCO file, or a folder with one (see `CocoDetection`);
    - a folder of Pascal VOC (see `VocDetection`);
    - a folder written by HF's `save_to_disk`, or a dataset of the hub: `"hf:name"`, `"hf:name:split"`.
    """
    if is_shapes(path_or_name):
        pictures = shape_pictures(str(path_or_name))
        targets = [{"boxes": picture.boxes, "labels": picture.labels} for picture in pictures]
        return BoxedArrays([picture.image for picture in pictures], targets, SHAPE_CLASSES)
    text = str(path_or_name)
    if text.startswith("hf:") and not Path(text).exists():
        name, _, split = text.removeprefix("hf:").partition(":")
        return load_from_hub(name, split or None)
    path = Path(path_or_name).expanduser()
    if is_hf_saved(path):
        return load_hf_saved(path)
    if (path / "Annotations").is_dir() and (path / "JPEGImages").is_dir():
        return VocDetection(path, channels)
    if (file := find_coco(path)) is not None:
        return CocoDetection(file, channels=channels)
    return load_images(path_or_name, labels=False, channels=channels)


# -- targets ---------------------------------------------------------------------------------------------------------


def split_boxes(sample: Any, index: int) -> tuple[Any, Target | None]:
    """Picture and target of a sample; None if there is no target.

    A mapping has the boxes beside the picture, in `objects` (HF datasets, boxes as COCO's x, y, width, height), or in
    `target`.
    """
    if not isinstance(sample, Mapping):
        pair = sample if isinstance(sample, tuple | list) else (sample,)
        return pair[0], pair[1] if len(pair) > 1 else None
    image = next((key for key in _IMAGE_KEYS if key in sample), None)
    if image is None:
        raise DataError(expected(f"sample {index} to have one of the keys {', '.join(_IMAGE_KEYS)}", list(sample)))
    if "objects" in sample:
        objects = sample["objects"]
        if not isinstance(objects, Mapping):  # a list of dicts
            keys = list(objects[0]) if objects else ["bbox", "category"]
            objects = {key: [one[key] for one in objects] for key in keys}
        labels = next((objects[key] for key in ("category", "label", "labels", "category_id") if key in objects), None)
        if "bbox" not in objects or labels is None:
            raise DataError(expected(f"bbox and category in the objects of sample {index}", list(objects)))
        boxes = np.array(objects["bbox"], np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return sample[image], {"boxes": boxes, "labels": labels}
    target = sample.get("target", sample if "boxes" in sample else None)
    return sample[image], target


def checked_target(target: Any, size: tuple[int, int], num_classes: int | None, name: str) -> dict[str, Tensor]:
    """A target as tensors: `boxes` (n, 4), `labels` (n), `iscrowd` (n) and `area` (n). Bad boxes name their picture."""
    if not isinstance(target, Mapping) or not {"boxes", "labels"} <= target.keys():
        received = list(target) if isinstance(target, Mapping) else type(target).__name__
        raise DataError(expected(f"the target of {name} to have boxes and labels", received, BOX_LAYOUT))
    boxes = torch.as_tensor(np.asarray(target["boxes"]), dtype=torch.float32).reshape(-1, 4).clone()
    labels = torch.as_tensor(np.asarray(target["labels"])).reshape(-1)
    if len(boxes) != len(labels) or (labels.is_floating_point() and len(labels)):
        raise DataError(expected(f"an integer label for each of the {len(boxes)} boxes of {name}", labels.tolist()))
    labels = labels.long()
    height, width = size
    room = torch.tensor([width, height, width, height], dtype=torch.float32)
    outside = (boxes < -_OUTSIDE) | (boxes > room + _OUTSIDE)
    inside = torch.minimum(boxes.clamp(min=0), room)
    flat = (inside[:, 2:] <= inside[:, :2]).any(1) | ~boxes.isfinite().all(1)
    rules = (("boxes with x1 < x2 and y1 < y2", flat), (f"boxes in the picture of {width} x {height}", outside.any(1)))
    for what, wrong in rules:
        if bool(wrong.any()):
            number = int(wrong.nonzero()[0])
            do = "Boxes are (x1, y1, x2, y2) in pixels; correct or remove it."
            raise DataError(expected(f"{what} in {name}", f"{boxes[number].tolist()} (box {number})", do))
    if num_classes is not None and len(labels) and (int(labels.max()) >= num_classes or int(labels.min()) < 0):
        wrong_label = int(labels.max()) if int(labels.max()) >= num_classes else int(labels.min())
        do = "Labels are counted from 0, without a background."
        raise DataError(expected(f"labels 0 to {num_classes - 1} in {name}", wrong_label, do))
    crowd = target.get("iscrowd")
    area = target.get("area")
    sides = inside[:, 2:] - inside[:, :2]
    return {
        "boxes": inside,
        "labels": labels,
        "iscrowd": torch.zeros(len(labels), dtype=torch.bool) if crowd is None else torch.as_tensor(crowd).bool(),
        "area": sides.prod(1) if area is None else torch.as_tensor(np.asarray(area), dtype=torch.float32),
    }


def scan_labels(dataset: Any) -> int | None:
    """The number of classes in all targets; None if reading them would mean decoding the pictures too."""
    base, _ = unwrap_subsets(dataset)
    if not isinstance(base, list | tuple):
        return None
    targets = [split_boxes(sample, index)[1] for index, sample in enumerate(base)]
    labels = [np.asarray(target["labels"]).reshape(-1) for target in targets if target is not None]
    found = np.concatenate(labels) if labels else np.zeros(0)
    return int(found.max()) + 1 if found.size else None


class PreparedBoxes(Dataset):
    """Pictures as ``{"image", "size", "target"}``, ready for a batch. `transform` changes a picture with its target."""

    def __init__(
        self,
        source: Any,
        transform: Callable[[Tensor, dict[str, Tensor] | None], tuple[Tensor, dict[str, Tensor] | None]],
        *,
        channels: int | None,
        num_classes: int | None,
        needs_boxes: bool = False,
    ) -> None:
        self.source, self.transform = source, transform
        self.channels, self.num_classes, self.needs_boxes = channels, num_classes, needs_boxes

    def __len__(self) -> int:
        return len(self.source)

    @property
    def in_memory(self) -> bool:
        """Whether reading needs no decoding."""
        return is_in_memory(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, given = split_boxes(self.source[index], index)
        pixels = image_tensor(with_channels(image, self.channels))
        height, width = pixels.shape[-2:]
        target = None
        if given is not None:
            target = checked_target(given, (height, width), self.num_classes, self.name(index))
        elif self.needs_boxes:
            raise DataError(f"Expected pictures with boxes to train on, received pictures alone. {BOX_LAYOUT}")
        pixels, target = self.transform(pixels, target)
        sample = {"image": pixels, "size": torch.tensor([height, width])}
        return sample if target is None else {**sample, "target": target}

    def name(self, index: int) -> str:
        """How errors call a sample: by its file, or its index."""
        base, chosen = unwrap_subsets(self.source)
        index = index if chosen is None else int(chosen[index])
        files = getattr(base, "files", None)
        return f"'{files[index]}'" if isinstance(base, BoxedImages) and files else f"sample {index}"
