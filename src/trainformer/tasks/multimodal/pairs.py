"""Data for two-tower models: images with captions or labels, as pixels and tokens. The shapes of a batch:

    pixel_values (B, 3, H, W) uint8     input_ids, attention_mask (B, C, L)     caption (B, C)

with C captions per image: one in training, `eval_captions` in evaluation. `caption` holds ids of the texts, equal for
equal tokens, and 0 for a missing caption. Images with labels have `label` (B,) instead of captions.
"""

from __future__ import annotations

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
from trainformer.tasks.language.embedding_data import text_key
from trainformer.tasks.multimodal.processor import Pixels


class Pair(NamedTuple):
    """A sample: an image, and captions or a label or neither. `text` is the caption to train on, if given."""

    image: Any
    text: str | None
    captions: Sequence[str]
    label: Any


def split_pair(sample: Any) -> Pair:
    """Split a sample: a mapping with `image` and `text` (or another common name), or (image, text or label).

    >>> split_pair({"image": "pixels", "caption": "a cat"})
    Pair(image='pixels', text='a cat', captions=['a cat'], label=None)
    >>> split_pair(("pixels", 3)).label
    3
    """
    image, label = split_sample(sample)
    caption = label
    if isinstance(sample, Mapping):
        caption = next((sample[name] for name in ("captions", *TEXT_COLUMNS) if sample.get(name) is not None), None)
    if isinstance(image, list | tuple):
        raise DataError(expected("samples of one image each", f"{len(image)} images"))
    if isinstance(caption, str):
        return Pair(image, caption, [caption], None)
    if isinstance(caption, list | tuple) and caption and all(isinstance(text, str) for text in caption):
        drawn = sample.get("text") if isinstance(sample, Mapping) else None
        return Pair(image, drawn if isinstance(drawn, str) else None, caption, None)
    return Pair(image, None, [], label)


@dataclass(frozen=True)
class PairEncoder:
    """Encode samples. `captions` is the number of captions per image; 0 draws one at random, for training."""

    pixels: Pixels
    tokenizer: Any
    max_length: int
    captions: int = 0

    def __call__(self, sample: Any) -> dict[str, Any]:
        """Return the pixels of a sample, with its tokens or label."""
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
        """Tokenise a text, truncated to the model's length."""
        if not text.strip():
            raise DataError('Expected a caption, received an empty one. Remove the record, or pass bad_samples="skip".')
        # One text at a time: a batch would start threads, which break forked worker processes.
        return self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]


class EncodedPairs(Dataset):
    """A dataset of encoded samples."""

    def __init__(self, source: Any, encoder: PairEncoder) -> None:
        self.source = source
        self.encoder = encoder

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.encoder(self.source[index])

    @property
    def in_memory(self) -> bool:
        """Whether samples can be read without decoding."""
        return is_in_memory(self.source)


class EncodedStream(MappedStream):
    """A stream of encoded samples, with generators seeded by (seed, epoch, sample)."""

    def _mapped(self, samples: Iterable[tuple[int, Any]], in_worker: bool) -> Iterator[Any]:
        assert self.transform is not None
        for number, sample in samples:
            self._position += 1
            with nullcontext() if in_worker else preserved_generators():
                seed_generators(sample_key(self.seed, self.epoch, number))
                example = self.transform(sample)
            yield example


def collate(examples: Sequence[Mapping[str, Any]], pad_id: int, max_length: int, *, full: bool) -> dict[str, Tensor]:
    """Collate examples. With `full`, texts are padded to the model's length, as SigLIP was trained."""
    batch = {"pixel_values": torch.stack([example["pixel_values"] for example in examples])}
    if "label" in examples[0]:
        return batch | {"label": torch.tensor([example["label"] for example in examples])}
    if "tokens" not in examples[0]:
        return batch
    texts = [example["tokens"] for example in examples]
    shape = len(texts), len(texts[0])
    # A missing caption is replaced by the first one; its id 0 excludes it.
    rows = [{"input_ids": tokens or captions[0]} for captions in texts for tokens in captions]
    ids = [caption_id(tokens) if tokens else 0 for captions in texts for tokens in captions]
    padded = pad(rows, pad_id, multiple_of=max_length if full else 8, max_length=max_length)
    inputs = {name: padded[name].view(*shape, -1) for name in ("input_ids", "attention_mask")}
    return batch | inputs | {"caption": torch.tensor(ids).view(shape)}


def caption_id(tokens: Sequence[int]) -> int:
    """A 64-bit hash of a text's tokens, the same in every process; never 0.

    >>> caption_id([1, 2]) == caption_id([1, 2]), caption_id([1, 2]) == caption_id([2, 1])
    (True, False)
    """
    return text_key(np.asarray(tokens)) or 1
