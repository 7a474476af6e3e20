"""Pictures with masks: folders, COCO files, HF datasets and pairs in memory, and the dataset that prepares them.

A mask holds one class index per pixel. Training samples are augmented together with their mask, with the random numbers
of the sample. Samples for evaluation keep their mask in its own size.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require
from trainformer.data.coco import CocoFile, find_coco, rasterize
from trainformer.data.fetcher import is_in_memory, tensors_of, unwrap_subsets
from trainformer.data.folder import images_below, read_image, relative_names
from trainformer.data.hub import is_hf_saved, load_from_hub, load_hf_saved
from trainformer.data.image import load_images
from trainformer.data.pixels import image_tensor, is_pil, with_channels
from trainformer.data.shapes import SHAPE_CLASSES, is_shapes, shape_pictures

logger = logging.getLogger("trainformer")

MASK_LAYOUT = (
    "The expected layout is images/ and masks/ with files of the same names: root/images/1.jpg, root/masks/1.png "
    "(class indices as pixel values; names of the classes, one per line, in root/classes.txt)."
)
_MASK_FOLDERS = ("masks", "annotations", "labels", "mask")
_IMAGE_FOLDERS = ("images", "image", "img")
_MASK_KEYS = ("mask", "masks", "annotation", "segmentation_mask", "segmentation", "label", "labels", "target")
_IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x", "input")


class MaskedImages(Dataset):
    """Base of the datasets of pictures with masks: ``(image, mask)``. `mask(index)` reads a mask alone."""

    classes: list[str]  # absent if they are not known
    files: list[str]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray]:
        return read_image(self.files[index], self.channels), self.mask(index)

    channels: int | None = 3

    @property
    def ids(self) -> list[str]:
        """Names of the files, relative to their folder."""
        return relative_names(self.files)

    def mask(self, index: int) -> np.ndarray:
        """The class index of each pixel, (H, W)."""
        raise NotImplementedError


class SegmentationFolder(MaskedImages):
    """Pictures in `images/` with masks of the same name in `masks/` (or `annotations/`, `labels/`), possibly nested.

    Class names come from `classes.txt`, one per line, where there is such a file.
    """

    def __init__(self, root: str | Path, channels: int | None = 3) -> None:
        self.root, self.channels = Path(root).expanduser(), channels
        images, masks = (_subfolder(self.root, names) for names in (_IMAGE_FOLDERS, _MASK_FOLDERS))
        if images is None or masks is None:
            found = sorted(entry.name for entry in self.root.iterdir())[:8]
            raise DataError(expected(f"the folders images and masks in '{self.root}'", found, MASK_LAYOUT))
        pictures = {_stem(path, images): path for path in images_below(images)}
        drawn = {_stem(path, masks): path for path in images_below(masks)}
        if not pictures:
            raise DataError(f"Expected pictures in '{images}', received none. {MASK_LAYOUT}")
        missing = sorted(pictures.keys() - drawn.keys())
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise DataError(
                f"Expected a mask in '{masks}' for each picture, received none for {len(missing)} of {len(pictures)}: "
                f"{shown}. {MASK_LAYOUT}"
            )
        if unused := len(drawn.keys() - pictures.keys()):
            logger.warning("ignoring %d masks in '%s' that have no picture", unused, masks)
        self.files = [pictures[name] for name in pictures]
        self.masks = [drawn[name] for name in pictures]
        if (names := self.root / "classes.txt").is_file():
            self.classes = [line.strip() for line in names.read_text(encoding="utf-8").splitlines() if line.strip()]

    def mask(self, index: int) -> np.ndarray:
        return mask_array(read_image_as_is(self.masks[index]), f"'{self.masks[index]}'")


class CocoSegmentation(MaskedImages):
    """Masks drawn from the polygons of a COCO file. Class 0 is the background; smaller objects lie on larger ones."""

    def __init__(self, file: str | Path, images: str | Path | None = None, channels: int | None = 3) -> None:
        self.coco, self.channels = CocoFile(file, images), channels
        self.classes = ["background", *self.coco.classes]
        self.files = [image.path for image in self.coco.images]

    def remap_classes(self, classes: Sequence[str]) -> CocoSegmentation:
        """The same data with masks that index another list of classes."""
        other = copy.copy(self)
        other.classes = list(classes)
        other.coco = self.coco.with_indices({name: index - 1 for index, name in enumerate(classes)})
        return other

    def mask(self, index: int) -> np.ndarray:
        image = self.coco.images[index]
        size = image.size if all(image.size) else read_image(image.path, None).size[::-1]
        drawn = [(rasterize(a, size, f"'{image.path}'"), a["category_id"]) for a in image.annotations]
        mask = np.zeros(size, np.uint8 if len(self.classes) < 255 else np.int64)
        for pixels, category in sorted(drawn, key=lambda pair: -int(pair[0].sum())):
            mask[pixels] = self.coco.index_of[category] + 1
        return mask


class MaskedArrays(MaskedImages):
    """Pictures and masks in memory."""

    in_memory = True

    def __init__(self, images: Sequence[Any], masks: Sequence[Any], classes: Sequence[str] | None = None) -> None:
        self.images, self.masks = images, masks
        if classes is not None:
            self.classes = list(classes)

    @property
    def ids(self) -> list[str]:
        return [str(index) for index in range(len(self))]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray]:
        return self.images[index], self.mask(index)

    def mask(self, index: int) -> np.ndarray:
        return mask_array(self.masks[index], f"of sample {index}")


def load_segmentation(path_or_name: str | Path, channels: int | None = 3) -> Any:
    """Pictures with masks by path or name; pictures alone if there are no masks.

    - the sample `"shapes"` (`"shapes:test"`);
    - a folder with `images/` and `masks/` (see `SegmentationFolder`);
    - a COCO file, or a folder with one (see `CocoSegmentation`);
    - a folder written by HF's `save_to_disk`, or a dataset of the hub: `"hf:name"`, `"hf:name:split"`.
    """
    if is_shapes(path_or_name):
        pictures = shape_pictures(str(path_or_name))
        classes = ["background", *SHAPE_CLASSES]
        return MaskedArrays([p.image for p in pictures], [p.mask for p in pictures], classes)
    text = str(path_or_name)
    if text.startswith("hf:") and not Path(text).exists():
        name, _, split = text.removeprefix("hf:").partition(":")
        return load_from_hub(name, split or None)
    path = Path(path_or_name).expanduser()
    if is_hf_saved(path):
        return load_hf_saved(path)
    if path.is_dir() and _subfolder(path, _MASK_FOLDERS[:1] + _MASK_FOLDERS[2:]) is not None:
        return SegmentationFolder(path, channels)
    if (file := find_coco(path)) is not None:
        return CocoSegmentation(file, channels=channels)
    if path.is_dir() and _subfolder(path, _MASK_FOLDERS) and _subfolder(path, _IMAGE_FOLDERS):
        return SegmentationFolder(path, channels)
    return load_images(path_or_name, labels=False, channels=channels)


# -- masks -----------------------------------------------------------------------------------------------------------


def mask_array(mask: Any, name: str) -> np.ndarray:
    """A mask as class indices (H, W): a PIL image, an array or a tensor. `name` identifies it in errors."""
    if is_pil(mask) and mask.mode in ("1", "L", "P", "I", "I;16"):
        array = np.array(mask)
    else:
        array = mask.numpy() if isinstance(mask, Tensor) else np.array(mask)
    if array.ndim == 3 and 1 in (array.shape[0], array.shape[2]):
        array = array.squeeze(0 if array.shape[0] == 1 else 2)
    if array.ndim == 3 and array.shape[2] == 3 and (array == array[..., :1]).all():
        array = array[..., 0]  # gray, saved with three channels
    if array.ndim != 2 or array.dtype.kind not in "biu":
        received = f"shape {array.shape} and type {array.dtype}"
        do = "Colours have to be replaced by class indices, e.g. saved as a PNG with one channel or a palette."
        raise DataError(expected(f"the mask {name} to hold one class index per pixel", received, do))
    return array.astype(np.uint8) if array.dtype in (np.bool_, np.uint8) else array.astype(np.int64)


def read_image_as_is(path: str) -> Any:
    """A mask file as PIL reads it: indices of a palette stay indices."""
    pil = require("PIL.Image", "vision", "to read masks")
    try:
        with pil.open(path) as image:
            image.load()
            return image
    except Exception as error:  # decoders raise anything
        raise DataError(
            f"Expected a readable mask, received '{path}', which cannot be decoded ({type(error).__name__}: {error})."
        ) from error


def split_pair(sample: Any, index: int) -> tuple[Any, Any]:
    """Picture and mask of a sample: a tuple or a mapping; a missing mask is None."""
    if isinstance(sample, Mapping):
        image = next((key for key in _IMAGE_KEYS if key in sample), None)
        if image is None:
            raise DataError(expected(f"sample {index} to have one of the keys {', '.join(_IMAGE_KEYS)}", list(sample)))
        mask = next((key for key in _MASK_KEYS if key in sample and key != image), None)
        return sample[image], None if mask is None else sample[mask]
    if isinstance(sample, tuple | list):
        return sample[0], sample[1] if len(sample) > 1 else None
    return sample, None


def scan_classes(dataset: Any, ignore_index: int, values: Sequence[int] | None = None) -> int | None:
    """The number of classes in all masks; None if reading them would mean decoding the pictures too."""
    base, _ = unwrap_subsets(dataset)
    tensors = tensors_of(base)
    if tensors is not None and len(tensors) > 1:
        found: set[int] = set(tensors[1].unique().tolist())
    elif isinstance(base, MaskedImages):
        if not is_in_memory(base):
            logger.info("reading %d masks to find the classes; num_classes or classes.txt saves the time", len(base))
        found = {int(value) for index in range(len(base)) for value in np.unique(base.mask(index))}
    elif isinstance(base, list | tuple):
        masks = (split_pair(sample, index)[1] for index, sample in enumerate(base))
        drawn = (mask_array(mask, f"of sample {index}") for index, mask in enumerate(masks) if mask is not None)
        found = {int(value) for mask in drawn for value in np.unique(mask)}
    else:
        return None
    if values is not None:
        return len(values)
    labels = found - {ignore_index}
    if labels <= {0}:
        do = (
            "If 255 is the foreground, pass mask_values=[0, 255]: class 0 is then drawn as 0 and class 1 as 255."
            if 255 in found
            else "Are these the right masks?"
        )
        raise DataError(
            f"Expected at least two classes in the masks, received only {sorted(labels)} besides "
            f"ignore_index={ignore_index}. {do}"
        )
    return max(labels) + 1


class PreparedPairs(Dataset):
    """Pictures as ``{"image", "size", "mask"}``, ready for a batch.

    `transform` turns a picture and its mask (or None) into those of the sample; `size` is the size of the picture on
    disk. Masks are checked: each value must be below `num_classes` or `ignore_index`. `values` are the pixel values
    that stand for the classes.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
        *,
        channels: int | None,
        num_classes: int | None,
        ignore_index: int,
        values: Sequence[int] | None = None,
        needs_masks: bool = False,
    ) -> None:
        self.source, self.transform = source, transform
        self.channels, self.num_classes, self.ignore_index = channels, num_classes, ignore_index
        self.values, self.needs_masks = values, needs_masks

    def __len__(self) -> int:
        return len(self.source)

    @property
    def in_memory(self) -> bool:
        """Whether reading needs no decoding."""
        return is_in_memory(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, mask = split_pair(self.source[index], index)
        pixels = image_tensor(with_channels(image, self.channels))
        size = torch.tensor(pixels.shape[-2:])
        drawn = None
        if mask is not None:
            drawn = self._checked(mask_array(mask, self.name(index)), index)
            if drawn.shape != pixels.shape[-2:]:
                what = f"the mask {self.name(index)} to have the size of its picture, {tuple(pixels.shape[-2:])}"
                raise DataError(expected(what, tuple(drawn.shape)))
        elif self.needs_masks:
            raise DataError(f"Expected pictures with masks to train on, received pictures alone. {MASK_LAYOUT}")
        pixels, drawn = self.transform(pixels, drawn)
        return {"image": pixels, "size": size} | ({} if drawn is None else {"mask": drawn})

    def name(self, index: int) -> str:
        """How errors call a sample: by its file, or its index."""
        base, chosen = unwrap_subsets(self.source)
        index = index if chosen is None else int(chosen[index])
        files = getattr(base, "masks", None)
        return f"'{files[index]}'" if isinstance(base, SegmentationFolder) and files else f"of sample {index}"

    def _checked(self, mask: np.ndarray, index: int) -> Tensor:
        if self.values is not None:
            mask = self._mapped(mask, index)
        if self.num_classes is not None:
            wrong = np.unique(mask[(mask != self.ignore_index) & ((mask < 0) | (mask >= self.num_classes))])
            if wrong.size:
                what = f"the mask {self.name(index)} to hold 0 to {self.num_classes - 1} or {self.ignore_index}"
                do = "Pass num_classes, mask_values (the pixel values of the classes) or ignore_index as the masks say."
                raise DataError(expected(what, wrong[:8].tolist(), do))
        return torch.from_numpy(np.ascontiguousarray(mask))

    def _mapped(self, mask: np.ndarray, index: int) -> np.ndarray:
        """Class indices from the pixel values of the classes."""
        assert self.values is not None
        known = np.asarray(self.values)
        order = np.argsort(known)
        place = np.searchsorted(known[order], mask).clip(max=len(known) - 1)
        result = order[place].astype(np.int64)
        strange = known[order][place] != mask
        unknown = np.unique(mask[strange & (mask != self.ignore_index)])
        if unknown.size:
            what = f"the mask {self.name(index)} to hold the mask_values {list(self.values)}"
            raise DataError(expected(what, unknown[:8].tolist(), "List the values of all classes, in their order."))
        result[strange] = self.ignore_index
        is_small = 0 <= self.ignore_index <= 255 and len(known) <= 255
        return result.astype(np.uint8) if is_small else result


def _subfolder(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _stem(path: str, folder: Path) -> str:
    return Path(path).relative_to(folder).with_suffix("").as_posix()
