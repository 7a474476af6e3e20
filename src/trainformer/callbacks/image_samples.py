"""Images of the validation data with what the model takes them for, for people to look at."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.image import split_sample

_MOST = 16  # a record is a line of JSON: some 100 KB at most


@dataclass
class ImageSamples:
    """After each evaluation, record some validation images with their true and their predicted class.

    They are `n` images evenly over the set, the same each time, as the model sees them (normalising undone), at most
    `size` pixels wide and high, as PNG in the run's ``records.jsonl``; reports show them. It asks for a task on images;
    the predicted class is what its `predict_step` returns as `prediction`. `every`: after each so-many-th evaluation
    only. Training goes on as if nothing had happened.
    """

    needs_torch = True

    n: int = 8
    size: int = 96
    every: int = 1
    key: str = "val"

    def __post_init__(self) -> None:
        if not 1 <= self.n <= _MOST:
            raise BadArgument(expected(f"ImageSamples's n to be from 1 to {_MOST}", self.n))
        for name in ("size", "every"):
            if getattr(self, name) < 1:
                raise BadArgument(expected(f"ImageSamples's {name} to be at least 1", getattr(self, name)))
        self._evaluations = 0

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Look at them."""
        self._evaluations += 1
        if self._evaluations % self.every:
            return
        rows = trainer.sample_predictions(self.n, _images_and_labels)
        if not trainer.is_main:
            return
        images = _pixels(trainer.task, rows["image"])
        names = getattr(trainer.task, "class_names", None)
        shown = [
            {"png": _png(image, self.size), "caption": _caption(rows, place, names)}
            for place, image in enumerate(images)
        ]
        trainer.record("images", key=self.key, images=shown)

    def state_dict(self) -> dict[str, Any]:
        """How many evaluations there were."""
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._evaluations = state["evaluations"]


def _images_and_labels(batch: Any) -> dict[str, Tensor]:
    images, labels = split_sample(batch)
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3):
        received = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise DataError(expected("ImageSamples to get batches of images (N, 1 or 3, H, W)", received, "Leave it out."))
    has_classes = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    return {"image": images, **({"true": labels} if has_classes else {})}


def _pixels(task: Any, images: Tensor) -> Tensor:
    """Images from 0 to 1, whatever was done to them for the model."""
    low, high = float(images.min()), float(images.max())
    if images.dtype == torch.uint8:
        return images.float() / 255
    if low >= 0 and high <= 1:
        return images.float()
    if hasattr(task, "as_pixels"):
        return task.as_pixels(images).clamp(0, 1)
    return (images.float() - low) / max(high - low, 1e-12)  # of unknown origin: from the darkest to the brightest


def _png(image: Tensor, most: int) -> str:
    """A small PNG, in base64."""
    pillow = require("PIL.Image", "vision", "to write images")
    array = (image * 255).round().byte().permute(1, 2, 0).numpy()
    picture = pillow.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    picture.thumbnail((most, most))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _caption(rows: dict[str, Any], place: int, names: Sequence[str] | None) -> str:
    def name(number: int) -> str:
        return names[number] if names and 0 <= number < len(names) else str(number)

    parts = []
    if "true" in rows:
        parts.append(f"true {name(int(rows['true'][place]))}")
    if "prediction" in rows and rows["prediction"].ndim == 1:
        sure = f" ({float(rows['probability'][place]):.2f})" if "probability" in rows else ""
        parts.append(f"predicted {name(int(rows['prediction'][place]))}{sure}")
    return ", ".join(parts)
