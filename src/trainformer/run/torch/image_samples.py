"""Images of batches as they are shown to people."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainformer.core.errors import DataError, expected
from trainformer.data.image import split_sample


def images_and_labels(batch: Any) -> dict[str, Tensor]:
    """The images (N, C, H, W) of a batch, and the classes as `true` if it has any."""
    images, labels = split_sample(batch)
    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3):
        received = f"shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else type(images).__name__
        raise DataError(expected("ImageSamples to get batches of images (N, 1 or 3, H, W)", received, "Remove it."))
    has_classes = isinstance(labels, torch.Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    return {"image": images, **({"true": labels} if has_classes else {})}


def displayed(task: Any, images: Tensor) -> Tensor:
    """Images in [0, 1] if they are, or if the task can convert them; else as they are."""
    is_shown = images.dtype == torch.uint8 or (float(images.min()) >= 0 and float(images.max()) <= 1)
    return task.as_pixels(images).clamp(0, 1) if not is_shown and hasattr(task, "as_pixels") else images
