"""Folders of image files (`root/class/**/image`), and decoding an image.

Files are decoded when a sample is read, and stay PIL images: cropping a photo is cheaper before it becomes a tensor.
"""

from __future__ import annotations

import copy
import io
import logging
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

from torch.utils.data import Dataset

from trainformer.core.errors import DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.pixels import with_channels

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger("trainformer")

LAYOUT = "The expected layout is one folder per class: root/cat/1.png, root/cat/2.png, root/dog/1.png."
_TRAIN = ("train", "training")
_HELD_OUT = ("val", "valid", "validation", "dev", "eval", "test", "testing", "holdout")
# Formats PIL only identifies, or decodes with external programs.
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}


class ImageFiles(Dataset):
    """All images below a folder, sorted by name, without labels: ``(image, None)``."""

    def __init__(self, root: str | Path, channels: int | None = 3) -> None:
        self.root = _existing_folder(root)
        self.channels = channels
        self.files = list(images_below(self.root))
        if not self.files:
            others = sorted(entry.name for entry in os.scandir(self.root))[:5]
            what = f"only other files, such as: {', '.join(others)}" if others else "an empty folder"
            raise DataError(
                f"Expected images in '{self.root}', received {what}. Files are recognised by their extension (.png, "
                ".jpg, ...)."
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, None]:
        return read_image(self.files[index], self.channels), None


class LabelledFiles(Dataset):
    """Base of the datasets of images with labels, which may have class names."""

    samples: list[tuple[str, Any]]
    targets: list[int]
    classes: list[str]
    class_to_idx: dict[str, int]

    def __len__(self) -> int:
        return len(self.samples)

    def remap_classes(self, classes: Sequence[str]) -> Self:
        """A copy with labels that index another list of classes."""
        other = copy.copy(self)
        other.classes, other.class_to_idx = list(classes), {name: index for index, name in enumerate(classes)}
        other.targets = [other.class_to_idx[self.classes[label]] for label in self.targets]
        other.samples = [(path, label) for (path, _), label in zip(self.samples, other.targets, strict=True)]
        return other


class ImageFolder(LabelledFiles):
    """Images in one folder per class, possibly nested: ``(image, label)``.

    Classes are sorted by name and numbered from 0. Images are converted to `channels` channels, since colour and gray
    files are often mixed.
    """

    def __init__(self, root: str | Path, channels: int | None = 3) -> None:
        self.root = _existing_folder(root)
        self.channels = channels
        self.classes = _class_folders(self.root)
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.samples = [
            (path, label) for name, label in self.class_to_idx.items() for path in images_below(self.root / name)
        ]
        self.targets = [label for _, label in self.samples]
        loose = sum(1 for _ in _images_in(self.root))
        if not self.samples:
            what = f"{loose} images without class folders" if loose else "no image at all"
            raise DataError(f"Expected images in class folders in '{self.root}', received {what}. {LAYOUT}")
        full = set(self.targets)
        empty = [name for name, label in self.class_to_idx.items() if label not in full]
        if empty:
            raise DataError(
                f"Expected an image in every class folder of '{self.root}', received none in: {', '.join(empty)}. "
                "Add images, or remove the folder."
            )
        if loose:
            logger.warning("ignoring %d images directly in '%s', which belong to no class", loose, self.root)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        return read_image(path, self.channels), label


class CorruptImage(NamedTuple):
    """A file that cannot be read as an image, and why."""

    path: str
    reason: str


def find_corrupt_images(root: str | Path) -> list[CorruptImage]:
    """All files below a folder with an image extension that cannot be decoded. Reads every file."""
    found = []
    for path in images_below(_existing_folder(root)):
        try:
            _decode(path)
        except Exception as error:
            found.append(CorruptImage(path, _reason(error)))
    return found


def read_image(path: str | Path, channels: int | None = 3) -> Image.Image:
    """Decode one file, with its EXIF orientation applied."""
    lists = "trainformer.data.find_corrupt_images(root) lists all such files of a folder."
    return _readable(path, channels, f"'{path}'", f"Replace or remove the file; {lists}")


def decode_image(data: bytes, channels: int | None, name: str) -> Image.Image:
    """Decode an image from bytes; `name` identifies it in errors."""
    return _readable(io.BytesIO(data), channels, name, "Remove it, or recreate it.")


def _readable(source: str | Path | BinaryIO, channels: int | None, name: str, do: str) -> Any:
    try:
        image = _decode(source)
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error, IndexError, ...
        what = f"{name}, which cannot be decoded ({_reason(error)})"
        raise DataError(f"Expected a readable image, received {what}. {do}") from error
    return with_channels(image, channels)


def has_class_folders(root: str | Path) -> bool:
    """Whether a folder has subfolders with images."""
    root = _existing_folder(root)
    return any(next(images_below(root / name), None) is not None for name in _folders_in(root))


def has_images(root: str | Path) -> bool:
    """Whether there is an image anywhere below a folder."""
    return next(images_below(_existing_folder(root)), None) is not None


def _decode(path: str | Path | BinaryIO) -> Image.Image:
    pil = require("PIL.Image", "vision", "to read images")
    with pil.open(path) as image:
        image.load()
        return require("PIL.ImageOps", "vision", "to read images").exif_transpose(image)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# -- files and folders -------------------------------------------------------------------------------------


@cache
def _extensions() -> frozenset[str]:
    pil = require("PIL.Image", "vision", "to read images")
    pil.init()
    kinds = pil.OPEN.keys() - _NOT_DECODED
    return frozenset(extension for extension, kind in pil.registered_extensions().items() if kind in kinds)


def relative_names(files: Sequence[str]) -> list[str]:
    """Names of files, relative to the folder that they share.

    >>> relative_names(["data/a/1.png", "data/b/1.png"])
    ['a/1.png', 'b/1.png']
    """
    shared = os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""
    return [Path(os.path.relpath(file, shared or ".")).as_posix() for file in files]


def images_below(folder: Path) -> Iterator[str]:
    """Paths of all images below a folder, sorted; hidden folders (.ipynb_checkpoints, ...) are skipped."""
    yield from _images_in(folder)
    for name in _folders_in(folder):
        yield from images_below(folder / name)


def _images_in(folder: Path) -> Iterator[str]:
    # macOS leaves "._1.png" next to "1.png" on foreign disks: not an image.
    shown = (entry for entry in os.scandir(folder) if not entry.name.startswith("."))
    images = (entry for entry in shown if os.path.splitext(entry.name)[1].lower() in _extensions() and entry.is_file())
    return (str(folder / name) for name in sorted(entry.name for entry in images))


def _folders_in(folder: Path) -> list[str]:
    shown = (entry for entry in os.scandir(folder) if not entry.name.startswith((".", "__MACOSX")))
    return sorted(entry.name for entry in shown if entry.is_dir() and not _is_link_cycle(entry))


def _is_link_cycle(entry: os.DirEntry[str]) -> bool:
    """Whether a link points to one of its own parents: following it would never end."""
    return entry.is_symlink() and Path(entry.path).parent.resolve().is_relative_to(Path(entry.path).resolve())


def _class_folders(root: Path) -> list[str]:
    names = _folders_in(root)
    if not names:
        raise DataError(
            f"Expected class folders in '{root}', received none"
            f"{' (images lie directly in it)' if next(_images_in(root), None) else ''}. {LAYOUT}"
        )
    _reject_splits(root, names)
    return names


def _reject_splits(root: Path, names: list[str]) -> None:
    """Raise if the folders are splits of a dataset: otherwise they would be the classes "train" and "val"."""
    found = {name.lower(): name for name in names}
    train = next((found[name] for name in _TRAIN if name in found), None)
    held_out = [found[name] for name in _HELD_OUT if name in found]
    if train is None and (len(held_out) < 2 or len(held_out) < len(names)):
        return  # no folder for training, so these are probably names of classes
    if train is not None and not held_out:
        # Classes such as bus, car and train; unless they have subfolders of their own with the same names.
        inside = _folders_in(root / train)
        same = [name for name in names if name != train and inside and _folders_in(root / name) == inside]
        if not same and not (len(names) == 1 and len(inside) > 1):
            return
        held_out = same
    others = "".join(f", val_data='{root / name}'" for name in held_out[:1])
    first = train or held_out[0]
    raise DataError(
        f"Expected class folders in '{root}', received the splits {', '.join(names)}. Pass one of them: "
        f"data='{root / first}'{others}."
    )


def _existing_folder(root: str | Path) -> Path:
    path = Path(root).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise DataError(expected("a folder of images", f"the file {path}", f"Pass the folder: '{path.parent}'."))
    raise DataError(f"Expected a folder of images, received '{path}', which does not exist. {_nearby(path)}".strip())


def _nearby(path: Path) -> str:
    """A hint about what exists instead of a missing path."""
    parent = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    if parent is None:
        return ""
    missing = path.absolute().relative_to(parent).parts[0]
    names = _folders_in(parent)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    contents = f"'{parent}' has the folders: {shown}." if names else f"'{parent}' has no folders."
    return f"{did_you_mean(missing, names)} {contents}".strip()
