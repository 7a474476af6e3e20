"""Validation for vision tasks: arguments, class weights, and the images and labels of a batch."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import check_choice, check_count, expected
from trainformer.data.pixels import channels_in
from trainformer.tasks.vision.augment import check_augment
from trainformer.tasks.vision.recipes import check_recipe

if TYPE_CHECKING:
    from trainformer.data.metadata import DatasetInfo
    from trainformer.tasks.vision.classification import ImageClassification

_MOST_VIEWS = 64  # of test-time augmentation: each costs an evaluation
_LARGEST_NORMALISED = 20.0  # normalised pixels are within about 3 of 0; float pixels from 0 to 255 are not


# -- arguments ---------------------------------------------------------------------------------------------


def check_arguments(task: ImageClassification) -> None:
    """Validate the arguments of `ImageClassification` that do not depend on the data."""
    check_recipe(task.recipe)
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
        "mixup_prob": (0, 1),
        "mixup_off_epoch": (0, math.inf),
        "mixup_off_last": (0, math.inf),
        "bce_target_threshold": (0, 1),
        "num_classes": (1, math.inf),
        "in_chans": (1, math.inf),
    }
    for name, (low, high) in ranges.items():
        value = getattr(task, name)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if value is not None and not (is_number and low <= value <= high):
            limit = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise BadArgument(expected(f"{name} to be {limit}", value))
    if task.freeze_backbone and task.adapter is not None:
        raise BadArgument(
            "Expected freeze_backbone or adapter, received both. Leave freeze_backbone out: an adapter freezes the "
            "backbone's weights anyway."
        )
    _check_loss_and_evaluation(task)


def _check_loss_and_evaluation(task: ImageClassification) -> None:
    check_choice("loss", task.loss, ("ce", "bce"))
    if task.loss == "bce" and task.class_weights is not None:
        received = "loss='bce', which treats each class as a separate binary problem"
        do = "Leave them out, and pass sampler='balanced' to the trainer to see rare classes more often."
        raise BadArgument(expected("class_weights with loss='ce'", received, do))
    if task.loss == "ce" and (task.bce_target_threshold is not None or task.bce_sum):
        do = "Leave them out, or pass it."
        raise BadArgument(expected("bce_target_threshold and bce_sum with loss='bce'", task.loss, do))
    number = isinstance(task.tta, int) and not isinstance(task.tta, bool) and 0 <= task.tta <= _MOST_VIEWS
    if not number and task.tta != "flip":
        raise BadArgument(expected(f"tta to be 'flip' or a number of views up to {_MOST_VIEWS} (0: off)", task.tta))
    ks = task.topk if isinstance(task.topk, tuple | list) else None
    if ks is None or not all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in ks):
        raise BadArgument(expected("topk to be some positive integers, such as (1, 5)", task.topk))


def check_counts(task: Any, *names: str) -> None:
    """Check that arguments are None or integers of at least 1."""
    for name in names:
        if getattr(task, name) is not None:
            check_count(name, getattr(task, name))


def size_pair(size: Any, model_size: Any) -> tuple[int, int] | None:
    """Return (height, width) from `image_size` and the `img_size` in `model_kwargs`, which must agree."""
    pairs = []
    for value in (size, model_size):
        if value is None:
            continue
        pair = (value, value) if isinstance(value, int) else tuple(value)
        if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
            raise BadArgument(expected("image_size to be a positive integer or (height, width)", value))
        pairs.append(pair)
    if len(set(pairs)) > 1:
        raise BadArgument(expected(f"image_size to agree with model_kwargs['img_size']={model_size}", size))
    return pairs[0] if pairs else None


def image_hw(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width from the shape of an image: (C, H, W), (H, W, C) or (H, W)."""
    channels_last = len(shape) == 3 and channels_in(shape) != shape[0]
    return (shape[0], shape[1]) if channels_last else (shape[-2], shape[-1])


def given_weights(weights: Any, classes: int) -> Tensor | None:
    """Validate class weights passed as numbers."""
    if weights is None:
        return None
    tensor = torch.as_tensor(weights, dtype=torch.float64)
    if tensor.shape != (classes,) or not bool((tensor.isfinite() & (tensor >= 0)).all()) or not tensor.any():
        what = f"class_weights to be {classes} numbers, none negative and not all 0"
        raise BadArgument(expected(what, list(weights)))
    return tensor


def balanced_weights(info: DatasetInfo, classes: int) -> Tensor:
    """Return class weights inverse to the class frequencies in the data."""
    weights = info.class_weights
    if weights is None:
        raise DataError(
            "Expected data with labels that can be read without loading images for class_weights='balanced', received "
            "data without. Give the dataset a `targets` attribute, or pass the weights as numbers."
        )
    # Classes beyond those of the data have no samples, hence no weight.
    return torch.cat([weights.double(), weights.new_zeros(classes - len(weights)).double()])


def first_unmixed_epoch(run: Any, off_last: float, samples: int | None) -> int:
    """Return the epoch from which on mixup stays off until the end of the run, given the current run settings."""
    epochs = run.epochs
    if run.max_steps is not None:
        if samples is None:
            received = f"max_steps={run.max_steps} and data without a length"
            do = "Pass mixup_off_epoch to the task, or epochs to the trainer."
            raise BadArgument(expected("data with a length for mixup_off_last, or a number of epochs", received, do))
        batches = samples / run.batch_size
        whole = max(1, math.floor(batches)) if run.drop_last else math.ceil(batches)
        epochs = math.ceil(run.max_steps / math.ceil(whole / run.accumulation_steps))
    return epochs - math.ceil(off_last * epochs if off_last < 1 else off_last)


# -- batches (for `Trainer.check()`; these synchronise with the device) ------------------------------------


def image_problems(images: Any, channels: int | None) -> list[str]:
    """Report wrong shapes, constant images, and float values that cannot be normalised pixels."""
    if not isinstance(images, Tensor) or images.ndim != 4:
        shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        return [f"Images should be a tensor (batch, channels, height, width), but are {shape}."]
    problems = []
    if channels is not None and images.shape[1] != channels:
        problems.append(f"Images should have {channels} channels as the model does, but have {images.shape[1]}.")
    if images.is_floating_point():
        largest = images.abs().max().item()
        if not math.isfinite(largest):
            problems.append("Images hold NaN or infinite values.")
        elif largest > _LARGEST_NORMALISED:
            problems.append(
                f"Float images are treated as normalised, but their values reach {largest:.4g}. "
                "Pass pixels as uint8 (the task normalises them), or normalise them."
            )
    elif images.dtype != torch.uint8:
        problems.append(f"Images should be uint8, or float if they are normalised, but are {images.dtype}.")
    flat = images.flatten(1)
    constant = (flat == flat[:, :1]).all(1).nonzero().flatten().tolist()
    # One blank image can happen; a batch full of them is a loading error.
    if len(constant) * 2 >= len(images):
        problems.append(f"{len(constant)} of {len(images)} images are constant (every pixel the same).")
    return problems


def label_problems(labels: Any, num_classes: int | None) -> list[str]:
    """Report labels that are missing, not integers, or out of range."""
    if not isinstance(labels, Tensor):
        what = "are missing" if labels is None else f"are {type(labels).__name__}"
        return [f"Labels should be a tensor with one class index per image, but {what}."]
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return [f"Labels should be integers (class indices), but are {labels.dtype}."]
    if labels.ndim != 1:
        return [f"Labels should be of shape (batch,), one class index per image, but are {tuple(labels.shape)}."]
    if num_classes is None:
        return []
    wrong = labels[(labels < 0) | (labels >= num_classes)].unique().tolist()
    if not wrong:
        return []
    shown = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
    return [f"Labels should be 0 to {num_classes - 1} for {num_classes} classes, but {shown} occur."]
