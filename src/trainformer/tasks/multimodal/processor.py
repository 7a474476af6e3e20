"""Processors of transformers: loading them, resizing images with them, and the base class of tasks that use one.

Images are resized and cropped by the model's processor but stay uint8; they are normalised on the device.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.augment.draws import Keys
from trainformer.data.augment.pipeline import BatchAugment
from trainformer.data.pixels import with_channels
from trainformer.models.language import ensure_pad_token
from trainformer.tasks.language.base import LanguageTask


def load_processor(source: Any, **options: Any) -> Any:
    """Load the processor of a hub name or folder. A processor is returned unchanged."""
    if hasattr(source, "image_processor") and hasattr(source, "tokenizer"):
        return source
    if not isinstance(source, str | Path):
        raise BadArgument(
            f"Expected a processor, received {type(source).__name__}. Pass processor=, which is a processor with an "
            "image_processor and a tokenizer, or the name or folder of one."
        )
    transformers = require("transformers", "text", "for models of images and text")
    try:
        options = {"trust_remote_code": False, **options}
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
    """Resize and crop an image with the model's processor, without normalisation: (3, H, W), uint8.

    Processors normalise last, so nothing is lost, and only a quarter of the bytes is copied to the device. Float
    tensors pass through unchanged.
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
        # `Normalize` divides by 255; fold a different rescale factor into the statistics.
        self.mean = tuple(value / (255 * factor) for value in self.mean)
        self.std = tuple(value / (255 * factor) for value in self.std)

    def __call__(self, image: Any) -> Tensor:
        """Process one image."""
        image = with_channels(image, 3)
        if isinstance(image, Tensor) and image.is_floating_point():
            return image
        made = self.image_processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")
        pixels = made["pixel_values"]
        if pixels.ndim != 4 or len(pixels) != 1:
            raise DataError(expected("a processor that returns one (3, H, W) per image", tuple(pixels.shape)))
        # Some processors compute in floats, but the pixels are integers.
        return pixels[0] if pixels.dtype == torch.uint8 else pixels[0].round().clamp(0, 255).to(torch.uint8)


class PixelAugment(BatchAugment):
    """`BatchAugment` for uint8 pixels. Float images, which a user's DataLoader may have normalised, pass through."""

    def forward(self, images: Tensor, keys: Keys | None = None, stream: int = 0) -> Tensor:
        """Augment uint8 images."""
        return images if images.is_floating_point() else super().forward(images, keys, stream)


@dataclass(eq=False)
class ProcessorTask(LanguageTask):
    """Base class of tasks whose model has a processor."""

    _: KW_ONLY
    processor: Any = None

    @cached_property
    def preprocessor(self) -> Any:
        """The processor of the model, loaded on first access."""
        processor = load_processor(self.pretrained.tokenizer if self.processor is None else self.processor)
        ensure_pad_token(processor.tokenizer)
        return processor

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer."""
        return self.preprocessor.tokenizer

    def save_assets(self, folder: Path) -> list[str]:
        """Write the config (or the adapter) and the processor for `from_pretrained`."""
        names, before = super().save_assets(folder), set(folder.iterdir())
        self.preprocessor.save_pretrained(folder)
        return sorted({*names, *(path.name for path in folder.iterdir() if path not in before and path.is_file())})
