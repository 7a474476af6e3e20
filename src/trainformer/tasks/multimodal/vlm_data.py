"""Data sets and batches of vision-language models.

Owns looking through records before training, reading one when it is asked for (in a worker process, where there are
any: that is where images are decoded), and the shape of a batch. How a record is encoded is left to `vlm_encode`.

Every tensor of a batch has one row per sample, so that a batch can be cut between any two samples. Models want the
images of all samples one behind the other, and Qwen-VL even their patches: `flat_pixels` takes the filling out again,
by numbers that never leave the host (`rows`).
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

_LOOKED_AT = 32  # records of a source that cannot be looked through without decoding every image
_MANY_DROPPED = 0.1


class ImageTextExamples(Dataset):
    """Records as examples, encoded when they are read. `asked` adds prompts, to generate from.

    Records that cannot be used are left out, where that shows without decoding images: `lengths` then has the number of
    tokens of each that is left. Else it is None, and a record that cannot be used is an error when it is read.
    """

    in_memory = False  # images are decoded and resized

    def __init__(self, source: Any, encoder: ImageTextEncoder, *, asked: bool = False, name: str = "data") -> None:
        self.source, chosen = unwrap_subsets(source)
        self.encoder = encoder
        self.asked = asked
        self.report = EncodingReport()
        self.lengths: np.ndarray | None = None
        numbers = np.arange(len(self.source)) if chosen is None else chosen
        # Looking at records may draw random numbers, which belong to the run.
        with preserved_generators():
            self.numbers = self._look_through(numbers, name) if len(numbers) else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._read(int(self.numbers[normalize_index(index, len(self))]))

    def _read(self, number: int) -> dict[str, Any]:
        encode = self.encoder.encode_asked if self.asked else self.encoder.encode
        return encode(self.source[number], location_of(self.source, number))

    def _look_through(self, numbers: np.ndarray, name: str) -> np.ndarray:
        """The numbers of the records that can be used, as far as they can be told."""
        read = getattr(self.source, "without_decoding", None)
        if not self.encoder.measures or (read is None and not is_in_memory(self.source)):
            for index in range(min(len(numbers), _LOOKED_AT)):
                self._read(int(numbers[index]))
            return numbers
        read = self.source.__getitem__ if read is None else read
        lengths = [self._length(read(int(number)), int(number)) for number in numbers]
        kept = np.array([length is not None for length in lengths])
        level = logging.WARNING if self.report.dropped > _MANY_DROPPED * self.report.records else logging.INFO
        logger.log(level, "%s: %s", name, self.report)
        if not kept.any():
            raise DataError(f"There is nothing to train on in {name}: {self.report}.")
        self.lengths = np.array([length for length in lengths if length is not None], dtype=np.int64)
        return numbers[kept]

    def _length(self, record: Any, number: int) -> int | None:
        return self.encoder.measure(record, location_of(self.source, number), self.report, asked=self.asked)


def collate(examples: Sequence[Mapping[str, Any]], pad_id: int, *, image_id: int | None = None) -> dict[str, Any]:
    """A batch: padded tokens and labels, `pixels` by name, each (samples, most rows, ...), and `rows`, their numbers.

    With `image_id`, tokens also have `mm_token_type_ids`, by which Qwen-VL counts positions. Prompts are padded on the
    left, since what is generated must follow them.
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
    """One row per sample, filled up with zeros."""
    some = next(tensor for tensor in tensors if tensor is not None)
    empty = some.new_zeros(0, *some.shape[1:])
    return stack_rows([(empty if tensor is None else tensor).unsqueeze(0) for tensor in tensors])


def flat_pixels(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The image inputs of a batch as models take them, without filling; nothing where no sample has an image.

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
    """An example with an image behind its end, where nothing is learned and nothing learned looks: the same loss."""
    silent = np.full(len(block.tokens), IGNORE_INDEX, np.int32)
    return {
        "input_ids": np.concatenate([example["input_ids"], block.tokens]),
        "labels": np.concatenate([example["labels"], silent]),
        "pixels": block.pixels,
    }
