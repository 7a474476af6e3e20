"""Processors of transformers: what a model of images and text wants its inputs to look like.

Owns loading one, and running its image part up to whole pixels. Normalising is left to the device, with or without
augmentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.augment.draws import Keys
from trainformer.data.augment.pipeline import BatchAugment
from trainformer.data.pixels import with_channels


def load_processor(source: Any, **options: Any) -> Any:
    """The processor of a hub name or folder; one that is a processor already is returned as it is."""
    if hasattr(source, "image_processor") and hasattr(source, "tokenizer"):
        return source
    if not isinstance(source, str | Path):
        raise BadArgument(
            f"Expected a processor, received {type(source).__name__}. Pass processor=, which is a processor with an "
            "image_processor and a tokenizer, or the name or folder of one."
        )
    transformers = require("transformers", "text", "for models of images and text")
    try:
        found = transformers.AutoProcessor.from_pretrained(str(Path(source).expanduser()), **options)
    except Exception as error:  # whatever a hub, a file or a missing class may raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise BadArgument(
            f"Expected to find a processor under {str(source)!r}, received {type(error).__name__}: {first} Pass the "
            "name of a model on the Hugging Face Hub (which needs a connection the first time), a folder with "
            "processor_config.json and a tokenizer, or processor=."
        ) from error
    if not hasattr(found, "image_processor") or not hasattr(found, "tokenizer"):
        received = f"{type(found).__name__} under {str(source)!r}"
        raise BadArgument(expected("a processor with an image_processor and a tokenizer", received))
    return found


class Pixels:
    """Images of any kind as the model's processor makes them, but not yet normalised: (3, H, W), uint8.

    Processors resize and crop whole pixels and normalise at the end, so nothing is lost; a quarter of the bytes goes to
    the device. A float tensor is taken as ready.
    """

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor
        self.mean = tuple(float(value) for value in image_processor.image_mean)
        self.std = tuple(float(value) for value in image_processor.image_std)
        factor = float(getattr(image_processor, "rescale_factor", 1 / 255))
        if not getattr(image_processor, "do_normalize", True):
            self.mean, self.std = (0.0,) * 3, (1.0,) * 3
        if not getattr(image_processor, "do_rescale", True):
            factor = 1.0
        # Normalising divides by 255; what the processor multiplies with instead goes into the statistics.
        self.mean = tuple(value / (255 * factor) for value in self.mean)
        self.std = tuple(value / (255 * factor) for value in self.std)

    def __call__(self, image: Any) -> Tensor:
        """One image."""
        image = with_channels(image, 3)
        if isinstance(image, Tensor) and image.is_floating_point():
            return image
        made = self.image_processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")
        pixels = made["pixel_values"]
        if pixels.ndim != 4 or len(pixels) != 1:
            raise DataError(expected("a processor that makes one (3, H, W) of an image", tuple(pixels.shape)))
        # Some processors compute in floats; the pixels are whole numbers all the same.
        return pixels[0] if pixels.dtype == torch.uint8 else pixels[0].round().clamp(0, 255).to(torch.uint8)


class PixelAugment(BatchAugment):
    """`BatchAugment` for pixels (uint8). Float images pass unchanged: a user's loader may have normalised them."""

    def forward(self, images: Tensor, keys: Keys | None = None, stream: int = 0) -> Tensor:
        """Views of pixels; other images as they are."""
        return images if images.is_floating_point() else super().forward(images, keys, stream)
