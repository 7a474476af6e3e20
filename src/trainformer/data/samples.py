"""Small real data sets that come along by name: for first runs, examples and tests, without a download."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.pixels import ImageTensors


def load_sample(name: str) -> ImageTensors:
    """The built-in sample of this name.

    >>> len(load_sample("digits"))
    1797
    """
    if name not in _SAMPLES:
        known = f"Built-in samples: {', '.join(map(repr, sample_names()))}."
        raise BadArgument(
            expected("the name of a built-in sample", name, f"{did_you_mean(name, _SAMPLES)} {known}".strip())
        )
    return _SAMPLES[name]()


def sample_names() -> list[str]:
    """Names that `load_sample` knows.

    >>> sample_names()
    ['digits']
    """
    return sorted(_SAMPLES)


def _digits() -> ImageTensors:
    """1,797 handwritten digits of 8x8 pixels (UCI, by way of scikit-learn); the pixels are 0 to 16 there."""
    data = require("sklearn.datasets", "samples", "for the sample 'digits'").load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    labels = torch.from_numpy(data.target.astype(np.int64))
    return ImageTensors(torch.from_numpy(pixels).unsqueeze(1), labels, [str(digit) for digit in range(10)])


_SAMPLES: dict[str, Callable[[], ImageTensors]] = {"digits": _digits}
