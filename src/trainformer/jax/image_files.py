"""Images in files for trainers on JAX: a folder of images, with a folder per class or without classes, and ``.npz``.

Pillow reads them; no torch is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require
from trainformer.data.dataset import ArrayDataset, IndexedDataset
from trainformer.utils.files import check_archive

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def load_images(path: Path, shape: tuple[int, ...] | None = None, labelled: bool = True) -> Any:
    """Samples with an `image` and, if `labelled`, a `label`: of a folder, of one image, or of an ``.npz`` of arrays.

    Images of files are resized to `shape`, (height, width) or (height, width, channels); without it they must have one
    size.
    """
    if path.suffix == ".npz":
        return _read_archive(path)
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix.lower() in _SUFFIXES)
    if not found or found[0].suffix.lower() not in _SUFFIXES:
        raise DataError(expected(f"images ({', '.join(_SUFFIXES)}) or an .npz file", str(path)))
    return ImageFiles(path if path.is_dir() else path.parent, found, shape, labelled)


class ImageFiles(IndexedDataset):
    """Images of files, read on access. With `labelled`, the folder that a file is in names its class."""

    def __init__(self, root: Path, files: list[Path], shape: tuple[int, ...] | None, labelled: bool) -> None:
        self.root, self.files, self.shape = root, files, shape
        self.resizes = shape is not None
        self.ids = [file.relative_to(root).as_posix() for file in files]
        self.class_names: list[str] | None = None
        self.labels: np.ndarray | None = None
        if labelled:
            names = [name.rpartition("/")[0] for name in self.ids]
            self.class_names = sorted(set(names))
            if "" in self.class_names or len(self.class_names) < 2:
                what = f"a folder for each class in {root}"
                raise DataError(expected(what, f"images in {', '.join(self.class_names) or root}"))
            self.labels = np.asarray([self.class_names.index(name) for name in names])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self._read(self.files[index])
        return {"image": image} if self.labels is None else {"image": image, "label": self.labels[index]}

    def _read(self, file: Path) -> np.ndarray:
        pillow, turn = (require(f"PIL.{name}", "jax", "to read images") for name in ("Image", "ImageOps"))
        try:
            with pillow.open(file) as opened:
                image = turn.exif_transpose(opened)
                if self.shape is None or len(self.shape) == 2:
                    channels = 1 if image.mode in ("1", "L", "I;16") else 3
                    self.shape = (*(self.shape or (image.height, image.width)), channels)
                image = image.convert(_MODES[self.shape[2]])
                if (image.height, image.width) != tuple(self.shape[:2]):
                    if not self.resizes:
                        received = f"{image.height} x {image.width} pixels in {file}"
                        what = f"images of one size, {self.shape[0]} x {self.shape[1]} pixels as the first"
                        raise DataError(expected(what, received, "Pass image_size, to which all are resized."))
                    image = image.resize((self.shape[1], self.shape[0]), pillow.Resampling.BILINEAR)
                return np.asarray(image).reshape(self.shape)
        except (OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"The image {file} cannot be read: {error}") from error


def _read_archive(path: Path) -> Any:
    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as arrays:
            return ArrayDataset({name: arrays[name] for name in arrays.files})
    except DataError:
        raise
    except Exception as error:  # NumPy raises anything
        raise DataError(f"{path} cannot be read as arrays: {error}") from error
