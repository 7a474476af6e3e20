"""What users pass to predict from: images in any form, prompts and conversations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require
from trainformer.data.folder import decode_image, read_image
from trainformer.data.lists import is_list
from trainformer.data.pixels import is_pil, with_channels

_FORMS = "a path, a PIL image, encoded bytes, or uint8 pixels as an array or a tensor"


class RawImages:
    """Images in any form as a dataset: paths, PIL images, encoded bytes, uint8 arrays and tensors.

    `ids` are the paths, and the numbers of other images. `floats` is for a model that was trained on float images.
    """

    def __init__(self, images: list[Any], channels: int | None = 3, floats: bool = False) -> None:
        self.images = images
        self.channels = channels
        self.floats = floats
        self.ids = [str(image) if isinstance(image, str | Path) else number for number, image in enumerate(images)]
        if any(isinstance(name, str) for name in self.ids):
            self.ids = [str(name) for name in self.ids]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        if isinstance(image, Tensor | np.ndarray):
            return self._pixels(image, index)
        if self.floats:
            do = "Prepare it as for training: only you know how."
            raise DataError(expected("a float image as the model was trained on", type(image).__name__, do))
        if isinstance(image, str | Path):
            if not os.path.exists(image):
                raise DataError(expected("the path of an image", f"{image}, which does not exist"))
            return read_image(image, self.channels)
        if isinstance(image, bytes | bytearray | memoryview):
            return decode_image(bytes(image), self.channels, f"image {index}")
        if is_pil(image):
            turned = require("PIL.ImageOps", "vision", "to read images").exif_transpose(image)
            return with_channels(turned, self.channels)
        raise DataError(expected(f"image {index} to be {_FORMS}", type(image).__name__))

    def _pixels(self, image: Tensor | np.ndarray, index: int) -> Any:
        is_float = image.is_floating_point() if isinstance(image, Tensor) else image.dtype.kind == "f"
        if is_float and not self.floats:
            do = "If its values are from 0 to 1, pass (255 * image).astype('uint8')."
            raise DataError(expected(f"image {index} to have uint8 pixels from 0 to 255", str(image.dtype), do))
        return image if isinstance(image, Tensor) or image.flags.writeable else image.copy()  # torch warns otherwise


def as_images(inputs: Any) -> tuple[list[Any], bool]:
    """Images as a list, and whether they were given as a list (or a stack)."""
    if isinstance(inputs, list | tuple):
        return list(inputs), True
    if isinstance(inputs, Tensor | np.ndarray) and inputs.ndim == 4:
        return list(inputs), True
    return [inputs], False


def is_dataset(inputs: Any, of_images: bool) -> bool:
    """Whether inputs are a dataset or where one is, and no single image or text. A string may be a text."""
    if isinstance(inputs, str | Path):
        if not of_images:
            return isinstance(inputs, Path)
        return os.path.isdir(inputs) or is_list(inputs)
    if not of_images and isinstance(inputs, tuple | Tensor | np.ndarray):
        return True  # tensors with one row per sample
    if not of_images and hasattr(inputs, "columns") and hasattr(inputs, "__len__"):
        return True  # a DataFrame
    return isinstance(inputs, torch.utils.data.Dataset | torch.utils.data.DataLoader)


def prompt_of(record: Any, tokenizer: Any, index: int = 0) -> str:
    """The prompt of a record: a text, its prompt or text, or its conversation up to the assistant's turn."""
    if isinstance(record, str) and record:
        return record
    if isinstance(record, Mapping):
        for name in ("prompt", "text"):
            if isinstance(record.get(name), str) and record[name]:
                return str(record[name])
        if isinstance(record.get("messages"), list) and getattr(tokenizer, "chat_template", None):
            return str(tokenizer.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=True))
    do = 'Write prompts as lines of a .txt file, or as {"prompt": ...} in a .jsonl file.'
    found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
    raise DataError(expected(f"record {index} to have a prompt, a text or messages", found, do))
