"""Small real datasets by name, for first runs, examples and tests. Nothing is ever downloaded.

- Images: `digits` comes with scikit-learn. `fashion-mnist` needs its files: from the Debian package
  `dataset-fashion-mnist`, or in a folder `fashion-mnist` in `$TRAINFORMER_DATA` or `~/.cache/trainformer`.
- Text: `python-stdlib` is the source of the running Python's standard library, a twentieth of it held out as
  `python-stdlib:test`. One version of Python has the same files everywhere, up to what a distribution adds or removes.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import math
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.dataset import ArrayDataset
from trainformer.data.text.tables import TextFiles

if TYPE_CHECKING:
    from trainformer.data.pixels import ImageTensors

# Tests contain deliberately broken files; site-packages is whatever the user installed.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
# Written by the build or the distribution, with paths of the machine.
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize", "_distutils_system_mod")
_HELD_OUT = 20

# Images (N, 1, H, W) as uint8, their labels, and the class names.
LabelledImages = tuple[np.ndarray, np.ndarray, list[str]]


def load_builtin(name: str) -> ImageTensors:
    """A built-in image dataset, as tensors.

    >>> len(load_builtin("digits"))
    1797
    """
    import torch

    from trainformer.data.pixels import ImageTensors

    images, labels, classes = _read_images(name)
    return ImageTensors(torch.from_numpy(images), torch.from_numpy(labels), classes)


def builtin_arrays(name: str) -> ArrayDataset:
    """A built-in image dataset without torch: samples are ``{"image", "label"}``.

    >>> builtin_arrays("digits")[0]["image"].shape
    (1, 8, 8)
    """
    images, labels, classes = _read_images(name)
    data = ArrayDataset({"image": images, "label": labels})
    data.classes = classes
    return data


def builtin_names() -> list[str]:
    """Names that `load_builtin` accepts; `:test` is the test split.

    >>> builtin_names()
    ['digits', 'fashion-mnist', 'fashion-mnist:test']
    """
    return sorted(_IMAGES)


def load_corpus(name: str) -> TextFiles:
    """A built-in text corpus: documents ``{"text"}``.

    >>> train, test = load_corpus("python-stdlib"), load_corpus("python-stdlib:test")
    >>> len(train) > 10 * len(test) > 0
    True
    """
    if name not in _CORPORA:
        known = f"Built-in corpora: {', '.join(map(repr, corpus_names()))}."
        raise BadArgument(expected("the name of a built-in corpus", name, f"{did_you_mean(name, _CORPORA)} {known}"))
    return _CORPORA[name]()


def corpus_names() -> list[str]:
    """Names that `load_corpus` accepts; `:test` is the held-out split.

    >>> corpus_names()
    ['python-stdlib', 'python-stdlib:test']
    """
    return sorted(_CORPORA)


# -- images ------------------------------------------------------------------------------------------------


def _read_images(name: str) -> LabelledImages:
    if name not in _IMAGES:
        known = f"Built-in datasets: {', '.join(map(repr, builtin_names()))}."
        do = f"{did_you_mean(name, _IMAGES)} {known}".strip()
        raise BadArgument(expected("a path that exists, or the name of a built-in dataset", name, do))
    return _IMAGES[name]()


def _digits() -> LabelledImages:
    """1,797 handwritten digits of 8x8 pixels with values 0 to 16 (UCI, from scikit-learn)."""
    # The file is read without importing scikit-learn, which takes longer (1.8 s) than training an epoch.
    found = importlib.util.find_spec("sklearn")
    folders = [] if found is None else found.submodule_search_locations or []
    file = next((f for place in folders if (f := Path(place) / "datasets/data/digits.csv.gz").exists()), None)
    if file is not None:
        table = np.loadtxt(file, delimiter=",")
        images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    else:
        data = require("sklearn.datasets", "samples", "for the dataset 'digits'").load_digits()
        images, labels = data.images, data.target
    pixels = np.round(images * (255 / 16)).astype(np.uint8)
    return pixels[:, None], labels.astype(np.int64), [str(digit) for digit in range(10)]


def _fashion_mnist(part: str) -> LabelledImages:
    """28x28 pictures of clothes in ten classes, 60,000 for training and 10,000 for testing (Zalando Research)."""
    folder = _fashion_folder(part)
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataError(expected(f"images and as many labels in '{folder}'", f"{images.shape} and {labels.shape}"))
    return images[:, None], labels.astype(np.int64), list(_FASHION_CLASSES)


def _fashion_folder(part: str) -> Path:
    folders = [Path.home() / ".cache" / "trainformer" / "fashion-mnist", Path("/usr/share/datasets/fashion-mnist")]
    if data := os.environ.get("TRAINFORMER_DATA"):
        folders.insert(0, Path(data).expanduser() / "fashion-mnist")
    names = [f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    for folder in folders:
        if all((folder / name).is_file() for name in names):
            return folder
    raise DataError(
        f"Expected the files of 'fashion-mnist' ({', '.join(names)}), received none in: "
        f"{', '.join(map(str, folders))}. Install the Debian package dataset-fashion-mnist, or put the files of "
        "https://github.com/zalandoresearch/fashion-mnist (data/fashion) into one of these folders."
    )


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file (the format of MNIST), gzipped or not; unsigned bytes only."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Expected an IDX file, received '{path}', which cannot be read: {error}.") from error
    # Two zeros, the element type (8: unsigned bytes), the number of dimensions, and each dimension in four bytes.
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise DataError(expected(f"'{path}' to start like an IDX file of bytes", data[:4]))
    shape = tuple(np.frombuffer(data, ">u4", count=data[3], offset=4).tolist())
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if values.size != math.prod(shape):
        raise DataError(expected(f"{math.prod(shape)} values of shape {shape} in '{path}'", values.size))
    return values.reshape(shape).copy()  # a frombuffer array is read-only, which torch refuses


_FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_IMAGES: dict[str, Callable[[], LabelledImages]] = {
    "digits": _digits,
    "fashion-mnist": partial(_fashion_mnist, "train"),
    "fashion-mnist:test": partial(_fashion_mnist, "t10k"),
}


# -- text --------------------------------------------------------------------------------------------------


def _stdlib(held_out: bool) -> TextFiles:
    """One document per file, about 650 files with 11 MB (Python 3.11), sorted by path.

    A hash of the path decides what is held out: a file stays in its split when others are added or removed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    shares = {name: int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT for name in _sources(root)}
    files = sorted(name for name, share in shares.items() if (share == 0) == held_out)
    if not files:
        raise DataError(
            f"Expected the source of Python's standard library in '{root}', received no readable file. Some "
            "distributions ship it in a separate package, or as compiled files only."
        )
    return TextFiles([root / name for name in files])


def _sources(root: Path) -> Iterator[str]:
    """Relative paths (with slashes on every system) of the UTF-8 files that are not empty."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES) and _is_text(os.path.join(folder, name)):
                yield Path(folder, name).relative_to(root).as_posix()


def _is_text(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return bool(file.read().strip())
    except (OSError, UnicodeDecodeError):
        return False


_CORPORA: dict[str, Callable[[], TextFiles]] = {
    "python-stdlib": partial(_stdlib, held_out=False),
    "python-stdlib:test": partial(_stdlib, held_out=True),
}
