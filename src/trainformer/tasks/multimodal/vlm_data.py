"""Datasets and batches of vision-language models.

Records are checked before training, and encoded when they are read (in worker processes, if there are any).

Each tensor of a batch has one row per sample, so that a batch can be split between any two samples. Models take the
images (Qwen-VL even the patches) of all samples concatenated: `flat_pixels` removes the padding, with counts that stay
on the host (`rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainformer.core.errors import DataError
from trainformer.data.fetcher import is_in_memory, unwrap_subsets
from trainformer.data.order import preserved_generators
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX, EncodingReport
from trainformer.data.text.tables import location_of, normalize_index
from trainformer.tasks.multimodal.vlm_encode import Block, ImageTextEncoder, stack_rows

logger = logging.getLogger("trainformer")

_PROBED = 32  # records to check in a source that cannot be measured without decoding all images
_MANY_DROPPED = 0.1


class ImageTextExamples(Dataset):
    """Encoded records. `prompts` adds prompts to generate from.

    If records can be measured without decoding images, unusable ones are dropped and `lengths` holds the number of
    tokens of the others. Otherwise `lengths` is None, and reading an unusable record raises an error.
    """

    in_memory = False  # images are decoded and resized

    def __init__(self, source: Any, encoder: ImageTextEncoder, *, prompts: bool = False, name: str = "data") -> None:
        self.source, chosen = unwrap_subsets(source)
        self.encoder = encoder
        self.prompts = prompts
        self.report = EncodingReport()
        self.lengths: np.ndarray | None = None
        indices = np.arange(len(self.source)) if chosen is None else chosen
        with preserved_generators():  # reading records may draw random numbers
            self.indices = self._usable(indices, name) if len(indices) else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._read(int(self.indices[normalize_index(index, len(self))]))

    def _read(self, index: int) -> dict[str, Any]:
        encode = self.encoder.encode_with_prompt if self.prompts else self.encoder.encode
        return encode(self.source[index], location_of(self.source, index))

    def _usable(self, indices: np.ndarray, name: str) -> np.ndarray:
        """The indices of usable records, as far as they are known without decoding images."""
        read = getattr(self.source, "without_decoding", None)
        if not self.encoder.measures or (read is None and not is_in_memory(self.source)):
            for index in indices[:_PROBED]:
                self._read(int(index))
            return indices
        read = self.source.__getitem__ if read is None else read
        places = ((read(index), location_of(self.source, index)) for index in map(int, indices))
        lengths = [self.encoder.measure(*place, self.report, prompts=self.prompts) for place in places]
        kept = np.array([length is not None for length in lengths])
        level = logging.WARNING if self.report.dropped > _MANY_DROPPED * self.report.records else logging.INFO
        logger.log(level, "%s: %s", name, self.report)
        if not kept.any():
            raise DataError(f"There is nothing to train on in {name}: {self.report}.")
        self.lengths = np.array([length for length in lengths if length is not None], dtype=np.int64)
        return indices[kept]


def collate(examples: Sequence[Mapping[str, Any]], pad_id: int, *, image_id: int | None = None) -> dict[str, Any]:
    """Collate examples: padded tokens and labels, `pixels` by name (samples, max rows, ...), and their `rows`.

    With `image_id`, the batch also has `mm_token_type_ids`, which Qwen-VL needs for positions. Prompts are left-padded,
    since generated tokens must follow them.
    """
    batch: dict[str, Any] = dict(pad(examples, pad_id))
    if "prompt" in examples[0]:
        prompts = pad([{"input_ids": e["prompt"]} for e in examples], pad_id, side="left", multiple_of=1)
        answers = pad([{"input_ids": e["answer"]} for e in examples], pad_id)
        batch |= {"prompt_ids": prompts["input_ids"], "prompt_mask": prompts["attention_mask"]}
        batch["answers"] = answers["labels"]
    if image_id is not None:
        batch["mm_token_type_ids"] = (batch["input_ids"] == image_id).int()
        if "prompt" in examples[0]:
            batch["prompt_types"] = (batch["prompt_ids"] == image_id).int()
    names = dict.fromkeys(name for example in examples for name in example["pixels"])
    held = {name: [example["pixels"].get(name) for example in examples] for name in names}
    batch["pixels"] = {name: _by_sample(tensors) for name, tensors in held.items()}
    batch["rows"] = {name: [0 if t is None else len(t) for t in tensors] for name, tensors in held.items()}
    return batch


def _by_sample(tensors: Sequence[Tensor | None]) -> Tensor:
    """One row per sample, padded with zeros."""
    some = next(tensor for tensor in tensors if tensor is not None)
    empty = some.new_zeros(0, *some.shape[1:])
    return stack_rows([(empty if tensor is None else tensor).unsqueeze(0) for tensor in tensors])


def flat_pixels(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the image inputs of a batch without padding, as models take them; empty if no sample has an image.

    >>> batch = {"pixels": {"x": torch.tensor([[1, 2], [3, 0]])}, "rows": {"x": [2, 1]}}
    >>> flat_pixels(batch)["x"].tolist()
    [1, 2, 3]
    """
    flat = {}
    for name, counts in batch["rows"].items():
        values = batch["pixels"][name]
        if all(count == values.shape[1] for count in counts):
            flat[name] = values.flatten(0, 1)
        elif any(counts):
            flat[name] = torch.cat([sample[:count] for sample, count in zip(values, counts, strict=True)])
    return flat


def with_image(example: Mapping[str, Any], block: Block) -> dict[str, Any]:
    """Append an image to an example. It is unsupervised and no supervised token attends to it: the loss is the same."""
    ignored = np.full(len(block.tokens), IGNORE_INDEX, np.int32)
    return {
        "input_ids": np.concatenate([example["input_ids"], block.tokens]),
        "labels": np.concatenate([example["labels"], ignored]),
        "pixels": block.pixels,
    }
