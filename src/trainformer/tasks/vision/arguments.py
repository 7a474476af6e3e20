"""Arguments of the image classification task: what is allowed, and what they come to in numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import did_you_mean, expected
from trainformer.data.pixels import channels_in
from trainformer.tasks.vision.augment import check_augment
from trainformer.tasks.vision.recipes import check_recipe

if TYPE_CHECKING:
    from trainformer.data.metadata import DatasetInfo
    from trainformer.tasks.vision.classification import ImageClassification


_LOSSES = ("ce", "bce")
_MOST_VIEWS = 64  # of test-time augmentation: each costs an evaluation


def check_arguments(task: ImageClassification) -> None:
    """Refuse what cannot work, by itself or whatever the data."""
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
        if value is not None and not low <= value <= high:
            limit = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise BadArgument(expected(f"{name} to be {limit}", value))
    if task.freeze_backbone and task.adapter is not None:
        raise BadArgument(
            "Expected freeze_backbone or adapter, received both. Leave freeze_backbone out: with an adapter the "
            "weights of the backbone are frozen anyway."
        )
    _check_loss(task)
    _check_evaluation(task)


def _check_loss(task: ImageClassification) -> None:
    if task.loss not in _LOSSES:
        hint = did_you_mean(str(task.loss), _LOSSES)
        raise BadArgument(expected("loss to be 'ce' or 'bce'", task.loss, hint))
    if task.loss == "bce" and task.class_weights is not None:
        raise BadArgument(
            expected(
                "class_weights with loss='ce'",
                "loss='bce', in which every class is a question of its own",
                "Leave them out, and pass sampler='balanced' to the trainer to see rare classes more often.",
            )
        )
    if task.loss == "ce" and (task.bce_target_threshold is not None or task.bce_sum):
        raise BadArgument(
            expected("bce_target_threshold and bce_sum with loss='bce'", task.loss, "Leave them out, or pass it.")
        )


def _check_evaluation(task: ImageClassification) -> None:
    number = isinstance(task.tta, int) and not isinstance(task.tta, bool) and 0 <= task.tta <= _MOST_VIEWS
    if not number and task.tta != "flip":
        raise BadArgument(expected(f"tta to be 'flip' or a number of views up to {_MOST_VIEWS} (0: off)", task.tta))
    places = task.topk if isinstance(task.topk, tuple | list) else None
    if places is None or not all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in places):
        raise BadArgument(expected("topk to be some positive integers, such as (1, 5)", task.topk))


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


def sides_of(info: DatasetInfo) -> tuple[int, int] | None:
    """Height and width of the images, if the data say."""
    shape = info.input_shape
    if shape is None or len(shape) not in (2, 3):
        return None
    last = len(shape) == 3 and channels_in(shape) != shape[0]
    return (shape[0], shape[1]) if last else (shape[-2], shape[-1])


def first_whole_epoch(run: Any, off_last: float, samples: int | None) -> int:
    """The epoch from which on images are not mixed until the run ends, by its settings as they are now."""
    epochs = run.epochs
    if run.max_steps is not None:
        if samples is None:
            raise BadArgument(
                expected(
                    "data with a length for mixup_off_last, or a number of epochs",
                    f"max_steps={run.max_steps} and data that do not say how many samples an epoch has",
                    "Pass mixup_off_epoch to the task, or epochs to the trainer.",
                )
            )
        batches = samples / run.batch_size
        whole = max(1, math.floor(batches)) if run.drop_last else math.ceil(batches)
        epochs = math.ceil(run.max_steps / math.ceil(whole / run.accumulation_steps))
    return epochs - math.ceil(off_last * epochs if off_last < 1 else off_last)


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
