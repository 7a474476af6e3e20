"""Small real data sets by name: for first runs, examples and tests. Nothing is ever downloaded.

`digits` comes with scikit-learn. `fashion-mnist` is there if its files are: from the Debian package
`dataset-fashion-mnist`, or in a folder `fashion-mnist` below `$TRAINFORMER_DATA` or `~/.cache/trainformer`.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.dataset import Arrays

if TYPE_CHECKING:
    from trainformer.data.pixels import ImageTensors


class Sample(NamedTuple):
    """Images (N, 1, H, W) of bytes, their labels, and the names of the classes."""

    images: np.ndarray
    labels: np.ndarray
    classes: list[str]


def load_sample(name: str) -> ImageTensors:
    """The built-in sample of this name, as tensors.

    >>> len(load_sample("digits"))
    1797
    """
    import torch

    from trainformer.data.pixels import ImageTensors

    images, labels, classes = read_sample(name)
    return ImageTensors(torch.from_numpy(images), torch.from_numpy(labels), classes)


def sample_arrays(name: str) -> Arrays:
    """The built-in sample of this name without torch: samples are ``{"image", "label"}``.

    >>> sample_arrays("digits")[0]["image"].shape
    (1, 8, 8)
    """
    images, labels, classes = read_sample(name)
    data = Arrays({"image": images, "label": labels})
    data.classes = classes
    return data


def read_sample(name: str) -> Sample:
    """The images and labels of a built-in sample."""
    if name not in _SAMPLES:
        known = f"Built-in samples: {', '.join(map(repr, sample_names()))}."
        raise BadArgument(
            expected("the name of a built-in sample", name, f"{did_you_mean(name, _SAMPLES)} {known}".strip())
        )
    return _SAMPLES[name]()


def sample_names() -> list[str]:
    """Names that `load_sample` knows. A name with `:test` is the test split of that sample.

    >>> sample_names()
    ['digits', 'fashion-mnist', 'fashion-mnist:test']
    """
    return sorted(_SAMPLES)


def _digits() -> Sample:
    """1,797 handwritten digits of 8x8 pixels (UCI, by way of scikit-learn); the pixels are 0 to 16 there."""
    data = require("sklearn.datasets", "samples", "for the sample 'digits'").load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    return Sample(pixels[:, None], data.target.astype(np.int64), [str(digit) for digit in range(10)])


def _fashion_mnist(part: str) -> Sample:
    """28x28 pictures of clothes in ten classes, 60,000 to train on and 10,000 to test (Zalando Research)."""
    folder = _fashion_folder(part)
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataError(expected(f"images and as many labels in '{folder}'", f"{images.shape} and {labels.shape}"))
    return Sample(images[:, None], labels.astype(np.int64), list(_FASHION_CLASSES))


def _fashion_folder(part: str) -> Path:
    places = [Path.home() / ".cache" / "trainformer" / "fashion-mnist", Path("/usr/share/datasets/fashion-mnist")]
    if data := os.environ.get("TRAINFORMER_DATA"):
        places.insert(0, Path(data).expanduser() / "fashion-mnist")
    names = [f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    for place in places:
        if all((place / name).is_file() for name in names):
            return place
    raise DataError(
        f"Expected the files of 'fashion-mnist' ({', '.join(names)}), received none in: "
        f"{', '.join(map(str, places))}. Install the Debian package dataset-fashion-mnist, or put the files of "
        "https://github.com/zalandoresearch/fashion-mnist (data/fashion) into one of these folders."
    )


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file, the format of MNIST and its kin, compressed or not: unsigned bytes only."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Expected an IDX file, received '{path}', which cannot be read: {error}.") from error
    # Two zeros, the kind of number (8: unsigned bytes), the number of dimensions, and each of them in four bytes.
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise DataError(expected(f"'{path}' to begin like an IDX file of bytes", data[:4]))
    shape = tuple(np.frombuffer(data, ">u4", count=data[3], offset=4).tolist())
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if values.size != math.prod(shape):
        raise DataError(expected(f"{math.prod(shape)} values of shape {shape} in '{path}'", values.size))
    return values.reshape(shape).copy()  # a frombuffer array is read-only, which torch does not take


_FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_SAMPLES: dict[str, Callable[[], Sample]] = {
    "digits": _digits,
    "fashion-mnist": partial(_fashion_mnist, "train"),
    "fashion-mnist:test": partial(_fashion_mnist, "t10k"),
}
