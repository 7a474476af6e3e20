"""What can be wrong with a batch of images and labels, in sentences for `Trainer.check()`. Waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LARGEST_NORMALISED = 20.0  # normalised pixels are within some 3 of 0; 0 to 255 that was made float is not


def image_problems(images: Any, channels: int | None) -> list[str]:
    """Wrong shapes, constant pictures, values that cannot have been normalised."""
    if not isinstance(images, Tensor) or images.ndim != 4:
        shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        return [f"Images should be a tensor (batch, channels, height, width), but are {shape}."]
    problems = []
    if channels is not None and images.shape[1] != channels:
        problems.append(f"Images should have {channels} channels as the model does, but have {images.shape[1]}.")
    if images.is_floating_point():
        problems += _float_problems(images)
    elif images.dtype != torch.uint8:
        problems.append(f"Images should be uint8, or float if they are normalised, but are {images.dtype}.")
    flat = images.flatten(1)
    constant = (flat == flat[:, :1]).all(1).nonzero().flatten().tolist()
    # A blank picture happens; a batch full of them is a reading error.
    if len(constant) * 2 >= len(images):
        problems.append(f"{len(constant)} of {len(images)} images are constant (every pixel the same).")
    return problems


def label_problems(labels: Any, num_classes: int | None) -> list[str]:
    """Labels that are missing, no whole numbers, or outside the range of the classes."""
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


def _float_problems(images: Tensor) -> list[str]:
    if not bool(images.isfinite().all()):
        return ["Images hold NaN or infinite values."]
    largest = images.abs().max().item()
    if largest > _LARGEST_NORMALISED:
        return [
            f"Float images are taken as normalised, but their values reach {largest:.4g}. "
            "Give pixels as uint8 (they are normalised for you), or normalise them."
        ]
    return []
