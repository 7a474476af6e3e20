"""Arguments of the image classification task: what is allowed, and what they come to in numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.tasks.vision.augment import check_augment

if TYPE_CHECKING:
    from trainformer.data.info import DatasetInfo
    from trainformer.tasks.vision.classification import ImageClassification


def check_arguments(task: ImageClassification) -> None:
    """Refuse what cannot work, by itself or whatever the data."""
    check_augment(task.augment)
    if isinstance(task.class_weights, str) and task.class_weights != "balanced":
        raise BadArgument(expected("class_weights to be 'balanced', a list of numbers or None", task.class_weights))
    ranges: dict[str, tuple[float, float]] = {
        "label_smoothing": (0, 1),
        "random_erasing": (0, 1),
        "drop_rate": (0, 1),
        "drop_path_rate": (0, 1),
        "mixup": (0, math.inf),
        "cutmix": (0, math.inf),
        "mixup_off_epoch": (0, math.inf),
        "num_classes": (1, math.inf),
        "in_chans": (1, math.inf),
    }
    for name, (low, high) in ranges.items():
        value = getattr(task, name)
        if value is not None and not low <= value <= high:
            limit = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise BadArgument(expected(f"{name} to be {limit}", value))


def size_pair(size: Any, built_for: Any) -> tuple[int, int] | None:
    """(height, width) from an argument; `built_for` is what `model_kwargs` tell the model."""
    pairs = []
    for value in (size, built_for):
        if value is None:
            continue
        pair = (value, value) if isinstance(value, int) else tuple(value)
        if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
            raise BadArgument(expected("image_size to be a positive integer or (height, width)", value))
        pairs.append(pair)
    if len(set(pairs)) > 1:
        raise BadArgument(expected(f"image_size to agree with model_kwargs['img_size']={built_for}", size))
    return pairs[0] if pairs else None


def given_weights(weights: Any, classes: int) -> Tensor | None:
    """Class weights that the user wrote down."""
    if weights is None:
        return None
    tensor = torch.as_tensor(weights, dtype=torch.float64)
    if tensor.shape != (classes,) or not bool((tensor.isfinite() & (tensor >= 0)).all()) or not tensor.any():
        raise BadArgument(
            expected(f"class_weights to be {classes} numbers, none negative and not all 0", list(weights))
        )
    return tensor


def balanced_weights(info: DatasetInfo, classes: int) -> Tensor:
    """Class weights inverse to the frequencies in the data."""
    weights = info.class_weights
    if weights is None:
        raise DataError(
            "Expected to find the labels without loading the images for class_weights='balanced', received data that "
            "do not have them at hand. Give the data set a `targets` attribute, or pass the weights as numbers."
        )
    # Classes that the data do not know of have no samples, and so no weight.
    return torch.cat([weights.double(), weights.new_zeros(classes - len(weights)).double()])
