"""Samples of images with captions, or with labels, as a model with two towers reads them.

Owns what a sample is made of, its tokens and pixels, and the shape of a batch:

    pixel_values (B, 3, H, W) uint8     input_ids, attention_mask (B, C, L)     caption (B, C)

with C captions per image: one in training, in evaluation as many as are looked at. `caption` numbers the texts, equal
numbers for equal tokens; it is 0 where an image has fewer. Images with labels have `label` (B,) instead of captions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainformer.core.errors import DataError, expected
from trainformer.data.fetcher import is_in_memory
from trainformer.data.image import split_sample
from trainformer.data.multimodal import TEXT_COLUMNS
from trainformer.data.order import preserved_generators, sample_key, seed_generators
from trainformer.data.text.collate import pad
from trainformer.data.webdataset import MappedStream
from trainformer.tasks.multimodal.processing import Pixels


class Pair(NamedTuple):
    """What a sample holds: an image, and captions or a label or neither. `text` is the caption that was drawn."""

    image: Any
    text: str | None
    captions: Sequence[str]
    label: Any


def split_pair(sample: Any) -> Pair:
    """The parts of a sample: a mapping with `image` and `text` (or a usual other name), or (image, text or label).

    >>> split_pair({"image": "pixels", "caption": "a cat"})
    Pair(image='pixels', text='a cat', captions=['a cat'], label=None)
    >>> split_pair(("pixels", 3)).label
    3
    """
    image, label = split_sample(sample)
    said = label
    if isinstance(sample, Mapping):
        said = next((sample[name] for name in ("captions", *TEXT_COLUMNS) if sample.get(name) is not None), None)
    if isinstance(image, list | tuple):
        raise DataError(expected("samples of one image each", f"{len(image)} images"))
    if isinstance(said, str):
        return Pair(image, said, [said], None)
    if isinstance(said, list | tuple) and said and all(isinstance(text, str) for text in said):
        drawn = sample.get("text") if isinstance(sample, Mapping) else None
        return Pair(image, drawn if isinstance(drawn, str) else None, said, None)
    return Pair(image, None, [], label)


@dataclass(frozen=True)
class PairEncoder:
    """Samples into examples. `captions` says how many of each image there are to be; 0: one by lot, for training."""

    pixels: Pixels
    tokenizer: Any
    max_length: int
    captions: int = 0

    def __call__(self, sample: Any) -> dict[str, Any]:
        """Pixels and tokens, or pixels and a label, of a sample."""
        pair = split_pair(sample)
        example: dict[str, Any] = {"pixel_values": self.pixels(pair.image)}
        if pair.captions:
            tokens = [self.tokens(text) for text in self._chosen(pair)]
            return example | {"tokens": tokens + [[]] * (self.captions - len(tokens))}
        if pair.label is not None:
            return example | {"label": int(pair.label)}
        return example

    def _chosen(self, pair: Pair) -> Sequence[str]:
        if self.captions:
            return pair.captions[: self.captions]
        if pair.text is not None:
            return [pair.text]
        return [pair.captions[int(torch.randint(len(pair.captions), ()))]]

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, cut at the model's length."""
        if not text.strip():
            raise DataError('Expected a caption, received an empty one. Remove the record, or pass bad_samples="skip".')
        # One text at a time: a batch would start threads, which worker processes do not survive.
        return self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]


class EncodedPairs(Dataset):
    """A data set of samples as examples."""

    def __init__(self, source: Any, encoder: PairEncoder) -> None:
        self.source = source
        self.encoder = encoder

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.encoder(self.source[index])

    @property
    def in_memory(self) -> bool:
        """Whether reading needs no decoding."""
        return is_in_memory(self.source)


class EncodedStream(MappedStream):
    """The same for a stream, with random numbers that belong to (seed, epoch, sample)."""

    def _mapped(self, samples: Iterable[tuple[int, Any]], in_worker: bool) -> Iterator[Any]:
        assert self.transform is not None
        for number, sample in samples:
            self._position += 1
            with nullcontext() if in_worker else preserved_generators():
                seed_generators(sample_key(self.seed, self.epoch, number))
                example = self.transform(sample)
            yield example


def collate(examples: Sequence[Mapping[str, Any]], pad_id: int, max_length: int, *, full: bool) -> dict[str, Tensor]:
    """A batch of examples. With `full`, texts are padded to the model's length: SigLIP was trained like that."""
    batch = {"pixel_values": torch.stack([example["pixel_values"] for example in examples])}
    if "label" in examples[0]:
        return batch | {"label": torch.tensor([example["label"] for example in examples])}
    if "tokens" not in examples[0]:
        return batch
    texts = [example["tokens"] for example in examples]
    shape = len(texts), len(texts[0])
    # In the place of a caption that is missing stands the first one, which then counts for nothing.
    rows = [{"input_ids": tokens or captions[0]} for captions in texts for tokens in captions]
    numbers = [caption_number(tokens) if tokens else 0 for captions in texts for tokens in captions]
    padded = pad(rows, pad_id, multiple_of=max_length if full else 8, max_length=max_length)
    inputs = {name: padded[name].view(*shape, -1) for name in ("input_ids", "attention_mask")}
    return batch | inputs | {"caption": torch.tensor(numbers).view(shape)}


def caption_number(tokens: Sequence[int]) -> int:
    """A number for a text, the same in every process; never 0.

    >>> caption_number([1, 2]) == caption_number([1, 2]), caption_number([1, 2]) == caption_number([2, 1])
    (True, False)
    """
    digest = hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
